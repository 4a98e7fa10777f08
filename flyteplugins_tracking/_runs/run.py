"""A run that this process has open: how it is opened, ended early and closed. Only ranks with a run load this module.

Three verbs end a run. `finish` is the vendor's: the handle ends the run at the service. `close` is the library's: no
call uses the run any more. `end_early` is a finish that comes while a function may still log: what it logs then is
kept, and `close` sends it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.failure import FAILURE_KEYS, Failure
from flyteplugins_tracking._job.failures import FailureReader
from flyteplugins_tracking._rank import engines
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking._runs.call import Call, state
from flyteplugins_tracking._runs.request import plan_of, request_of
from flyteplugins_tracking._runs.sigterm import Sigterm
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import OwnLock, register
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import digest, printable
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerNotInstalledError, TrackingError
from flyteplugins_tracking.trackers.config import roles_error

if TYPE_CHECKING:
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)
_UNPUBLISHED = "download_logs=True: the files did not become an output of the task"


# Vendors' clients are not set up safely by several threads: one could see wandb's settings half read.
_opening = register(OwnLock())


def open_run(call: Call) -> Run:
    """Open the run of a call, or join it if this process has it open. SIGTERM is listened for from here on.

    Raises:
        TrackerNotInstalledError: The vendor's package is missing.
        TrackerUnavailableError: The service, or a key for it, is missing.
        IdentityError: The ranks cannot agree on an id.
    """
    config, tracker, info = call.config, call.tracker, call.info
    listen_for_sigterm(call, config.finish_timeout_s)
    with ExitStack() as undo:
        # From here on, and not when the run is open: that may take seconds, and a rank may die meanwhile.
        is_alone = call.job is None or call.job.world_size == 1
        failures = FailureReader(info, is_alone=is_alone, is_own_run=config.run_mode == "new")
        undo.callback(failures.stop)
        planned = plan_of(call)
        if call.run_file is not None:
            undo.callback(call.run_file.release)
        with _opening.lock:
            joined = _join_callers_run(call, planned)
            if joined is not None:
                return joined
            _warn_of_unused_arguments(call, planned)
            deadline = time.monotonic() + config.init_timeout_s
            run_plan = _lock_run(call, planned, undo)
            if call.run_file is not None and call.run_file.base_id == planned.run_id:
                call.run_file.base_id = run_plan.run_id  # another one, if that run is open in another process
            logger.debug("%s: opening %s", tracker.name, run_plan)
            request = request_of(call, planned, run_plan, SIGTERM, deadline)
            require(tracker)
            handle = _opened(tracker, request)
            if planned.run_id is None and tracker.package is not None:
                _lock_made_id(call, handle.id, undo)
            left_s = deadline - time.monotonic()
            logger.debug("%s: run %s is open, %.1f s before its deadline", tracker.name, handle.id, left_s)
            if call.run_file is not None:
                call.run_file.write(handle, has_ended=False)
            run = Run(call, run_plan, handle, failures, undo.pop_all())
            undo.push(run.close_if_unused)
            # Called once a run is open: hooks run in the reverse order of their registration, and the vendor's would
            # end the run as finished.
            atexit.unregister(_close_with_process)
            atexit.register(_close_with_process)
            with state.lock:
                state.runs.append(run)
            undo.pop_all()
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
    if config.download_logs and call.info is not None:
        reason = f"the training has {call.info.world_size} ranks, and a task's output comes from one process"
        logger.warning(warning, "download_logs=True", reason)
    elif config.download_logs and not call.context.can_publish_files:
        logger.warning(warning, "download_logs=True", "the function does not run as a Flyte task")


def _lock_run(call: Call, planned: RunPlan, held: ExitStack) -> RunPlan:
    """Lock the run against other processes and threads of this machine: two writers would lose each other's rows.

    A child process has the variables of its rank, and the user's id may be in use. If the lock is taken, the run gets
    another id. An earlier attempt that is still ending is waited for. Each rank that shares a run locks its own part.
    The owner of a run with roles has a second lock, so that a job which asks for its id is told what the tracker would
    say once the run is stored.

    Raises:
        ConfigError: The run has roles, and this job is none.
    """
    is_shared = call.info is not None and call.config.run_mode == "shared" and planned.role is None
    if planned.run_id is None or not (planned.ends_run or is_shared) or not call.world.is_real:
        return planned
    config, name = call.config, call.tracker.name
    of_run = _lock_name(call, planned.run_id) + ("" if planned.ends_run else f"/{planned.label}")
    if config.roles is None and config.id is not None and RunLock.is_held(f"{of_run}/roles"):
        raise roles_error(f"{name}: run {planned.run_id}", "its owner runs now")
    lock = RunLock.acquire(of_run, timeout_s=config.init_timeout_s / 2)
    if lock is not None:
        held.callback(lock.release)
        if config.roles is not None and (of_roles := RunLock.acquire(f"{of_run}/roles")) is not None:
            held.callback(of_roles.release)
        return planned
    new_id = f"{planned.run_id}-{_name_of_job() if is_shared else os.urandom(3).hex()}"
    logger.warning("%s: run %s is open in another process or thread: this one is %s", name, planned.run_id, new_id)
    return replace(planned, run_id=new_id)


def _lock_made_id(call: Call, run_id: str, held: ExitStack) -> None:
    """Lock a run whose id the tracker has made: another job may learn the id, from a copy of the run file for one."""
    lock = RunLock.acquire(_lock_name(call, run_id))
    if lock is not None:
        held.callback(lock.release)


def _lock_name(call: Call, run_id: str) -> str:
    return f"{call.tracker.name}/{call.config.project}/{run_id}"


def _name_of_job() -> str:
    """Return a name that all ranks of this job know, and no other job on this machine has at the same time."""
    address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    return digest(*address, length=6)


def require(tracker: Tracker) -> None:
    """Check that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: The package is missing, or too old.
    """
    from importlib.util import find_spec

    from flyteplugins_tracking.trackers.vendor_parts import known_faults

    package = tracker.package
    for fault in known_faults(package or tracker.name):
        if fault.level == "error":
            raise TrackerNotInstalledError(f"{tracker.title}: {fault.text}. Install a newer one: {fault.fix}")
        _warn_once(fault.text, "%s: %s. Install another version: %s", tracker.title, fault.text, fault.fix)
    if package is None or package in sys.modules:
        return
    if find_spec(package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or package}")


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
            f"{text}. See which packages are missing or do not fit together: pip check; if an earlier import was "
            "interrupted, start the process again"
        ) from error


@dataclass(eq=False)
class Run:
    """A run that this process has open. The call that has opened it and those that have joined it share it.

    Attributes:
        opener: The call that has opened it. Its tracker, arguments, context and rank are the run's.
        plan: The plan of this rank.
        handle: The tracker's handle.
        failures: Reads why the job ends.
        held: Stops that, and releases the run's lock, when the run is closed.
        users: How many calls use it. It changes while `state.lock` is held.
        closed: Set when it has been closed.
        context: The variables of the thread or task that has opened it.
        opener_exit_code: The status of the call that has opened it; None while that runs.
        opener_failure: Why that call has failed; None if it has not, or if that is not known.
        is_closed_early: Whether it was closed because the process ends, before its function has returned.
        may_be_rank: Whether no launcher has told whether this process is one of several, and its function has not yet.
    """

    opener: Call
    plan: RunPlan
    handle: Handle
    failures: FailureReader
    held: ExitStack
    users: int = 1
    closed: threading.Event = field(default_factory=threading.Event)
    context: Context = field(default_factory=copy_context)
    opener_exit_code: int | None = None
    opener_failure: Failure | None = None
    is_closed_early: bool = False
    may_be_rank: bool = False

    def __post_init__(self) -> None:
        self.may_be_rank = self.opener.info is None

    def __repr__(self) -> str:
        state = "closed" if self.closed.is_set() else f"{self.users} calls"
        return f"Run({self.handle.id}, {'primary' if self.plan.primary else 'not primary'}, {state})"

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
        with nullcontext() if call.listener is None else call.listener.closing():
            exit_code = _or_terminated(exit_code)
            if call is self.opener:
                self.opener_exit_code, self.opener_failure = exit_code, failure
            with state.lock:  # from here on a signal does not end the run, but waits for this call
                state.calls[:] = [other for other in state.calls if other is not call]
                self.users -= 1
                is_last = self.users == 0
            if is_last and not self.is_closed_early:
                # A signal's status comes before that of the opener, which may have left before the signal.
                self.close(_or_terminated(self.opener_exit_code or 0), self.opener_failure)

    def close_if_unused(self, _: object, error: BaseException | None, __: object) -> None:
        """Close a run that a signal has kept from being used."""
        self.close(_or_terminated(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1), None)

    def close(self, exit_code: int, failure: Failure | None) -> None:
        """Close the run: its end at the service first, then what this process keeps for it.

        Args:
            exit_code: The status of the function; after a SIGTERM, or if another rank has failed first, it is another.
            failure: Why the function has failed; None if it has not.
        """
        try:
            with self.held:
                _warn_of_late_group(self, detect_process_group() or engines.jax_world())
                with self.warned("the run does not wait for its other writers"):
                    self.handle.await_writers(exit_code)
                exit_code = self._verdict(_or_terminated(exit_code), failure)
                logger.debug("%r is finished with status %d", self, exit_code)
                with self.warned(f"the run could not be finished with status {exit_code}"):
                    self.handle.finish(exit_code)
                    _print_how_to_view(self)
                if exit_code == 0 and self.opener.run_file is not None and not self._was_stopped:
                    self.opener.run_file.write(self.handle, has_ended=True)
            if self.opener.context.can_persist:
                run_with_timeout(self.opener.config.finish_timeout_s, _persist, self)
        finally:
            with state.lock:
                state.runs[:] = [other for other in state.runs if other is not self]
            self.closed.set()

    @property
    def _was_stopped(self) -> bool:
        """Whether `should_stop()` has ended the function: the next job goes on in the run."""
        return self.opener.stopping is not None and self.opener.stopping.has_stopped

    def mark_preempting(self, timeout_s: float) -> None:
        """Prepare for a handler of the user's that may end the process. Called from any thread.

        A neighbour's failure, which ends the job too, is no preemption.
        """
        with self.warned("the run may not be shown as preempted if the handler ends the process"):
            if self._verdict(TERMINATED, None) == TERMINATED:
                self.handle.mark_preempting(timeout_s)

    def end_early(self) -> None:
        """End the run, because of SIGTERM, while functions may still log. Called from any thread."""
        with self.warned(f"the run could not be finished with status {TERMINATED}"):
            self.handle.end_early(self._verdict(TERMINATED, None))
        _persist(self)  # the function may never return: it sits in a collective

    def publish_files(self, call: Call, is_async: bool) -> Any:
        """Make the files of the run an output of its task: see `Call.publish_files`."""
        is_wanted = call is self.opener and call.config.download_logs and call.info is None
        if not is_wanted or not call.context.can_publish_files or self.handle.files is None:
            return None
        published = None
        with self.warned(_UNPUBLISHED):
            published = call.context.publish_files(self.handle.files, self.handle.id, is_async)
        return self._awaited(published) if is_async and published is not None else None

    async def _awaited(self, published: Any) -> None:
        with self.warned(_UNPUBLISHED):
            await published

    def close_with_process(self) -> None:
        """Close the run of a function that has not returned: with status 1, or 143 after a SIGTERM."""
        logger.warning(
            "%s: the process ends before the decorated function has returned, and with it run %s",
            self.tracker.name,
            self.handle.id,
        )
        self.is_closed_early = True
        if SIGTERM.terminated:
            self.close(TERMINATED, None)
            return
        if self.opener_exit_code is not None:  # others have joined the run, and have not returned
            self.close(self.opener_exit_code, self.opener_failure)
            return
        rank = 0 if self.opener.info is None else self.opener.info.rank
        self.close(1, Failure(rank, "unfinished", "the process ended before the function returned", exit_code=1))

    def record(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Keep an event with the run: see `Handle.record_event`. Raises nothing."""
        with self.warned(f"the run does not show this: {text}"):
            self.handle.record_event(self._prefix + name, self._prefixed(values), text)

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        """Log values with the run's next row: see `Handle.add_to_next_row`."""
        self.handle.add_to_next_row(self._prefixed(values))

    @property
    def _prefix(self) -> str:
        """What stands before the names of a role's values: the owner's job has values of the same names."""
        return "" if self.plan.role is None else f"roles/{self.plan.role}/"

    def _prefixed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._prefix + key: value for key, value in values.items()}

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
        if exit_code == INTERRUPTED or (exit_code == 0 and not self.plan.primary):
            return exit_code
        has_succeeded = exit_code == 0
        terminated = None if has_succeeded else SIGTERM.terminated_at
        verdict, is_new = self.failures.verdict(failure, terminated, has_succeeded=has_succeeded)
        if verdict is None:
            if has_succeeded:  # what the run's summary has is of an earlier attempt, which did not succeed
                with self.warned("the run may show the failure of an earlier attempt"):
                    self.handle.forget_event(self._prefix + "failure", [self._prefix + key for key in FAILURE_KEYS])
            return exit_code
        if is_new and self.plan.primary:
            rank = 0 if self.opener.info is None else self.opener.info.rank
            # Python prints the traceback of this rank's own failure.
            if verdict.cause.rank != rank and not self.is_one_of_many:
                logger.error("%s: the run has failed: %s", self.tracker.name, verdict.text)
            self.record("failure", verdict.summary, verdict.text)
        return verdict.cause.exit_code

    @property
    def is_one_of_many(self) -> bool:
        """Whether each rank has its run, and this is not the first: a line for each would be too many."""
        return self.opener.config.run_mode == "new" and not self.plan.first


def _before_row() -> None:
    """Count a row. A function that connects its ranks has mostly done so by then, and may leave them before its end."""
    progress.count_row()
    for run in state.runs[:]:
        if run.may_be_rank:
            _warn_of_late_group(run, detect_process_group())


def _warn_of_late_group(run: Run, group: DistributedInfo | None) -> None:
    """Warn once that this process is one of several, which its function alone has found out: each has a run.

    Not on rank 0: under Lightning's own launcher, it starts the others in its function, and they have none.
    """
    if not run.may_be_rank or group is None:
        return
    run.may_be_rank = False
    if group.rank == 0:
        return
    logger.warning(
        "%s: the function has connected %d ranks, of which this is rank %d. No launcher had told so at the call, so "
        "each rank has a run like that of a single process. Call the decorated function after %s",
        run.tracker.name,
        group.world_size,
        group.rank,
        "jax.distributed.initialize()" if group.launcher == "jax" else "init_process_group(), or start with torchrun",
    )


def _close_with_process() -> None:
    """Close the runs that are open when the process ends.

    Such a run is that of a function in a daemon thread, or in an asyncio task that was left behind.
    """
    for run in state.open_runs():
        run.close_with_process()


# What is left to do for a run that has ended: its last line and its unsent files


def _print_how_to_view(run: Run) -> None:
    """Print how to look at the run: one line a job, or one a worker where each worker has its run."""
    if not run.plan.primary or run.is_one_of_many:
        return
    command = run.handle.how_to_view()
    if command:
        print(f"{run.tracker.name}: to look at run {run.handle.id}: {printable(command)}", file=sys.stderr)  # noqa: T201


def _persist(run: Run) -> None:
    """Copy the rows that the service has not received to storage: this machine's files are lost with it."""
    if not run.opener.context.can_persist:
        return
    for directory in run.handle.unsent():
        with run.warned(f"{directory} could not be copied to storage, and is lost with this machine"):
            # In the opener's context: Flyte's storage is known there, and SIGTERM ends runs in a thread.
            address = run.context.copy().run(run.opener.context.persist, directory)
            name = os.path.basename(directory)
            logger.warning(
                "%s: rows that the service has not received are stored at %s. Download them to %s, and send them: %s",
                run.tracker.name,
                address,
                name,
                run.handle.how_to_send(name),
            )


# SIGTERM


def mark_open_runs(timeout_s: float) -> None:
    """Prepare all runs that are open in this process for a handler of the user's. Waits for that for a moment."""
    _for_each_run(lambda run: run.mark_preempting(timeout_s), timeout_s)


def end_open_runs(timeout_s: float) -> None:
    """End all runs that are open in this process, of all threads, with 143, while the functions may continue.

    Args:
        timeout_s: Seconds to wait at most. After that the runs are ended in their threads.
    """
    _for_each_run(Run.end_early, timeout_s)


def _for_each_run(action: Callable[[Run], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    acting = []
    for run in state.open_runs():
        thread = threading.Thread(target=action, args=(run,), daemon=True)
        try:
            thread.start()
            acting.append(thread)
        except RuntimeError:  # no thread can be started
            action(run)
    for thread in acting:
        threads.join(thread, max(0.0, deadline - time.monotonic()))


SIGTERM = register(Sigterm(end_open_runs, mark_open_runs, _before_row))


def listen_for_sigterm(call: Call, timeout_s: float) -> None:
    """Listen for SIGTERM during the call, if that is possible in this thread.

    Args:
        call: The call.
        timeout_s: Seconds that finishing its run may take.
    """
    if call.world.is_real and SIGTERM.start(call.tracker.package, timeout_s):
        call.listener = SIGTERM


def _or_terminated(exit_code: int) -> int:
    return TERMINATED if SIGTERM.terminated else exit_code
