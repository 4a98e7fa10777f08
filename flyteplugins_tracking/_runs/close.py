"""End a run with the function's status. Then store its unsent files, and show it in the task's report."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.failures import Failure, Verdict
from flyteplugins_tracking._rank import jax
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._runs import calls, goodput
from flyteplugins_tracking._runs.calls import TrackedCall
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._runs.run import EndedRun, OpenRun
from flyteplugins_tracking._runs.sigterm.loop import AsyncioSigtermWatcher
from flyteplugins_tracking._runs.sigterm.main import SigtermWatcher
from flyteplugins_tracking._util.fork import register
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.trackers.config import TrackingConfig

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Tracker

logger = logging.getLogger(__name__)


def publish_files(run: OpenRun, directory: str, is_async: bool) -> Any:
    """Implement `lifecycle.publish_files` for a run with files."""
    try:
        published = run.context.publish_files(directory, run.handle.id, is_async)
    except Exception:
        _warn_unpublished(run.tracker)
        return None
    return _awaited(run.tracker, published) if is_async and published is not None else None


async def _awaited(tracker: str, published: Any) -> None:
    try:
        await published
    except Exception:
        _warn_unpublished(tracker)


def _warn_unpublished(tracker: str) -> None:
    logger.warning("%s: download_logs=True: the files did not become an output of the task", tracker, exc_info=True)


def start_watcher(
    tracker: Tracker, config: TrackingConfig, context: ExecutionContext
) -> SigtermWatcher | AsyncioSigtermWatcher | None:
    """Return the watcher that can watch in this thread, started; None if neither can."""
    if context.is_simulated:
        return None
    watchers = (WATCHER, _ASYNCIO_WATCHER)
    return next((watcher for watcher in watchers if watcher.start(tracker.package, config.finish_timeout_s)), None)


def close(call: TrackedCall, run: OpenRun, exit_code: int, failure: Failure | None = None) -> None:
    """Close `run` for a call that has ended with `exit_code`: finish it, unless other calls still use it.

    Args:
        call: The call.
        run: Its run.
        exit_code: The status of the call.
        failure: Why it has failed; None if it has not, or if that is not known.
    """
    try:
        with nullcontext() if call.watcher is None else call.watcher.closing():
            _close(call, run, _or_terminated(exit_code), failure)
    finally:
        if call.watcher is not None:
            call.watcher.stop()


def close_at_exit() -> None:
    """Close the runs that are open when the process ends: the vendors' own hooks would end them as finished.

    Such a run is that of a function in a daemon thread, or in an asyncio task that was left behind. It is called when a
    run was opened: hooks are called in the reverse order of their registration, so this one is before the vendor's.
    """
    atexit.unregister(_close_open_runs)
    atexit.register(_close_open_runs)


def _close_open_runs() -> None:
    for run in calls.open_runs():
        if not run.context.is_simulated:
            logger.warning(
                "%s: the process ends before the decorated function has returned, and with it run %s",
                run.tracker,
                run.handle.id,
            )
            _close_with_process(run)


def _close_with_process(run: OpenRun) -> None:
    """Close a run whose function has not returned: with status 1, or 143 after a SIGTERM."""
    run.has_ended_with_process = True
    if _terminated_at() is not None:
        _finish(run, TERMINATED, None)
        return
    rank = 0 if run.info is None else run.info.rank
    failure = Failure(rank, "unfinished", "the process ended before the function returned", exit_code=1)
    _finish(run, failure.exit_code, failure)


def _or_terminated(exit_code: int) -> int:
    return exit_code if _terminated_at() is None else TERMINATED


def _terminated_at() -> float | None:
    """Return when SIGTERM came to this process, in seconds of `time.monotonic`; None if it has not."""
    return WATCHER.terminated_at or _ASYNCIO_WATCHER.terminated_at


def _close(call: TrackedCall, run: OpenRun, exit_code: int, failure: Failure | None) -> None:
    is_last = calls.end(call, exit_code)  # from here on a signal does not finish the run, but waits for this call
    if run.has_ended_with_process:
        calls.mark_closed(run)
        return
    if is_last:
        # A run that was opened again since its opener left is ended with that one's status, unless a signal ends it.
        opener_code = run.opener_exit_code
        try:
            _finish(run, exit_code if opener_code is None or exit_code == TERMINATED else opener_code, failure)
        finally:
            calls.mark_closed(run)
    elif call.is_opener and run.plan.primary:
        _finish_on_signal(run, exit_code, failure)  # what the others log opens it again


def _warn_of_late_group(run: OpenRun) -> None:
    """Warn that this process was one of several, which its function alone has found out: each has had a run."""
    is_alone = run.info is None and not run.context.is_simulated
    group = (detect_process_group() or jax.world()) if is_alone else None
    if group is not None and group.world_size > 1:
        logger.warning(
            "%s: the function has connected %d ranks, of which this is rank %d. No launcher had told so at the call, "
            "so each rank has had a run like that of a single process. Call the decorated function after %s",
            run.tracker,
            group.world_size,
            group.rank,
            "jax.distributed.initialize()"
            if group.launcher == "jax"
            else "init_process_group(), or start with torchrun",
        )


def _finish(run: OpenRun, exit_code: int, failure: Failure | None) -> None:
    _warn_of_late_group(run)
    _await_writers(run, exit_code)
    exit_code = _final_status(run, _or_terminated(exit_code), failure)
    _record_goodput(run, exit_code)
    summary = _summary(run, exit_code)
    try:
        run.handle.finish(exit_code)
        _print_how_to_view(run)
    except Exception:
        # Tracker errors must not change the training's outcome.
        logger.warning("%s: the run could not be finished with status %d", run.tracker, exit_code, exc_info=True)
    finally:
        run.failures.stop()
        run.lock.release()
    if run.context.can_persist:
        run_with_timeout(run.config.finish_timeout_s, _persist, run)
    if summary is not None:
        run_with_timeout(run.config.finish_timeout_s, _render_report, run, exit_code, summary)


def _await_writers(run: OpenRun, exit_code: int) -> None:
    try:
        run.handle.await_writers(exit_code)
    except Exception:
        logger.warning("%s: the run does not wait for its other writers", run.tracker, exc_info=True)


def _final_status(run: OpenRun, exit_code: int, failure: Failure | None) -> int:
    """Keep with the run why its job has failed, and return the status that it ends with: of the rank that was first."""
    if exit_code in (0, INTERRUPTED):
        return exit_code
    verdict, is_new = run.failures.verdict(failure, _terminated_at())
    if verdict is None:
        return exit_code
    if is_new and run.plan.primary:
        _record_failure(run, verdict)
    return verdict.cause.exit_code


def _record_failure(run: OpenRun, verdict: Verdict) -> None:
    rank = 0 if run.info is None else run.info.rank
    is_own = verdict.cause.rank == rank  # Python prints its traceback
    if not is_own and not _is_one_of_many(run):
        logger.error("%s: the run has failed: %s", run.tracker, verdict.text)
    run.record("failure", verdict.summary, verdict.text)


def _record_goodput(run: OpenRun, exit_code: int) -> None:
    if run.attempts is None:
        return
    try:
        values = run.attempts.end(exit_code)
    except Exception:
        logger.warning("%s: the run does not show its goodput", run.tracker, exc_info=True)
        return
    if values:
        text = goodput.text_of(values)
        logger.info("%s: %s", run.tracker, text)
        run.record("goodput", values, text)


def _print_how_to_view(run: OpenRun) -> None:
    """Print how to look at the run: one line a job, or one a worker where each worker has its run."""
    if not run.plan.primary or _is_one_of_many(run) or run.context.is_simulated:
        return
    command = run.handle.how_to_view()
    if command:
        print(f"{run.tracker}: to look at run {run.handle.id}: {command}", file=sys.stderr)  # noqa: T201


def _is_one_of_many(run: OpenRun) -> bool:
    """Whether each rank has its run, and this is not the first: a line for each would be too many."""
    return run.config.run_mode == "new" and not run.plan.first


def _summary(run: OpenRun, exit_code: int) -> Mapping[str, Any] | None:
    """Return the run's last values, if its task shows them. A task that is terminated has no time for that."""
    if not run.shows_report or exit_code == TERMINATED or not run.plan.primary:
        return None
    try:
        return run.handle.summary()
    except Exception:
        logger.warning("%s: the task's report shows no values of the run", run.tracker, exc_info=True)
        return {}


def _render_report(run: OpenRun, exit_code: int, summary: Mapping[str, Any]) -> None:
    run.context.render_report(
        EndedRun(
            tracker=run.tracker,
            id=run.handle.id,
            url=run.handle.url,
            exit_code=exit_code,
            summary=summary,
            info=run.info,
            is_first=run.plan.first,
            other_runs=_other_runs(run.config, run.info),
            attempt=run.context.run_metadata.get("attempt_number", 0),
        )
    )


def _other_runs(config: TrackingConfig, info: DistributedInfo | None) -> int:
    """Return the number of runs that the job has besides the first."""
    if info is None or (config.run_mode != "new" and config.rank_scope == "global"):
        return 0
    return (info.world_size if config.run_mode == "new" else info.num_workers or 1) - 1


def _persist(run: OpenRun) -> None:
    """Copy the rows that the service has not received to storage: this machine's files are lost with it."""
    for directory in run.handle.unsent():
        try:
            address = run.context.persist(directory)
        except Exception:
            logger.warning(
                "%s: %s could not be copied to storage, and is lost with this machine",
                run.tracker,
                directory,
                exc_info=True,
            )
        else:
            name = os.path.basename(directory)
            logger.warning(
                "%s: rows that the service has not received are stored at %s. Download them to %s, and send them: %s",
                run.tracker,
                address,
                name,
                run.handle.how_to_send(name),
            )


def finish_on_signal(exit_code: int) -> None:
    """Finish all runs that are open in this process, also those of other threads, while the functions may continue."""
    runs = calls.open_runs()
    threads = [threading.Thread(target=_finish_on_signal, args=(run, exit_code), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _finish_on_signal(run: OpenRun, exit_code: int, failure: Failure | None = None) -> None:
    try:
        status = _final_status(run, exit_code, failure)
        _record_goodput(run, status)
        run.handle.finish_on_signal(status)
    except Exception:
        logger.warning("%s: the run could not be finished with status %d", run.tracker, exit_code, exc_info=True)
    if exit_code == TERMINATED and run.context.can_persist:  # the function may never return: it sits in a collective
        _persist(run)


WATCHER = register(SigtermWatcher(finish_on_signal))
_ASYNCIO_WATCHER = register(AsyncioSigtermWatcher(finish_on_signal))
