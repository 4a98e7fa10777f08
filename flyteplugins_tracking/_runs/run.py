"""A run that this process has open, from then until its end. Only ranks with a run load this module.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.failure import FAILURE_KEYS, Failure
from flyteplugins_tracking._job.failures import FailureReader
from flyteplugins_tracking._rank import engines
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking._runs.calls import state
from flyteplugins_tracking._runs.context import Asked
from flyteplugins_tracking._runs.run_file import RunFile
from flyteplugins_tracking._runs.sigterm import Sigterm
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import register
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking.trackers.idle import rank_that_lost_rows

if TYPE_CHECKING:
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)
_UNPUBLISHED = "download_logs=True: the files did not become an output of the task"


@dataclass(eq=False)
class Run:
    """A run that this process has open; the user's is `handle.run`. Its opener and those that have joined it share it.

    Attributes:
        asked: What the call that has opened it has asked for.
        info: This rank; None outside a distributed job.
        plan: The plan of this rank.
        handle: The tracker's handle.
        run_file: The file of `run_file=`; None without one.
        locks: What keeps other writers away, released at the end; None where no lock was to be had.
        failures: Reads why the job ends.
        users: How many calls use it. It changes while `state.lock` is held.
        closed: Set when it has been closed.
        context: The variables of the thread or task that has opened it.
        opener_exit_code: The status of the call that has opened it; None while that runs.
        opener_failure: Why that call has failed; None if it has not, or if that is not known.
        was_stopped: Whether `should_stop()` has ended that call: the next job goes on in the run.
        is_closed_early: Whether it was closed because the process ends, before its function has returned.
        may_be_rank: Whether no launcher has told whether this process is one of several, and its function has not yet.
    """

    asked: Asked
    info: DistributedInfo | None
    plan: RunPlan
    handle: Handle
    run_file: RunFile | None
    locks: Sequence[RunLock | RunFile | None]
    failures: FailureReader
    users: int = 1
    closed: threading.Event = field(default_factory=threading.Event)
    context: Context = field(default_factory=copy_context)
    opener_exit_code: int | None = None
    opener_failure: Failure | None = None
    was_stopped: bool = False
    is_closed_early: bool = False

    def __post_init__(self) -> None:
        self.may_be_rank = self.info is None

    def __repr__(self) -> str:
        state = "closed" if self.closed.is_set() else f"{self.users} calls"
        return f"Run({self.handle.id}, {'primary' if self.plan.primary else 'not primary'}, {state})"

    def begin(self) -> None:
        """Have the run closed with the process, if it still is open then."""
        # Hooks run in the reverse order of their registration, and the vendor's would end the run as finished.
        atexit.unregister(_close_with_process)
        atexit.register(_close_with_process)
        with state.lock:
            state.runs.append(self)

    def leave(self, exit_code: int | None, is_last: bool) -> None:
        """Let a call go that has ended. The last one closes the run, with the status of the opener.

        Args:
            exit_code: The status of the opener; None if it is another call that has ended.
            is_last: Whether no call uses the run any more.
        """
        if exit_code is not None:
            self.opener_exit_code = _or_terminated(exit_code)
        if is_last and not self.is_closed_early:
            self.close(self.opener_exit_code or 0, self.opener_failure)

    def close(self, exit_code: int, failure: Failure | None) -> None:
        """Close the run: its end at the service first, then what this process keeps for it.

        Args:
            exit_code: The status of the function; after a SIGTERM, or if another rank has failed first, it is another.
            failure: Why the function has failed; None if it has not.
        """
        try:
            try:
                exit_code = _or_terminated(exit_code)
                _warn_of_late_group(self, detect_process_group() or engines.jax_world())
                with self.warned("the run does not wait for its other writers"):
                    self.handle.await_writers(exit_code)
                exit_code = self._verdict(_or_terminated(exit_code), failure)
                logger.debug("%r is finished with status %d", self, exit_code)
                with self.warned(f"the run could not be finished with status {exit_code}"):
                    self.handle.finish(exit_code)
                    _print_how_to_view(self)
                with self.warned("what other ranks have logged is not known"):
                    if exit_code == 0:
                        _warn_of_lost_rows(self)
                if exit_code == 0 and self.run_file is not None and not self.was_stopped:
                    self.run_file.write(self.handle, has_ended=True)
            finally:
                release(self.locks, self.failures)
            if self.asked.context.can_persist:
                threads.run_with_timeout(self.asked.config.finish_timeout_s, _persist, self)
        finally:
            with state.lock:
                state.runs[:] = [other for other in state.runs if other is not self]
            self.closed.set()

    def mark_preempting(self, timeout_s: float) -> None:
        """Prepare for a handler of the user's that may end the process. Called from any thread.

        A neighbour's failure, which ends the job too, is no preemption.
        """
        with self.warned("the run may not be shown as preempted if the handler ends the process"):
            if self._verdict(TERMINATED, self.opener_failure) == TERMINATED:
                self.handle.mark_preempting(timeout_s)

    def end_early(self) -> None:
        """End the run, because of SIGTERM, while functions may still log. Called from any thread."""
        with self.warned(f"the run could not be finished with status {TERMINATED}"):
            self.handle.end_early(self._verdict(TERMINATED, self.opener_failure))
        _persist(self)  # the function may never return: it sits in a collective

    def publish_files(self, is_async: bool) -> Any:
        """Make the files of the run an output of its task: see `Call.publish_files`."""
        context, files = self.asked.context, self.handle.files
        is_wanted = self.asked.config.download_logs and self.info is None and context.can_publish_files
        if not is_wanted or files is None:
            return None
        published = None
        with self.warned(_UNPUBLISHED):
            published = context.publish_files(files, self.handle.id, is_async)
        return self._awaited(published) if is_async and published is not None else None

    async def _awaited(self, published: Any) -> None:
        with self.warned(_UNPUBLISHED):
            await published

    def close_with_process(self) -> None:
        """Close the run of a function that has not returned: with status 1, or 143 after a SIGTERM."""
        logger.warning(
            "%s: the process ends before the decorated function has returned, and with it run %s",
            self.asked.tracker.name,
            self.handle.id,
        )
        self.is_closed_early = True
        exit_code, failure = self.opener_exit_code, self.opener_failure
        if exit_code is None:  # otherwise, others have joined the run, and have not returned
            exit_code, rank = 1, 0 if self.info is None else self.info.rank
            if failure is None and not SIGTERM.terminated:
                failure = Failure(rank, "unfinished", "the process ended before the function returned", exit_code=1)
        self.close(exit_code, failure)

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
        logger.error("%s: %s", self.asked.tracker.name, verdict)
        self.record("hang", {"hang/verdict": verdict}, text)

    @contextmanager
    def warned(self, consequence: str) -> Iterator[None]:
        """Warn of what the tracker raises in the block: it must not change the training's outcome."""
        try:
            yield
        except Exception:
            logger.warning("%s: %s", self.asked.tracker.name, consequence, exc_info=True)

    def _verdict(self, exit_code: int, failure: Failure | None) -> int:
        """Keep with the run why its job has failed, and return the status of the rank that was first."""
        if exit_code == INTERRUPTED or (exit_code == 0 and not self.plan.primary):
            return exit_code
        has_succeeded = exit_code == 0
        if not has_succeeded and self.info is None:
            self.failures.add_ranks(detect_process_group())
        terminated = None if has_succeeded else SIGTERM.terminated_at
        verdict, is_new = self.failures.verdict(failure, terminated, has_succeeded=has_succeeded)
        if verdict is None:
            if has_succeeded:  # what the run's summary has is of an earlier attempt, which did not succeed
                with self.warned("the run may show the failure of an earlier attempt"):
                    self.handle.forget_event(self._prefix + "failure", [self._prefix + key for key in FAILURE_KEYS])
            return exit_code
        if is_new and self.plan.primary:
            rank = 0 if self.info is None else self.info.rank
            # Python prints the traceback of this rank's own failure.
            if verdict.cause.rank != rank and not self.is_one_of_many:
                logger.error("%s: the run has failed: %s", self.asked.tracker.name, verdict.text)
            self.record("failure", verdict.summary, verdict.text)
        return verdict.cause.exit_code

    @property
    def is_one_of_many(self) -> bool:
        """Whether each rank has its run, and this is not the first: a line for each would be too many."""
        return self.asked.config.run_mode == "new" and not self.plan.first


def _look() -> None:
    """Listen for SIGTERM again. A function that connects its ranks has mostly done so by a row, and may leave them."""
    SIGTERM.listen_again()
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
        run.asked.tracker.name,
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


def release(locks: Sequence[RunLock | RunFile | None], failures: FailureReader) -> None:
    """Let another process have the run and its file, and read no more failures: each, whatever another one raises."""
    with ExitStack() as steps:
        steps.callback(failures.stop)
        for lock in locks:
            if lock is not None:
                steps.callback(lock.release)


# What is left to do for a run that has ended: its last line and its unsent files


def _print_how_to_view(run: Run) -> None:
    """Print how to look at the run: one line a job, or one a worker where each worker has its run."""
    if not run.plan.primary or run.is_one_of_many:
        return
    command = run.handle.how_to_view()
    if command:
        print(f"{run.asked.tracker.name}: to look at run {run.handle.id}: {printable(command)}", file=sys.stderr)  # noqa: T201


def _warn_of_lost_rows(run: Run) -> None:
    """Say that another rank has logged to a run that does nothing, if this rank has not logged at all."""
    asked, info = run.asked, run.info
    has_logged = progress.has_logged() or asked.tracker.name == "mlflow"  # whose own functions log past the handle
    if info is None or has_logged or not asked.world.is_real:
        return
    rank = rank_that_lost_rows(asked.tracker.name, info, asked.config.rank_scope)
    if rank is not None:
        text = "%s: run %s does not have the rows that rank %s has logged: pass primary_rank=%s to tracking_init"
        logger.warning(text, asked.tracker.name, run.handle.id, rank, rank)


def _persist(run: Run) -> None:
    """Copy the rows that the service has not received to storage: this machine's files are lost with it."""
    if not run.asked.context.can_persist:
        return
    for directory in run.handle.unsent():
        with run.warned(f"{directory} could not be copied to storage, and is lost with this machine"):
            # In the opener's context: Flyte's storage is known there, and SIGTERM ends runs in a thread.
            address = run.context.copy().run(run.asked.context.persist, directory)
            name = os.path.basename(directory)
            logger.warning(
                "%s: rows that the service has not received are stored at %s. Download them to %s, and send them: %s",
                run.asked.tracker.name,
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


SIGTERM = register(Sigterm(end_open_runs, mark_open_runs, progress.count_row))
progress.looks.append(_look)


def _or_terminated(exit_code: int) -> int:
    """Return the status of a function: 143 after a SIGTERM, however it ends."""
    return TERMINATED if SIGTERM.terminated else exit_code
