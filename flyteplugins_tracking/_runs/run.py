"""A run that this process has open: how it is opened, ended early and closed. Only ranks with a run load this module.

Three verbs end a run. `finish` is the vendor's: the handle ends the run at the service. `close` is the library's: no
call uses the run any more. `end_early` is a finish that comes while a function may still log: the next row opens the
run again.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.failures import Failure, FailureReader
from flyteplugins_tracking._rank import jax
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking._runs import ended, goodput
from flyteplugins_tracking._runs.call import Call, state
from flyteplugins_tracking._runs.goodput import Attempts
from flyteplugins_tracking._runs.request import plan_of, request_of
from flyteplugins_tracking._runs.sigterm import ForkMask, LoopWatcher, MainThreadWatcher
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import OwnLock, register
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerNotInstalledError, TrackingError
from flyteplugins_tracking.trackers.base import Uncounted

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)


# Vendors' clients are not set up safely by several threads: one could see wandb's settings half read.
_opening = register(OwnLock())


def open_run(call: Call) -> Run:
    """Open the run of a call, or join it if this process has it open. SIGTERM is watched from here on.

    Raises:
        TrackerNotInstalledError: The vendor's package is missing.
        TrackerUnavailableError: The service, or a key for it, is missing.
        IdentityError: The ranks cannot agree on an id.
    """
    config, tracker, info = call.config, call.tracker, call.info
    start_watching(call, config.finish_timeout_s)
    with ExitStack() as undo:
        # From here on, and not when the run is open: that may take seconds, and a rank may die meanwhile.
        is_alone = call.is_simulated or info is None or info.world_size == 1
        failures = FailureReader(info, is_alone=is_alone, is_own_run=config.run_mode == "new")
        undo.callback(failures.stop)
        planned = plan_of(call)
        with _opening.lock:
            joined = _join_callers_run(call, planned)
            if joined is not None:
                return joined
            _warn_of_unused_arguments(call, planned)
            deadline = time.monotonic() + config.init_timeout_s
            run_plan, lock = _lock_run(call, planned)
            undo.callback(lock.release)
            # Only one rank keeps the attempts of a run, and only if another attempt can find it.
            can_continue = run_plan.run_id is not None and run_plan.primary and not call.is_simulated
            attempts = Attempts(config.step_metric) if can_continue else None
            watch = call.watcher or WATCHER
            request = request_of(call, planned, run_plan, watch, attempts or Uncounted(), deadline)
            require(tracker)
            handle = _opened(tracker, request)
            run = Run(call, run_plan, handle, attempts, failures, undo.pop_all())
            # Called once a run is open: hooks run in the reverse order of their registration, and the vendor's would
            # end the run as finished.
            atexit.unregister(_close_with_process)
            atexit.register(_close_with_process)
            if attempts is not None:
                attempts.begin(handle, request.is_retry)
            with state.lock:
                state.runs.append(run)
            return run


def _join_callers_run(call: Call, planned: RunPlan) -> Run | None:
    """Join the run of the calling task if this process has it open: a container may run several tasks."""
    if planned.primary or call.info is not None:
        return None
    with state.lock:
        own = [run for run in state.runs if (run.tracker.name, run.handle.id) == (call.tracker.name, planned.run_id)]
        for run in own:
            if run.users > 0:
                run.users += 1
                return run
    for run in own:  # wandb-core refuses the id until the run is closed
        run.closed.wait(call.config.init_timeout_s)
    return None


def _warn_of_unused_arguments(call: Call, planned: RunPlan) -> None:
    if not planned.first:
        return
    config, warning = call.config, f"{call.tracker.name}: %s is ignored: %s"
    if config.rank_prefix and config.run_mode != "shared":
        reason = f"with run_mode={config.run_mode!r} each run has one writer. Use run_mode='shared'"
        logger.warning(warning, "rank_prefix=True", reason)
    if config.rollback == "rewind":
        more = "Rows that are logged again after a restart are kept"
        if config.run_mode == "shared":
            logger.warning(warning, "rollback='rewind'", f"several ranks write to the run. {more}")
        elif config.has_roles:
            logger.warning(warning, "rollback='rewind'", f"several jobs write to the run. {more}")
        elif not getattr(call.tracker, "rewinds", False):
            logger.warning(warning, "rollback='rewind'", f"the service cannot do that. {more}")
    if config.download_logs and call.info is not None:
        reason = f"the training has {call.info.world_size} ranks, and a task's output comes from one process"
        logger.warning(warning, "download_logs=True", reason)
    elif config.download_logs and not call.context.can_publish_files:
        logger.warning(warning, "download_logs=True", "the function does not run as a Flyte task")


def _lock_run(call: Call, planned: RunPlan) -> tuple[RunPlan, RunLock]:
    """Lock the run against other processes and threads of this machine: two writers would lose each other's rows.

    A child process has the variables of its rank, and the user's id may be in use. If the lock is taken, the run gets
    another id. An earlier attempt that is still ending is waited for.
    """
    if planned.run_id is None or not planned.ends_run or call.is_simulated:
        return planned, RunLock()
    config, name = call.config, call.tracker.name
    lock = RunLock.acquire(f"{name}/{config.project}/{planned.run_id}", timeout_s=config.init_timeout_s / 2)
    if lock is not None:
        return planned, lock
    new_id = f"{planned.run_id}-{os.urandom(3).hex()}"
    logger.warning("%s: run %s is open in another process or thread: this one is %s", name, planned.run_id, new_id)
    return replace(planned, run_id=new_id), RunLock()


def require(tracker: Tracker) -> None:
    """Check that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: The package is missing, or an import of it has ended early in this process.
    """
    from importlib.util import find_spec

    from flyteplugins_tracking.trackers.vendor_parts import known_faults

    package = tracker.package
    for fault in known_faults(package or tracker.name):
        _warn_once(fault.text, "%s: %s. Install another version: %s", tracker.title, fault.text, fault.fix)
    if package is None or package in sys.modules:
        return
    if find_spec(package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or package}")
    if any(name.startswith(f"{package}.") for name in sys.modules):  # an import of it has ended early, as by Ctrl-C
        try:
            import_module(package)
        except Exception as error:
            raise TrackerNotInstalledError(
                f"{package} cannot be imported, since an earlier import of it in this process was interrupted or has "
                f"failed: start the process again ({error})"
            ) from error


def _opened(tracker: Tracker, request: RunRequest) -> Handle:
    """Open the run at the service.

    Raises:
        TrackerNotInstalledError: The vendor's package cannot be imported, as when a package that it needs is too old.
    """
    try:
        return tracker.open(request)
    except Exception as error:
        if isinstance(error, TrackingError) or tracker.package is None or tracker.package in sys.modules:
            raise
        text = f"{tracker.package} cannot be imported: {type(error).__name__}: {error}"
        raise TrackerNotInstalledError(
            f"{text}. See which packages are missing or do not fit together: pip check"
        ) from error


@dataclass(eq=False)
class Run:
    """A run that this process has open. The call that has opened it and those that have joined it share it.

    Attributes:
        opener: The call that has opened it. Its tracker, arguments, context and rank are the run's.
        plan: The plan of this rank.
        handle: The tracker's handle.
        attempts: The attempts of the run; None if no other attempt can have it, or if another rank keeps them.
        failures: Reads why the job ends.
        held: Stops that, and releases the run's lock, when the run is closed.
        users: How many calls use it. It changes while `state.lock` is held.
        closed: Set when it has been closed.
        opener_exit_code: The status of the call that has opened it, once that has ended.
        is_closed_early: Whether it was closed because the process ends, before its function has returned.
    """

    opener: Call
    plan: RunPlan
    handle: Handle
    attempts: Attempts | None
    failures: FailureReader
    held: ExitStack
    users: int = 1
    closed: threading.Event = field(default_factory=threading.Event)
    opener_exit_code: int = 0
    is_closed_early: bool = False

    @property
    def tracker(self) -> Tracker:
        """The tracker."""
        return self.opener.tracker

    def leave(self, call: Call, exit_code: int, failure: Failure | None) -> None:
        """Take a call that has ended off the run. The last call closes it, with the status of the opener.

        Args:
            call: The call.
            exit_code: Its status.
            failure: Why it has failed; None if it has not, or if that is not known.
        """
        with nullcontext() if call.watcher is None else call.watcher.closing():
            exit_code = _or_terminated(exit_code)
            is_opener = call is self.opener
            if is_opener:
                self.opener_exit_code = exit_code
            with state.lock:  # from here on a signal does not end the run, but waits for this call
                state.calls[:] = [other for other in state.calls if other is not call]
                self.users -= 1
                is_last = self.users == 0
            if is_last and not self.is_closed_early:
                # A signal's status comes before that of the opener, which may have left before the signal.
                self.close(exit_code if exit_code == TERMINATED else self.opener_exit_code, failure)
            elif is_opener and self.plan.primary and not self.is_closed_early:
                self.end_early(exit_code, failure)

    def close(self, exit_code: int, failure: Failure | None) -> None:
        """Close the run: its end at the service first, then what this process keeps for it.

        Args:
            exit_code: The status of the function; after a SIGTERM, or if another rank has failed first, it is another.
            failure: Why the function has failed; None if it has not.
        """
        try:
            with self.held:
                _warn_of_late_group(self)
                with self.warned("the run does not wait for its other writers"):
                    self.handle.await_writers(exit_code)
                exit_code = self._verdict(_or_terminated(exit_code), failure)
                self._record_goodput(exit_code)
                summary = ended.summary_of(self, exit_code)
                with self.warned(f"the run could not be finished with status {exit_code}"):
                    self.handle.finish(exit_code)
                    ended.print_how_to_view(self)
            ended.keep_and_show(self, exit_code, summary)
        finally:
            with state.lock:
                state.runs[:] = [other for other in state.runs if other is not self]
            self.closed.set()

    def end_early(self, exit_code: int, failure: Failure | None = None) -> None:
        """End the run while functions may still log: the next row opens it again. Called from any thread."""
        with self.warned(f"the run could not be finished with status {exit_code}"):
            status = self._verdict(exit_code, failure)
            self._record_goodput(status)
            self.handle.finish_on_signal(status)
        if exit_code == TERMINATED:  # the function may never return: it sits in a collective
            ended.persist(self)

    def close_with_process(self) -> None:
        """Close the run of a function that has not returned: with status 1, or 143 after a SIGTERM."""
        logger.warning(
            "%s: the process ends before the decorated function has returned, and with it run %s",
            self.tracker.name,
            self.handle.id,
        )
        self.is_closed_early = True
        if terminated_at() is not None:
            self.close(TERMINATED, None)
            return
        rank = 0 if self.opener.info is None else self.opener.info.rank
        self.close(1, Failure(rank, "unfinished", "the process ended before the function returned", exit_code=1))

    def record(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Keep an event with the run: see `Handle.record_event`. Raises nothing."""
        role = self.plan.role
        with self.warned(f"the run does not show this: {text}"):
            self.handle.record_event(f"{role}.{name}" if role else name, self._of_role(values), text)

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        """Log values with the run's next row: see `Handle.add_to_next_row`."""
        self.handle.add_to_next_row(self._of_role(values))

    def _of_role(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put what a role's job reports below the role's name: the owner's job reports the same."""
        role = self.plan.role
        return values if role is None else {f"roles/{role}/{key}": value for key, value in values.items()}

    def record_hang(self, verdict: str, text: str) -> None:
        """Keep with the run where each rank is, since the job makes no progress."""
        logger.error("%s: %s", self.tracker.name, verdict)
        self.record("hang", {"hang/verdict": verdict}, text)

    @contextmanager
    def warned(self, consequence: str) -> Iterator[None]:
        """Warn of what the tracker raises in the block: it must not change the training's outcome."""
        try:
            yield
        except Exception:
            logger.warning("%s: %s", self.tracker.name, consequence, exc_info=True)

    def _verdict(self, exit_code: int, failure: Failure | None) -> int:
        """Keep with the run why its job has failed, and return the status of the rank that was first."""
        if exit_code in (0, INTERRUPTED):
            return exit_code
        verdict, is_new = self.failures.verdict(failure, terminated_at())
        if verdict is None:
            return exit_code
        if is_new and self.plan.primary:
            rank = 0 if self.opener.info is None else self.opener.info.rank
            # Python prints the traceback of this rank's own failure.
            if verdict.cause.rank != rank and not self.is_one_of_many:
                logger.error("%s: the run has failed: %s", self.tracker.name, verdict.text)
            self.record("failure", verdict.summary, verdict.text)
        return verdict.cause.exit_code

    def _record_goodput(self, exit_code: int) -> None:
        if self.attempts is None:
            return
        with self.warned("the run does not show its goodput"):
            values = self.attempts.end(exit_code)
            if values:
                text = goodput.text_of(values)
                logger.info("%s: %s", self.tracker.name, text)
                self.record("goodput", values, text)

    @property
    def is_one_of_many(self) -> bool:
        """Whether each rank has its run, and this is not the first: a line for each would be too many."""
        return self.opener.config.run_mode == "new" and not self.plan.first


def _warn_of_late_group(run: Run) -> None:
    """Warn that this process was one of several, which its function alone has found out: each has had a run."""
    is_alone = run.opener.info is None and not run.opener.is_simulated
    group = (detect_process_group() or jax.world()) if is_alone else None
    if group is not None and group.world_size > 1:
        logger.warning(
            "%s: the function has connected %d ranks, of which this is rank %d. No launcher had told so at the call, "
            "so each rank has had a run like that of a single process. Call the decorated function after %s",
            run.tracker.name,
            group.world_size,
            group.rank,
            "jax.distributed.initialize()"
            if group.launcher == "jax"
            else "init_process_group(), or start with torchrun",
        )


def _close_with_process() -> None:
    """Close the runs that are open when the process ends.

    Such a run is that of a function in a daemon thread, or in an asyncio task that was left behind.
    """
    for run in state.open_runs():
        if not run.opener.is_simulated:
            run.close_with_process()


# SIGTERM


def end_open_runs(exit_code: int, timeout_s: float) -> None:
    """End all runs that are open in this process, of all threads, while the functions may continue.

    Args:
        exit_code: The status that they end with.
        timeout_s: Seconds to wait at most. After that the runs are ended in their threads.
    """
    deadline = time.monotonic() + timeout_s
    ending = [threading.Thread(target=run.end_early, args=(exit_code,), daemon=True) for run in state.open_runs()]
    for thread in ending:
        thread.start()
    for thread in ending:
        threads.join(thread, max(0.0, deadline - time.monotonic()))


WATCHER = register(MainThreadWatcher(end_open_runs, progress.count_row))
_LOOP_WATCHER = register(LoopWatcher(end_open_runs, progress.count_row))
_FORK_MASK = register(ForkMask())


def start_watching(call: Call, timeout_s: float) -> None:
    """Watch for SIGTERM during the call, if one of the watchers can do that in this thread.

    Args:
        call: The call.
        timeout_s: Seconds that finishing its run may take.
    """
    if not call.is_simulated:
        watchers = (WATCHER, _LOOP_WATCHER)
        call.watcher = next((one for one in watchers if one.start(call.tracker.package, timeout_s)), None)


def terminated_at() -> float | None:
    """Return when SIGTERM came to this process, in seconds of `time.monotonic`; None if it has not."""
    return WATCHER.terminated_at or _LOOP_WATCHER.terminated_at


def _or_terminated(exit_code: int) -> int:
    return exit_code if terminated_at() is None else TERMINATED
