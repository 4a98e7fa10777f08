"""A run that this process has open, and one that has ended. A rank without a run does not load them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyteplugins_tracking._job.failures import FailureReader
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking._rank.plan import RunPlan
    from flyteplugins_tracking._runs.context import ExecutionContext
    from flyteplugins_tracking._runs.goodput import Attempts
    from flyteplugins_tracking._util.lock import RunLock
    from flyteplugins_tracking.trackers.base import Handle
    from flyteplugins_tracking.trackers.config import TrackingConfig

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenRun:
    """A run that this process has open.

    The call that opened it and the calls that joined it share it. The last of them finishes it, with the status of the
    opener.

    Attributes:
        tracker: The tracker's name.
        handle: The tracker's handle.
        vendor_run: The vendor's run object, as `get_run` returns it.
        plan: The plan of this rank.
        config: The arguments that the run was opened with.
        info: This rank; None outside a distributed job.
        context: The execution context that the run was opened in.
        lock: Keeps other processes from opening the run.
        failures: Reads why the job ends.
        attempts: The attempts of the run; None if no other attempt can have it, or if another rank keeps them.
        shows_report: Whether the run is to be shown in the task's report.
        published_dir: The local directory that becomes an output of the task when the run has ended; None for none.
        joined: The number of calls that use the run besides the opener.
        opener_exit_code: The status of the call that opened the run; None while it runs.
        closed: Set when the run has been closed.
        has_ended_with_process: Whether it was ended because the process ends, before its function has returned.
    """

    tracker: str
    handle: Handle
    vendor_run: Any
    plan: RunPlan
    config: TrackingConfig
    info: DistributedInfo | None
    context: ExecutionContext
    lock: RunLock
    failures: FailureReader
    attempts: Attempts | None
    shows_report: bool
    published_dir: str | None
    joined: int = 0
    opener_exit_code: int | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    has_ended_with_process: bool = False

    def record(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Keep an event with the run: see `Handle.record_event`. Raises nothing."""
        try:
            self.handle.record_event(name, values, text)
        except Exception:
            logger.warning("%s: the run does not show this: %s", self.tracker, text, exc_info=True)

    @property
    def is_in_use(self) -> bool:
        """Whether a call still uses the run."""
        return self.opener_exit_code is None or self.joined > 0


@dataclass(frozen=True)
class EndedRun:
    """The values that a platform needs to show a run that has ended.

    Attributes:
        tracker: The tracker's name.
        id: The run's id.
        url: The run's page; None if it has none.
        exit_code: The status that the run ended with.
        summary: The run's last values.
        info: The rank that had the run; None outside a distributed job.
        is_first: Whether it is the job's first run, whose primary shows those of all ranks.
        other_runs: The number of runs that the job has besides the first.
        attempt: The attempt of the task, from 0.
    """

    tracker: str
    id: str
    url: str | None
    exit_code: int
    summary: Mapping[str, Any]
    info: DistributedInfo | None
    is_first: bool
    other_runs: int
    attempt: int
