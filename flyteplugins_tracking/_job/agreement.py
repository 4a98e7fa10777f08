"""The agreement of a job's ranks to stop at the same call of `should_stop()`. It needs no collective.

Each rank counts its calls. A thread of each rank looks at the job's board:

    the rank that is asked to stop      the board              the thread of each rank
    claims the number k                 claimed = k
    proposes to stop at call S    --->  proposal/k
                                        acks/k += 1      <---  if its rank has not made call S: promises to wait there
                                        decision/k       <---  the last one to promise: "commit"
                                                         <---  one that has passed S: "reject"; another S is proposed
                                                         <---  anyone, when the time is over: "abandon"

`decision/k` is written by compare-and-set. So it is one thing to all ranks, however late each of them comes. A rank
that reaches call S before the decision waits for it, and for nothing else. Its thread runs while it waits, and while it
sits in a collective.

A rank is a member by a name of its own for each attempt. The store may outlive an attempt: a proposal to ranks that
have ended is never believed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._rank.info import DistributedInfo

logger = logging.getLogger(__name__)

# How often a rank looks for a proposal; with more ranks than `_RANKS_PER_S` times that, the store gets so many looks a
# second. And how often it looks for a decision.
_POLL_S, _RANKS_PER_S = 0.25, 1000
_FAST_POLL_S, _FAST_RANKS_PER_S = 0.02, 20_000
# A proposal is so far ahead of the fastest rank: all threads have seen it by then. But one call is enough for a slow
# rank, since one that has passed it says so.
_AHEAD_S = 0.5
_PACE_S = 2.0
# How long a proposal waits for all ranks; a rank that has promised waits a moment longer.
PROPOSAL_S = 10.0
_LATER_S = 2.0
_WAIT_S = 0.005
_LEFT = "left"

Verdict = Literal["commit", "reject", "abandon"]


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
        return PROPOSAL_S if self.timeout_s is None else self.made_at + self.timeout_s - now


@dataclass
class _Proposal:
    """A proposal that is not decided, as this rank knows it."""

    number: int
    board: Board  # the function may have made a process group since, with another store
    seen_at: float
    is_read: bool = False
    is_ours: bool = False  # made to this very process
    stop: Stop = field(default_factory=lambda: Stop("", 0, 0))
    deadline: float = 0.0


class Agreement:
    """This rank's part in the agreement. Its methods `begin`, `look` and `end` are called in one thread.

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
        self._topic = topic
        self._on_commit = on_commit
        self._name = os.urandom(8).hex()
        self._requests: list[StopRequest] = []  # appended to by any thread, and by handlers of signals
        self._board: Board | None = None
        self._next = 1  # the first number that may not be decided
        self._proposal: _Proposal | None = None
        self._wait_until = 0.0  # how long a rank waits that has made its promise
        self._pace = _Pace()
        self._fastest = (0, 0.0)  # of the ranks that have rejected: the most calls, and the most calls a second
        self._rejections = 0
        self._missing: Sequence[int] = ()  # the ranks that were missing for the last proposal
        self._has_warned = False

    def request(self, request: StopRequest) -> None:
        """Ask for the stop. Takes no lock: handlers of signals call it."""
        self._requests.append(request)

    def at_limit(self, count: int) -> bool:
        """Return whether the function should stop at its call `count`. Waits for a decision that is due."""
        while self.committed is None:
            if count < self.counter.limit:
                return False  # rejected, or abandoned
            if time.monotonic() > self._wait_until:  # the store has gone, or the thread
                self.counter.limit = math.inf
                return False
            time.sleep(_WAIT_S)
        if self.stopped_at is None:
            self.stopped_at = count
        return True

    def next_wait_s(self) -> float:
        """Return how long the thread waits before the next `look`."""
        ranks = self._info.world_size
        if self._proposal is not None:
            return max(_FAST_POLL_S, ranks / _FAST_RANKS_PER_S)
        return max(_POLL_S, ranks / _RANKS_PER_S)

    def begin(self, board: Board) -> None:
        """Become a member; again if the job has another board now."""
        self._board = board = board.of_topic(self._topic)
        board.put(f"member/{self._info.rank}", self._name)
        self._next = max(1, board.count("claimed"))
        if board.get(f"decision/{self._next}") is not None:
            self._next += 1  # an earlier attempt's: what ranks that have ended have agreed on is nothing to this one

    def look(self, board: Board) -> None:  # noqa: ARG002 that of `begin`, with this topic
        """Answer a proposal, or make one if this rank is asked to stop."""
        now = time.monotonic()
        self._pace.add(now, self.counter.count)
        if self.committed is not None or self._board is None:
            return
        if self._proposal is None and self._board.count("claimed") >= self._next:
            self._proposal = _Proposal(self._next, self._board, now)
        if self._proposal is not None:
            self._follow_anywhere(self._proposal, now)
        elif self._requests and not self.has_failed:
            self._propose(self._board, now)
        for request in list(self._requests):
            if request.rest_s(now) <= 0 and self.committed is None:
                self._expire(request)

    def end(self, board: Board, has_failed: bool) -> None:  # noqa: ARG002 as for `look`
        """Say that this rank's function has ended: then nobody waits for its promise."""
        if self._board is not None:
            self._board.put(f"member/{self._info.rank}", _LEFT)
            if self._proposal is not None and self.committed is None:
                self._decide(self._proposal, "abandon", why=f"the function has ended on rank {self._info.rank}")

    def close(self) -> None:
        """Do nothing."""

    # A proposal

    def _follow_anywhere(self, proposal: _Proposal, now: float) -> None:
        """Follow a proposal; forget it if its board was another one, and has gone."""
        try:
            self._follow(proposal, now)
        except (ValueError, TypeError, LookupError, RecursionError):
            self._proposal = None  # no text of a rank's
            self._next = max(self._next, proposal.number + 1)
            logger.warning("a proposal to stop is left out: its text on the job's board cannot be read")
        except (RuntimeError, OSError):
            if proposal.board is self._board:
                raise
            self._proposal = None  # a rank that has promised waits until the deadline

    def _follow(self, proposal: _Proposal, now: float) -> None:
        if not proposal.is_read:
            text = proposal.board.get(f"proposal/{proposal.number}")
            if text is not None:
                self._read(proposal, json.loads(text), now)
        decision = proposal.board.get(f"decision/{proposal.number}")
        if decision is not None:
            self._apply(proposal, json.loads(decision))
        elif not proposal.is_read:
            if now > proposal.seen_at + PROPOSAL_S:  # its rank has ended
                self._decide(proposal, "abandon", why="the rank that has claimed a proposal has not made it")
        elif now > proposal.deadline:
            self._decide(proposal, "abandon", why=f"not all ranks have answered within {PROPOSAL_S:g} s")

    def _read(self, proposal: _Proposal, content: dict[str, Any], now: float) -> None:
        proposal.is_read = True
        proposal.stop = Stop(content["reason"], content["rank"], content["step"])
        proposal.deadline = now + content["timeout_s"]
        members = content["members"]
        proposal.is_ours = len(members) == self._info.world_size and members[self._info.rank] == self._name
        if not proposal.is_ours or self.has_failed:
            self._decide(proposal, "reject", why=f"rank {self._info.rank} is not the one that it is made to")
        else:
            self._answer(proposal)

    def _answer(self, proposal: _Proposal) -> None:
        """Promise to wait at the proposed call, unless this rank has made it."""
        self._wait_until = proposal.deadline + _LATER_S
        self.counter.limit = proposal.stop.step
        count = self.counter.count  # read after the limit is set: see `CallCounter.next`
        if count >= proposal.stop.step:
            self._decide(proposal, "reject", count=count, per_s=self._pace.per_s())
        elif proposal.board.count(f"acks/{proposal.number}", 1) == self._info.world_size:
            self._decide(proposal, "commit")

    def _decide(self, proposal: _Proposal, verdict: Verdict, **more: Any) -> None:
        """Decide a proposal, unless somebody was faster."""
        text = json.dumps({"verdict": verdict, **more})
        self._apply(proposal, json.loads(proposal.board.put_first(f"decision/{proposal.number}", text)))

    def _apply(self, proposal: _Proposal, decision: dict[str, Any]) -> None:
        if self._proposal is not proposal:
            return  # this rank has decided it, and has read that
        self._proposal = None
        if proposal.board is self._board:
            self._next = proposal.number + 1
        if decision["verdict"] == "commit" and proposal.is_ours:
            self._commit(proposal.stop)
            return
        self.counter.limit = math.inf
        if decision["verdict"] == "reject":
            count, per_s = self._fastest
            self._fastest = max(count, decision.get("count", 0)), max(per_s, decision.get("per_s", 0.0))
            self._rejections += 1
        elif decision["verdict"] == "abandon":
            for request in list(self._requests):
                if request.timeout_s is None:
                    self._fail(request, decision["why"])

    def _commit(self, stop: Stop) -> None:
        self._on_commit(stop)
        self.committed = stop
        self.counter.limit = stop.step

    # A request

    def _propose(self, board: Board, now: float) -> None:
        request = min(self._requests, key=lambda one: one.timeout_s is None)  # the urgent ones first
        if board.is_of_machine and self._info.local_world_size != self._info.world_size:
            # The job has other nodes, and no store in which they could be asked: only this rank stops.
            self._commit(Stop(request.reason, self._info.rank, self.counter.count + 1))
            self.counter.limit = 0
            return
        members = board.get_all([f"member/{rank}" for rank in range(self._info.world_size)])
        self._missing = [rank for rank, name in enumerate(members) if name in (None, _LEFT)]
        if self._missing:
            if now > request.made_at + PROPOSAL_S and not self._has_warned:
                self._has_warned = True
                logger.warning("%s; waiting", _not_agreed(request.reason, _missing_text(self._missing)))
            return
        number = board.count("claimed", 1)
        count, per_s = self._fastest
        ahead_s = max(_AHEAD_S, 2 * self.next_wait_s()) * 2 ** min(self._rejections, 3)
        margin = max(1, math.ceil(max(per_s, self._pace.per_s()) * ahead_s))
        content = {
            "reason": request.reason,
            "rank": self._info.rank,
            "step": max(count, self.counter.count) + margin,
            "members": members,
            "timeout_s": min(PROPOSAL_S, *(one.rest_s(now) for one in self._requests)),
        }
        board.put(f"proposal/{number}", json.dumps(content))
        if number == self._next:
            self._proposal = _Proposal(number, board, now)
            self._follow(self._proposal, now)

    def _expire(self, request: StopRequest) -> None:
        """Give an urgent request up; but not if the others have agreed in the last moment."""
        if self._proposal is not None and self._proposal.is_ours:
            self._decide(
                self._proposal, "abandon", why=f"the time of {request.reason} on rank {self._info.rank} is over"
            )
        if self.committed is None:
            self.has_failed = True
            why = _missing_text(self._missing) if self._missing else f"it took longer than {request.timeout_s:g} s"
            self._fail(request, why)

    def _fail(self, request: StopRequest, why: str) -> None:
        with suppress(ValueError):
            self._requests.remove(request)
        logger.warning("%s", _not_agreed(request.reason, why))
        request.otherwise(why)


class OwnStop:
    """The flag of a process that has no other ranks. As `Agreement`, without a thread."""

    def __init__(self) -> None:
        self.counter = CallCounter(math.inf, self.at_limit)
        self.committed: Stop | None = None
        self.stopped_at: int | None = None
        self.has_failed = False

    def request(self, request: StopRequest) -> None:
        """Have the next call of `should_stop()` return True."""
        if self.committed is None:
            self.committed = Stop(request.reason, 0, self.counter.count + 1)
            self.counter.limit = 0

    def at_limit(self, count: int) -> bool:
        """Return True, and remember the first call that does."""
        if self.stopped_at is None:
            self.stopped_at = count
        return True


class _Pace:
    """How many calls of `should_stop()` a rank makes in a second."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        self._counts.append((now, count))
        while len(self._counts) > 2 and self._counts[1][0] < now - _PACE_S:
            self._counts.popleft()

    def per_s(self) -> float:
        (began, first), (ended, last) = self._counts[0], self._counts[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


def _not_agreed(reason: str, why: str) -> str:
    return f"the ranks have not agreed on a step at which to stop ({reason}): {why}"


def _missing_text(missing: Sequence[int]) -> str:
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"rank {ranks} does not call should_stop()" if len(missing) == 1 else f"ranks {ranks} do not call should_stop()"
    )
