"""Why a job ends: each rank that fails reports it, and a rank that has a run reads who was first.

A rank reports before it exits, and so before its agent ends the others: whoever they are, they find the report.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flyteplugins_tracking._job import error_files, siblings
from flyteplugins_tracking._job.board import board_directory
from flyteplugins_tracking._job.failures import Failure, first_cause
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._runs import reports

logger = logging.getLogger(__name__)

# How long a rank that has only lost another one waits for that one's report.
_GRACE_S = 1.0
_POLL_S = 0.05
# A handler of torchelastic's, which its forked workers inherit, raises this on SIGTERM.
_TERMINATIONS = ("SignalException",)


def report(error: BaseException, failure: Failure, info: DistributedInfo) -> None:
    """Report the exception that leaves this rank's outermost decorated function to the other ranks. Raises nothing."""
    if type(error).__name__ in _TERMINATIONS:
        return
    if isinstance(error, Exception):
        error_files.write(failure, os.environ)
    reports.send(failure, info)


def withdraw(failure: Failure, info: DistributedInfo) -> None:
    """Take a report back: the function's caller has handled the exception, and calls a decorated function again."""
    error_files.remove(os.environ)
    reports.send(replace(failure, exit_code=0), info)


@dataclass(frozen=True)
class Verdict:
    """Why a job has failed.

    Attributes:
        cause: The first failure.
        others: The number of other ranks that have failed.
    """

    cause: Failure
    others: int

    @property
    def summary(self) -> Mapping[str, Any]:
        """The values for the run's summary."""
        cause = self.cause
        return {
            "failure/rank": cause.rank,
            "failure/host": cause.host,
            "failure/type": cause.type,
            "failure/message": cause.message,
        }

    @property
    def text(self) -> str:
        """The failure and its traceback, as one block."""
        return f"{self}\n{self.cause.traceback}".rstrip()

    def __str__(self) -> str:
        ranks = "rank" if self.others == 1 else "ranks"
        followers = f" ({self.others} other {ranks} failed too)" if self.others else ""
        return f"{self.cause}{followers}"


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
        self._reports: reports.Reports | None = None
        self._siblings: siblings.SiblingWatcher | None = None
        if self._info is not None:
            self._reports = reports.Reports(self._info, board_directory(self._info, os.environ))
            if siblings.can_watch(self._info):
                self._siblings = siblings.SiblingWatcher(self._info)
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None

    def stop(self) -> None:
        """Stop watching."""
        if self._reports is not None:
            self._reports.stop()
        if self._siblings is not None:
            self._siblings.stop()
            self._siblings = None

    def verdict(self, own: Failure | None, terminated_at: float | None) -> tuple[Verdict | None, bool]:
        """Return why the job ends, and whether this is the first time that it is known.

        It is None if no rank has failed, as far as this one can read.

        Args:
            own: The failure of this rank.
            terminated_at: When SIGTERM came to this process, in seconds of `time.monotonic`; None if it has not.
        """
        with self._lock:
            if self._verdict is not None:
                return self._verdict, False
            self._verdict = self._judge(own, terminated_at)
            return self._verdict, self._verdict is not None

    def _judge(self, own: Failure | None, terminated_at: float | None) -> Verdict | None:
        if self._info is None or (self._is_own_run and own is not None and not own.is_secondary):
            return None if own is None else Verdict(own, 0)
        deadline = time.monotonic() + _GRACE_S
        while True:
            failures = self._failures(self._info, own, terminated_at)
            cause = first_cause(failures)
            if cause is None or not cause.is_secondary or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        # A scheduler's SIGTERM ends other ranks too, and may cut off a collective of this one.
        is_preempted = terminated_at is not None and all(failure.rank == self._info.rank for failure in failures)
        return None if cause is None or (cause.is_secondary and is_preempted) else Verdict(cause, len(failures) - 1)

    def _failures(self, info: DistributedInfo, own: Failure | None, terminated_at: float | None) -> list[Failure]:
        """Return the first failure of each rank, in their order."""
        reported = [] if self._reports is None else self._reports.read()
        others = [*reported, *error_files.read(info, os.environ)]
        failures = [failure for failure in others if not _is_after_sigterm(failure, terminated_at)]
        failures += [] if own is None else [own]
        if self._siblings is not None:
            failures += self._siblings.failures(terminated_at)
        by_rank: dict[int, Failure] = {}
        for failure in failures:  # what a rank has reported itself says more than its exit
            by_rank.setdefault(failure.rank, failure)
        return sorted(by_rank.values(), key=lambda failure: failure.failed_at)


def _is_after_sigterm(failure: Failure, terminated_at: float | None) -> bool:
    """Whether a rank of this machine has failed since SIGTERM came to this process, and so because of its own SIGTERM.

    A handler may raise, and its exit cuts off the collectives of others. The failure that makes a launcher send SIGTERM
    is reported before. The clocks of other machines cannot be compared so closely.
    """
    if terminated_at is None or failure.host != socket.gethostname():
        return False
    return failure.failed_at > time.time() - (time.monotonic() - terminated_at)
