"""The agreement of a job's ranks to stop at the same call of `should_stop()`. It needs no collective.

Each rank counts its calls. A thread of each rank looks at the job's board, where one round decides:

    the rank that is asked to stop      the board             the thread of each rank
    opens round n                --->   round/n          ---> has its rank's next call wait, and then
                                        count/n/RANK     <--- puts how many calls its rank has made
                                        counted/n += 1
                                        decision/n       <--- the last one: stop at call 1 + the highest count
                                                         <--- anyone, when the time is over: no stop

`round/n` and `decision/n` are written by compare-and-set. So they are one thing to all ranks, however late each of them
comes. A rank that waits in its call waits for threads, and never for another rank's function: that one may sit in a
collective which needs this rank.

A rank is a member by a name that each process makes. The store may outlive an attempt: a round of ranks that have ended
is void.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from flyteplugins_tracking._job.board import Board, from_text, to_text
from flyteplugins_tracking._job.watch import WATCH, Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.text import in_words

logger = logging.getLogger(__name__)

# How often a rank looks for a round. With more than `_POLL_S * _RANKS_PER_S` ranks it looks less often, so that the
# store gets at most `_RANKS_PER_S` looks a second. The other pair is for the decision of a round.
_POLL_S, _RANKS_PER_S = 0.25, 1000
_FAST_POLL_S, _FAST_RANKS_PER_S = 0.02, 20_000
# How long a round waits for the counts of all ranks. A call that waits for the decision waits `_LATER_S` longer.
ROUND_S = 10.0
_LATER_S = 2.0
_WAIT_S = 0.005
# The member's name of a rank whose function has ended.
_LEFT = "left"


class CallCounter:
    """Counts the calls of `should_stop()` on one rank."""

    __slots__ = ("at_limit", "count", "limit")

    def __init__(self, limit: float, at_limit: Callable[[int], bool]) -> None:
        """`at_limit` is asked, with the number of the call, from call `limit` on: whether the function should stop."""
        self.count = 0
        self.limit = limit
        self.at_limit = at_limit

    def next(self) -> bool:
        """Count one more call, and return whether the function should stop."""
        # The counting comes before the reading: a thread that sets the limit, and then reads the count, knows that this
        # call will see the limit if the thread has not seen this call.
        self.count = count = self.count + 1
        return count >= self.limit and self.at_limit(count)


@dataclass(frozen=True)
class Stop:
    """The stop that the ranks have agreed on.

    Attributes:
        reason: Why.
        rank: The rank that was asked to stop.
        step: The call of `should_stop()` that is the first to return True.
    """

    reason: str
    rank: int
    step: int


@dataclass(frozen=True)
class StopRequest:
    """A request to stop.

    Attributes:
        reason: Why.
        timeout_s: How long it may take to agree; None for as long as the function runs.
        otherwise: Called in the thread, with the reason of the failure, if the ranks do not agree.
        made_at: When it was made, in seconds of `time.monotonic`.
    """

    reason: str
    timeout_s: float | None = None
    otherwise: Callable[[str], object] = lambda _: None
    made_at: float = field(default_factory=time.monotonic)

    def rest_s(self, now: float) -> float:
        """Return the seconds that are left of it."""
        return ROUND_S if self.timeout_s is None else self.made_at + self.timeout_s - now


@dataclass(frozen=True)
class _Round:
    """A round, as it stands on the board.

    Attributes:
        reason: Why the ranks are asked to stop.
        rank: The rank that asks them.
        members: The name of each rank's process.
        timeout_s: How long the round waits for the counts.
    """

    reason: str = ""
    rank: int = -1
    members: list[str] = field(default_factory=list)
    timeout_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """`timeout_s`, whatever the board says."""
        return min(self.timeout_s, ROUND_S)


@dataclass(frozen=True)
class _Decision:
    """The decision of a round, as it stands on the board.

    Attributes:
        step: The call at which the ranks stop; None if they do not.
        why: Why they do not. Empty if the round is void: a process that it names has ended, and the ranks are asked
            again.
    """

    step: int | None = None
    why: str = ""


class Agreement(Duty):
    """This rank's part in the agreement.

    A rank that is alone needs no thread: it stops at its next call.

    Attributes:
        committed: What the ranks have agreed on; None before.
        stopped_at: The first call that has returned True; None before.
        has_failed: Whether an urgent request has failed: this rank will agree to nothing more.
    """

    def __init__(
        self,
        info: DistributedInfo,
        topic: str,
        on_commit: Callable[[Stop], object] = lambda _: None,
    ) -> None:
        """Does nothing on the board yet.

        Args:
            info: This rank.
            topic: The topic of the board, the same on all ranks.
            on_commit: Called in the thread when the ranks have agreed, before `should_stop()` returns True.
        """
        self.counter = CallCounter(math.inf, self.at_limit)
        self.committed: Stop | None = None
        self.stopped_at: int | None = None
        self.has_failed = False
        self._info = info
        self.topic = topic
        self._on_commit = on_commit
        self._name = os.urandom(8).hex()
        self._requests: list[StopRequest] = []  # appended to by any thread, and by handlers of signals
        self._number = 1  # of the next round
        self._round: _Round | None = None  # the open one
        self._round_ends_at = 0.0
        self._missing: Sequence[int] = ()  # the ranks that were missing for the last round
        self._has_warned = False

    def request(self, request: StopRequest) -> None:
        """Ask for the stop. Takes no lock: handlers of signals call it."""
        if self._info.world_size == 1:
            self._stop_alone(request)
        else:
            self._requests.append(request)
            WATCH.wake(self)

    def at_limit(self, count: int) -> bool:
        """Return whether the function should stop at its call `count`. Waits for the decision of an open round."""
        while self.committed is None and count >= self.counter.limit:
            if time.monotonic() > self._round_ends_at + _LATER_S:  # the store has gone, or the thread
                return False
            time.sleep(_WAIT_S)
        if self.committed is None or count < self.committed.step:
            return False
        self.stopped_at = self.stopped_at or count
        return True

    def next_wait_s(self) -> float:
        ranks = self._info.world_size
        if self._round is not None:
            return max(_FAST_POLL_S, ranks / _FAST_RANKS_PER_S)
        return max(_POLL_S, ranks / _RANKS_PER_S)

    def begin(self, board: Board) -> None:
        """Become a member; again if the job has another board now."""
        with suppress(RuntimeError, OSError):  # the other board may have gone
            self._leave(_Decision())
        self._forget_round()
        super().begin(board)
        self.board.put(f"member/{self._info.rank}", self._name)
        self._number = self.board.count("decided") + 1

    def look(self) -> None:
        """Take part in a round, or open one if this rank is asked to stop."""
        if self.committed is not None:
            return
        try:
            self._look(time.monotonic())
        except (RuntimeError, OSError):
            self._forget_round()  # this rank will not hear of the decision
            raise

    def end(self, has_failed: bool) -> None:  # noqa: ARG002 both are the same to the others
        """Say that this rank's function has ended: then nobody waits for its count."""
        self._leave(_Decision(why=f"the function has ended on rank {self._info.rank}"))

    def _look(self, now: float) -> None:
        if self._round is None and self._requests and not self.has_failed:
            self._open_round(now)
        if self._round is None:
            self._join_round(now)
        elif (text := self.board.get(f"decision/{self._number}")) is not None:
            self._apply(self._round, text)
        elif now > self._round_ends_at:
            self._decide(_Decision(why=f"not all ranks have answered within {self._round.wait_s:.2g} s"))
        for request in list(self._requests):
            if request.rest_s(now) <= 0 and self.committed is None:
                self._give_up(request)

    # A round

    def _open_round(self, now: float) -> None:
        request = min(self._requests, key=lambda one: one.timeout_s is None)  # the urgent ones first
        if self.board.is_own:  # the job has no store in which the others could be asked: only this rank stops
            self._stop_alone(request)
            return
        members = [name or _LEFT for name in self.board.get_all([f"member/{rank}" for rank in self._ranks])]
        self._missing = [rank for rank, name in enumerate(members) if name == _LEFT]
        if not self._missing:
            timeout_s = min(ROUND_S, *(one.rest_s(now) for one in self._requests))
            opened = _Round(request.reason, self._info.rank, members, timeout_s)
            self.board.put_first(f"round/{self._number}", to_text(opened))
        elif now > request.made_at + ROUND_S and not self._has_warned:
            self._has_warned = True
            logger.warning("%s; waiting", _not_agreed(request.reason, _missing_text(self._missing)))

    def _find_round(self) -> None:
        text = self.board.get(f"round/{self._number}")
        self._round = None if text is None else from_text(_Round, text) or _Round()

    def _join_round(self, now: float) -> None:
        self._find_round()
        if self._round is None:
            return
        if not self._is_member(self._round):
            self._decide(_Decision())
        elif self.has_failed:
            self._decide(_Decision(why=f"rank {self._info.rank} is ending"))
        else:
            self._round_ends_at = now + self._round.wait_s
            self.counter.limit = 0  # the rank's next call waits
            count = self.counter.count  # read after the limit is set: see `CallCounter.next`
            self.board.put(f"count/{self._number}/{self._info.rank}", str(count))
            if self.board.count(f"counted/{self._number}", 1) == self._info.world_size:
                counts = self.board.get_all([f"count/{self._number}/{rank}" for rank in self._ranks])
                self._decide(_Decision(step=1 + max(int(count or 0) for count in counts)))

    def _decide(self, decision: _Decision) -> None:
        """Decide the open round, unless somebody was faster."""
        if self._round is not None:
            text = self.board.put_first(f"decision/{self._number}", to_text(decision))
            self._apply(self._round, text)

    def _apply(self, decided: _Round, text: str) -> None:
        is_member = self._is_member(decided)
        decision = from_text(_Decision, text) or _Decision(why="the decision on the job's board cannot be read")
        if is_member and decision.step is not None:
            self._commit(Stop(decided.reason, decided.rank, int(decision.step)))
        self._forget_round()
        self._number += 1
        if is_member and decision.why:
            for request in list(self._requests):
                if request.timeout_s is None:
                    self._fail(request, decision.why)
        if is_member and decided.rank == self._info.rank:  # once for each round
            self.board.count("decided", 1)

    def _stop_alone(self, request: StopRequest) -> None:
        if self.committed is None:
            self.committed = Stop(request.reason, self._info.rank, self.counter.count + 1)
            self.counter.limit = 0

    def _commit(self, stop: Stop) -> None:
        self._on_commit(stop)
        self.committed = stop
        self.counter.limit = stop.step

    def _forget_round(self) -> None:
        """Let a call go on that waits for the decision, unless the ranks stop."""
        self._round = None
        if self.committed is None:
            self.counter.limit = math.inf

    def _leave(self, decision: _Decision) -> None:
        """Be no member any more. If a round is open, the decision is this one, unless it is decided already."""
        self.board.put(f"member/{self._info.rank}", _LEFT)
        if self._round is None:  # it may have been opened since the last look
            self._find_round()
        self._decide(decision)

    @property
    def _ranks(self) -> range:
        return range(self._info.world_size)

    def _is_member(self, one: _Round) -> bool:
        """Whether a round asks this very process."""
        return len(one.members) == self._info.world_size and one.members[self._info.rank] == self._name

    # A request

    def _give_up(self, request: StopRequest) -> None:
        """Give an urgent request up; but not if the ranks have agreed in the last moment."""
        self._decide(_Decision(why=f"the time of {request.reason} on rank {self._info.rank} is over"))
        if self.committed is None:
            self.has_failed = True
            why = _missing_text(self._missing) if self._missing else f"it took longer than {request.timeout_s:g} s"
            self._fail(request, why)

    def _fail(self, request: StopRequest, why: str) -> None:
        with suppress(ValueError):
            self._requests.remove(request)
        logger.warning("%s", _not_agreed(request.reason, why))
        request.otherwise(why)


def _not_agreed(reason: str, why: str) -> str:
    return f"the ranks have not agreed on a step at which to stop ({reason}): {why}"


def _missing_text(missing: Sequence[int]) -> str:
    return f"{in_words('rank', missing)} {'does' if len(missing) == 1 else 'do'} not call should_stop()"
