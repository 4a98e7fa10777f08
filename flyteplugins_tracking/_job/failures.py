"""Why a job ends: each rank that fails announces it to the others, and a rank that has a run reads who was first.

A rank announces its failure before it exits, and so before its agent ends the others: whoever they are, they find the
notice on the job's board. With its node, the store may end too. So ranks of other nodes read notices as they come, and
acknowledge them: a rank that fails waits a moment for that.

The exits of this machine's ranks (`siblings`) tell of those that announce nothing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flyteplugins_tracking._job import siblings
from flyteplugins_tracking._job.board import from_text, is_torch_loaded, job_board, to_text
from flyteplugins_tracking._job.failure import Failure, Verdict, first_cause
from flyteplugins_tracking._job.watch import WATCH, Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking._util.threads import run_with_timeout, wait_until
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)
# A handler of torchelastic's, which its forked workers inherit, raises this on SIGTERM.
_TERMINATION = "SignalException"
# How long a rank that has only lost another one waits for that one's notice.
_GRACE_S = 1.0
_GRACE_POLL_S = 0.05
# How many old notices are read at first, and new ones in all. The board may have those of earlier attempts.
_MOST_NOTICES = 1000
# How long the store may take to be read; and after a SIGTERM, for which a loop with `should_stop()` has waited: the
# process has 4 s left then.
_READ_S, _READ_LATE_S = 3.0, 1.0
# How long the store may take to get a notice: a rank that fails early may have to import torch for it.
_SEND_S = 10.0
# How long a rank that fails waits until a rank of another node has read its notice.
_ACKNOWLEDGED_S = 1.0
_ACKNOWLEDGED = "read"
_POLL_S = 0.1
# An exit code has 32 bits.
_LARGEST_CODE = 2**31
# The file that torchelastic's agent prints when the job ends.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


# What a rank that fails does


def announce_failure(error: BaseException, failure: Failure, info: DistributedInfo) -> None:
    """Tell the other ranks of the exception that leaves this rank's outermost decorated function."""
    if type(error).__name__ == _TERMINATION:
        return
    _write_error_file(failure, os.environ)
    _put_notice(failure, info)


def withdraw_failure(failure: Failure, info: DistributedInfo) -> None:
    """Take a notice back: the function's caller has handled the exception, and calls a decorated function again."""
    with suppress(OSError, KeyError):
        os.remove(os.environ[_ERROR_FILE])
    _put_notice(replace(failure, exit_code=0), info)


def _put_notice(failure: Failure, info: DistributedInfo) -> None:
    if info.world_size > 1:
        run_with_timeout(_SEND_S, _append_notice, failure, info)


def _append_notice(failure: Failure, info: DistributedInfo) -> None:
    with suppress(RuntimeError, OSError):  # the store has gone: with rank 0, or its node
        board = job_board(info, os.environ, _topic(failure.is_secondary))
        if board is None:  # the others see how this process ends
            return
        before = board.count(_ACKNOWLEDGED)
        board.append(to_text(failure))
        if not _has_other_nodes(info) or not failure.exit_code or failure.is_secondary:
            return
        wait_until(lambda: board.count(_ACKNOWLEDGED) > before, _ACKNOWLEDGED_S, _POLL_S / 4)


def _has_other_nodes(info: DistributedInfo) -> bool:
    return info.local_world_size != info.world_size


def _topic(is_secondary: bool) -> str:
    """Return the board's topic: causes and their echoes are apart, so that thousands of echoes do not hide a cause."""
    return "failures/secondary" if is_secondary else "failures/causes"


def _write_error_file(failure: Failure, env: Mapping[str, str]) -> None:
    """Write the failure as `record` does, unless the file is there.

    The agent may read it at any time, and does not restart the job if it is not whole.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/multiprocessing/errors/error_handler.py
    """
    path = env.get(_ERROR_FILE)
    if not path or os.path.exists(path):
        return
    details = {"py_callstack": failure.traceback, "timestamp": str(int(time.time()))}
    message = {"message": {"message": f"{failure.type}: {failure.message}", "extraInfo": details}}
    with suppress(OSError):
        replace_whole(Path(path), json.dumps(message))


# What a rank that has a run does


class _Notices(Duty):
    """The failure notices of the other ranks in this attempt. The watch reads and acknowledges those of other nodes."""

    topic = "failures"

    def __init__(self, info: DistributedInfo) -> None:
        """Does nothing on the board yet."""
        self._info = info
        self._started_at = proc.started_at()
        self._starts: dict[bool, int] = {}
        self._found: dict[bool, dict[int, Failure | None]] = {False: {}, True: {}}

    def read(self, limit_s: float) -> list[Failure]:
        """Return the failures of all notices, as far as the store answers in so many seconds."""
        if self._info.launcher != "torchelastic" or is_torch_loaded():
            # Importing torch takes seconds, which a process that is being terminated may not have.
            run_with_timeout(limit_s, self._read_all)
        found = [notice for of_topic in self._found.values() for notice in list(of_topic.values())]
        notices = [notice for notice in found if notice is not None and abs(notice.exit_code) < _LARGEST_CODE]
        withdrawn = {(notice.rank, notice.failed_at) for notice in notices if not notice.exit_code}
        return [
            notice
            for notice in notices  # the board may outlive an attempt
            if (notice.rank, notice.failed_at) not in withdrawn and notice.failed_at > self._started_at
        ]

    def are_there(self) -> bool:
        """Whether there are some, in the watch's store or in torchelastic's, which lasts longer than any rank."""
        is_elastic = self._info.launcher == "torchelastic" and is_torch_loaded()
        if is_elastic or not self.board.is_own:
            with suppress(RuntimeError):  # there is no thread to be had
                run_with_timeout(_GRACE_S, self._read_all)
        return any(self._found.values())

    def next_wait_s(self) -> float:
        return _POLL_S

    def look(self) -> None:
        """Read and acknowledge causes as they come, once there is a store."""
        if self._read_new(False):
            self.board.of_topic(_topic(False)).count(_ACKNOWLEDGED, 1)

    def _read_all(self) -> None:
        with suppress(RuntimeError, OSError):
            if self.board.is_own:  # the watch reads no other one
                self.board = job_board(self._info, os.environ, self.topic) or self.board
            self._read_new(False)
            self._read_new(True)

    def _read_new(self, is_secondary: bool) -> bool:
        """Read what is new, and return whether there was something. Two threads may do so together."""
        found = self._found[is_secondary]
        if len(found) > _MOST_NOTICES:  # more than a job has, and than can be kept: a peer has made them up
            return False
        board = self.board.of_topic(_topic(is_secondary))
        if is_secondary not in self._starts:
            self._starts[is_secondary] = max(0, board.count("texts") - _MOST_NOTICES)
        texts = board.texts(self._starts[is_secondary], found)
        found.update({number: from_text(Failure, text) for number, text in texts.items()})
        return bool(texts)


class FailureReader:
    """Reads, for one open run, why its job ends. The first answer stays."""

    def __init__(self, info: DistributedInfo | None, is_alone: bool, is_own_run: bool) -> None:
        """Watch the other ranks of this machine from here on.

        Args:
            info: This rank; None outside a distributed job.
            is_alone: Whether no other rank can tell anything.
            is_own_run: Whether the run is this rank's alone: if its code has failed, that is why the run has.
        """
        self._info = None if is_alone else info
        self._is_own_run = is_own_run
        self._notices: _Notices | None = None
        self._siblings: siblings.Siblings | None = None
        if self._info is not None:
            self._watch(self._info)
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None

    def _watch(self, info: DistributedInfo) -> None:
        if siblings.can_watch(info):
            self._siblings = siblings.Siblings(info)
            WATCH.add(info, self._siblings, without="a rank of this machine that is killed may not be named")
        self._notices = _Notices(info)
        if _has_other_nodes(info):
            WATCH.add(info, self._notices, without="a failure on another node may not be named")

    def add_ranks(self, info: DistributedInfo | None) -> None:
        """Read the notices of ranks that the function has started and connected, as Lightning's launcher does."""
        if self._info is None and info is not None:
            self._info, self._notices = info, _Notices(info)

    def stop(self) -> None:
        """Stop watching."""
        WATCH.remove(*filter(None, (self._siblings, self._notices)))

    def verdict(
        self, own: Failure | None, terminated_at: float | None, *, has_succeeded: bool = False
    ) -> tuple[Verdict | None, bool]:
        """Return why the job ends, and whether this is the first time that it is known.

        It is None if no rank has failed, as far as this one can read.

        Args:
            own: The failure of this rank.
            terminated_at: When SIGTERM came to this process, in seconds of `time.monotonic`; None if it has not.
            has_succeeded: Whether this rank has. The job has failed all the same if another rank has before.
        """
        if has_succeeded and not self._has_another_failed():
            return None, False
        with self._lock:
            if self._verdict is not None:
                return self._verdict, False
            self._verdict = self._judge(own, terminated_at, has_succeeded)
            return self._verdict, self._verdict is not None

    def _has_another_failed(self) -> bool:
        """Whether another rank may have failed. A job without such a rank does not wait.

        A rank whose caller handles its exception ends without an error, which is waited for a moment.
        """
        info = self._info
        if info is None or self._is_own_run or not self._is_another_failing():
            return False

        def have_ended() -> bool:
            running = set() if self._siblings is None else self._siblings.running()  # this rank is not among them
            return all(failure.rank not in running for failure in self._announced())

        wait_until(have_ended, _GRACE_S, _GRACE_POLL_S)
        return True

    def _is_another_failing(self) -> bool:
        has_ended = self._siblings is not None and bool(self._siblings.failures(None, with_unknown=False))
        return has_ended or (self._notices is not None and self._notices.are_there())

    def _judge(self, own: Failure | None, terminated_at: float | None, has_succeeded: bool) -> Verdict | None:
        if self._info is None or (self._is_own_run and own is not None and not own.is_secondary):
            return None if own is None else Verdict(own, 0)
        deadline = time.monotonic() + _GRACE_S
        while True:
            failures = self._failures(self._info, own, terminated_at, has_succeeded)
            cause = first_cause(failures)
            if cause is None or not cause.is_secondary or time.monotonic() > deadline:
                break
            time.sleep(_GRACE_POLL_S)
        # A scheduler's SIGTERM ends other ranks too, and may cut off a collective of this one.
        is_preempted = terminated_at is not None and all(failure.rank == self._info.rank for failure in failures)
        if cause is None or (cause.is_secondary and is_preempted):
            return None
        return Verdict(cause, sum(not failure.is_secondary for failure in failures if failure is not cause))

    def _announced(self, limit_s: float = _READ_S) -> list[Failure]:
        try:
            return [] if self._notices is None else self._notices.read(limit_s)
        except (TypeError, ValueError, RuntimeError):  # the last one: no thread can be started
            _warn_once("notices", "the failures that other ranks have announced cannot be read", exc_info=True)
            return []

    def _failures(
        self, info: DistributedInfo, own: Failure | None, terminated_at: float | None, has_succeeded: bool
    ) -> list[Failure]:
        """Return the first failure of each rank, in their order."""
        announced = self._announced(_READ_S if terminated_at is None else _READ_LATE_S)
        failures = [failure for failure in announced if not _is_after_sigterm(failure, terminated_at)]
        failures += [] if own is None else [own]
        if self._siblings is not None:
            # Of a rank that has returned, or may have, the caller has handled the exception.
            returned = {info.rank, *self._siblings.returned()} if has_succeeded else set()
            failures = [failure for failure in failures if failure.rank not in returned]
            failures += self._siblings.failures(terminated_at, with_unknown=not has_succeeded)
        by_rank: dict[int, Failure] = {}
        for failure in failures:  # what a rank has announced itself says more than its exit
            by_rank.setdefault(failure.rank, failure)
        return sorted(by_rank.values(), key=lambda failure: failure.failed_at)


def _is_after_sigterm(failure: Failure, terminated_at: float | None) -> bool:
    """Whether a rank of this machine has failed since SIGTERM came to this process, and so because of its own SIGTERM.

    A handler may raise, and its exit cuts off the collectives of others. The failure that makes a launcher send SIGTERM
    is announced before. The clocks of other machines cannot be compared so closely.
    """
    if terminated_at is None or failure.host != socket.gethostname():
        return False
    return failure.failed_at > time.time() - (time.monotonic() - terminated_at)
