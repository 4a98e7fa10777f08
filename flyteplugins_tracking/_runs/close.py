"""End a run with the function's true status, and do what follows: its files kept, its report shown."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs.calls import Entry, Surroundings
from flyteplugins_tracking.loop_watch import LoopWatch
from flyteplugins_tracking.signals import TERMINATED, Watch

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Handle, Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedRun:
    """What a platform needs to show a run that has ended.

    Attributes:
        tracker: The tracker's name.
        id: The run's id.
        url: The run's page; None if it has none.
        exit_code: The status that the run ended with.
        summary: The run's last values.
        info: The rank whose run it was; None outside a distributed job.
        other_runs: How many runs the job has beside rank 0's.
        attempt: Which attempt of the task this is, from 0.
    """

    tracker: str
    id: str
    url: str | None
    exit_code: int
    summary: Mapping[str, Any]
    info: DistributedInfo | None
    other_runs: int
    attempt: int


def hand_out(entry: Entry, is_async: bool) -> Any:
    """See `lifecycle.hand_out`."""
    if entry.files is None or entry.around.hand_out is None:
        return None
    try:
        handed_out = entry.around.hand_out(*entry.files, is_async)
    except Exception:
        logger.warning("%s: download_logs=True: the files are no output of the task", entry.tracker, exc_info=True)
        return None
    return _handed_out(entry.tracker, handed_out) if is_async and handed_out is not None else None


async def _handed_out(tracker: str, handed_out: Any) -> None:
    try:
        await handed_out
    except Exception:
        logger.warning("%s: download_logs=True: the files are no output of the task", tracker, exc_info=True)


def entered_watch(tracker: Tracker, config: TrackingConfig, around: Surroundings) -> Watch | LoopWatch | None:
    """The one that can watch for this thread's run, if any can."""
    if around.is_simulated:
        return None
    watches = (WATCH, _LOOP_WATCH)
    return next((watch for watch in watches if watch.enter(tracker.package, config.finish_timeout_s)), None)


def leave(entry: Entry, exit_code: int) -> None:
    """End the run of a function that has ended with `exit_code`, unless others go on in it."""
    try:
        with nullcontext() if entry.watch is None else entry.watch.ending():
            _end(entry, TERMINATED if WATCH.terminated or _LOOP_WATCH.terminated else exit_code)
    finally:
        if entry.watch is not None:
            entry.watch.leave()
        if entry.aside is not None:
            entry.aside()


def _end(entry: Entry, exit_code: int) -> None:
    is_last = calls.end(entry, exit_code)  # from here on a signal does not end the run, but waits for this end
    owner = entry.owner
    if is_last:
        # A run that was opened again since its opener left is ended with that one's status, unless a signal ends it.
        opener_code = None if owner is None else owner.left_with
        _finish(owner or entry, exit_code if opener_code is None or exit_code == TERMINATED else opener_code)
    elif owner is entry and entry.handle is not None and entry.plan is not None and entry.plan.primary:
        _end_early(entry.tracker, entry.handle, exit_code)  # what the others log opens it again


def _finish(entry: Entry, exit_code: int) -> None:
    summary = _summary(entry, exit_code)
    try:
        if entry.handle is not None:
            entry.handle.finish(exit_code)
    except Exception:
        # The training has ended as it has: its tracker does not change that.
        logger.warning("%s: the run could not be finished with status %d", entry.tracker, exit_code, exc_info=True)
    finally:
        if entry.claim is not None:
            entry.claim.release()
    if entry.handle is None or entry.config is None:
        return
    if entry.around.keep is not None:
        in_time(entry.config.finish_timeout_s, _keep, entry.tracker, entry.handle, entry.around.keep)
    if summary is not None:
        in_time(entry.config.finish_timeout_s, _show, entry, exit_code, summary)


def _summary(entry: Entry, exit_code: int) -> Mapping[str, Any] | None:
    """The run's last values, if its task shows them. A task that is terminated has no time for that."""
    is_shown = entry.has_report and entry.around.show is not None and exit_code != TERMINATED
    if not is_shown or entry.handle is None or entry.plan is None or not entry.plan.primary:
        return None
    try:
        return entry.handle.summary()
    except Exception:
        logger.warning("%s: the task's report has no values of the run", entry.tracker, exc_info=True)
        return {}


def _show(entry: Entry, exit_code: int, summary: Mapping[str, Any]) -> None:
    assert entry.config is not None
    assert entry.handle is not None
    assert entry.around.show is not None
    entry.around.show(
        EndedRun(
            tracker=entry.tracker,
            id=entry.handle.id,
            url=entry.handle.url,
            exit_code=exit_code,
            summary=summary,
            info=entry.info,
            other_runs=_other_runs(entry.config, entry.info),
            attempt=entry.around.facts.get("attempt_number", 0),
        )
    )


def _other_runs(config: TrackingConfig, info: DistributedInfo | None) -> int:
    """How many runs the job has beside rank 0's."""
    if info is None or (config.run_mode != "new" and config.rank_scope == "global"):
        return 0
    return (info.world_size if config.run_mode == "new" else info.num_workers or 1) - 1


def _keep(tracker: str, handle: Handle, keep: Callable[[str], str]) -> None:
    """Copy to safety what the service has not got: this machine's files end with it."""
    for directory in handle.unsent():
        try:
            kept = keep(directory)
        except Exception:
            logger.warning("%s: %s could not be kept, and is lost with this machine", tracker, directory, exc_info=True)
        else:
            logger.warning(
                "%s: what the service has not got is kept at %s. Download it to %s, and send it: %s",
                tracker,
                kept,
                os.path.basename(directory),
                handle.how_to_send(os.path.basename(directory)),
            )


def in_time(timeout_s: float | None, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` in a thread of this context, and wait for it, at most so long if it may not end."""
    thread = threading.Thread(target=copy_context().run, args=(function, *args), daemon=True)
    thread.start()
    thread.join(timeout_s)


def _end_runs(exit_code: int) -> None:
    """End every run that is open here, whichever thread's, while the functions may go on."""
    owners = calls.owners()
    opened = [(owner.tracker, owner.handle) for owner in owners if owner.handle is not None]
    threads = [threading.Thread(target=_end_early, args=(*one, exit_code), daemon=True) for one in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_early(tracker: str, handle: Handle, exit_code: int) -> None:
    try:
        handle.end_early(exit_code)
    except Exception:
        logger.warning("%s: the run could not be ended with status %d", tracker, exit_code, exc_info=True)


WATCH = Watch(_end_runs)
_LOOP_WATCH = LoopWatch(_end_runs)

if hasattr(os, "register_at_fork"):
    for each in (WATCH, _LOOP_WATCH):
        os.register_at_fork(
            before=each.before_fork,
            after_in_parent=each.after_fork_in_parent,
            after_in_child=each.after_fork_in_child,
        )
