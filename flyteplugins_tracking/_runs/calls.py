"""The decorated functions that run in this process, and the runs that they have open.

The state lives here, in a module that wrappers import, never in a wrapper: Elastic's spawn pickles those.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking.trackers.config import TrackingConfig

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.run import OpenRun
    from flyteplugins_tracking._runs.sigterm.loop import AsyncioSigtermWatcher
    from flyteplugins_tracking._runs.sigterm.main import SigtermWatcher
    from flyteplugins_tracking._runs.stopping import Stopping
    from flyteplugins_tracking.trackers.base import Tracker

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """The facts about a Flyte task that are known when it is decorated.

    Attributes:
        has_workers: Whether it asks for workers of its own; None if that is unknown and makes no difference.
        has_report: Whether it has a report (Flyte 2) or a deck (Flyte 1).
        timeout_s: How long an attempt may run, in seconds; None for no limit.
    """

    has_workers: bool | None
    has_report: bool
    timeout_s: float | None = None


class Override(NamedTuple):
    """Test doubles for the tracker and for the execution context.

    Attributes:
        tracker: Returns the tracker to use instead of the given one.
        context: Returns the execution context to use instead of the given one.
    """

    tracker: Callable[[Tracker], Tracker]
    context: Callable[[ExecutionContext], ExecutionContext]


class TrackedCall:
    """One call of a decorated function.

    Attributes:
        tracker: The tracker's name.
        parent: The tracked call around this one, of any tracker.
        override: The test doubles that were active when it began.
        run: The run that it has opened or joined; None on a rank without a run.
        is_opener: Whether it has opened the run.
        watcher: Watches for SIGTERM during the call. Each call has its own start and stop.
        info: This rank; None outside a distributed job.
        restore: Undoes what the tracker has done on a rank without a run.
        pid: The process that the call began in; a forked child must not end it.
        config: The arguments of the call.
        is_simulated: Whether the process stands for a rank of a test.
        stopping: What `should_stop` has started; None until the function calls it.
        stop_reason: In a simulation, why the function is asked to stop; None if it is not.
        timeout_s: How long the platform lets the task run, in seconds; None if that is unknown.
    """

    def __init__(
        self,
        tracker: str,
        parent: TrackedCall | None,
        override: Override | None,
        run: OpenRun | None = None,
        is_opener: bool = False,
        watcher: SigtermWatcher | AsyncioSigtermWatcher | None = None,
        info: DistributedInfo | None = None,
        restore: Callable[[], object] | None = None,
        config: TrackingConfig | None = None,
        is_simulated: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.tracker = tracker
        self.parent = parent
        self.override = override
        self.run = run
        self.is_opener = is_opener
        self.watcher = watcher
        self.info = info
        self.restore = restore
        self.pid = os.getpid()
        self.config = config or TrackingConfig()
        self.is_simulated = is_simulated
        self.stopping: Stopping | None = None
        self.stop_reason: str | None = None
        self.timeout_s = timeout_s


# The call of this thread or task.
current: ContextVar[TrackedCall | None] = ContextVar("flyteplugins_tracking_call", default=None)


class _State(PerProcess):
    """The calls of this process, also for threads that a decorated function starts: they do not inherit the context.

    Attributes:
        running: The calls that have not ended.
        closing: The runs that the last of their calls is closing.
        call_counts: The number of calls so far, by tracker.
        lock: Held while these change.
    """

    def __init__(self) -> None:
        self.running: list[TrackedCall] = []
        self.closing: list[OpenRun] = []
        self.call_counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """Forget the calls: they and their runs are the parent's."""
        super().after_fork_in_child()
        current.set(None)


_state = register(_State())
# The override of this thread or task; and all overrides, the last one for threads that do not inherit the context.
_thread_override: ContextVar[Override | None] = ContextVar("flyteplugins_tracking_override", default=None)
_overrides: list[Override] = []


def get_run(tracker: str | None = None) -> Any:
    """Return the tracker's own run object.

    Args:
        tracker: The tracker's name, if several are stacked; None for that of the innermost decorated function.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads started inside the function see its run; if several trainings run at once in threads, theirs
        must be started with `contextvars.copy_context().run`, and get None without.
    """
    call = here()
    if tracker is not None:
        call = _nearest(call, tracker)
    return None if call is None or call.run is None else call.run.vendor_run


def here() -> TrackedCall | None:
    """Return the call that this thread or task is in; None outside of a decorated function. See `get_run`."""
    call = current.get()
    return _innermost() if call is None and _state.running else call


def find_simulated(call: TrackedCall) -> list[TrackedCall]:
    """Return the running calls of the simulation that `call` belongs to."""
    with _state.lock:
        return [running for running in _state.running if running.override is call.override]


@contextmanager
def detached() -> Iterator[None]:
    """Keep functions in the block from joining a call around it."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


@contextmanager
def override(doubles: Override) -> Iterator[None]:
    """Use test doubles for the functions that are called in the block, in every thread."""
    _overrides.append(doubles)
    try:
        yield
    finally:
        _overrides.remove(doubles)
        with _state.lock:  # a call may still run, in a thread that waits in vain: no later call must join it
            _state.running[:] = [call for call in _state.running if call.override is not doubles]


@contextmanager
def override_here(doubles: Override) -> Iterator[None]:
    """Use test doubles in this thread or task only. They take precedence over `override`.

    Functions in the block join no call around it.
    """
    token = _thread_override.set(doubles)
    try:
        with detached():
            yield
    finally:
        _thread_override.reset(token)


def active_override() -> Override | None:
    """Return the test doubles for functions that are called here."""
    return _thread_override.get() or next(reversed(_overrides), None)


def count(tracker: str, call_counts: Counter[str] | None) -> int:
    """Count one more call, in `call_counts` or else in this process, and return the number of calls."""
    counts = _state.call_counts if call_counts is None else call_counts
    with _state.lock:
        counts[tracker] += 1
        return counts[tracker]


def begin(call: TrackedCall) -> None:
    """Register a call as running."""
    with _state.lock:
        _state.running.append(call)


def end(call: TrackedCall, exit_code: int) -> bool:
    """Unregister a call that has ended with `exit_code`.

    Returns:
        Whether it had a run that no other call uses any more.
    """
    with _state.lock:
        if call in _state.running:
            _state.running.remove(call)
        if call.run is None:
            return False
        if call.is_opener:
            call.run.opener_exit_code = exit_code
        else:
            call.run.joined -= 1
        if call.run.is_in_use:
            return False
        _state.closing.append(call.run)
        return True


def mark_closed(run: OpenRun) -> None:
    """Unregister a run that has been closed, after `end` has returned True."""
    with _state.lock:
        if run in _state.closing:
            _state.closing.remove(run)
    run.closed.set()


def await_closing(tracker: str, run_id: str, timeout_s: float) -> None:
    """Wait until this process does not close a run of this id any more: wandb-core refuses the id until then."""
    with _state.lock:
        closing = [run for run in _state.closing if run.tracker == tracker and run.handle.id == run_id]
    for run in closing:
        run.closed.wait(timeout_s)


def open_runs() -> list[OpenRun]:
    """Return the runs that running calls use, of all threads."""
    with _state.lock:
        return _open_runs()


def _open_runs() -> list[OpenRun]:
    return list({id(call.run): call.run for call in _state.running if call.run is not None}.values())


def join_enclosing(parent: TrackedCall | None, tracker: str) -> TrackedCall | None:
    """Join the run of the nearest call around this one that has not ended.

    Returns:
        The call whose run, if it has one, is joined. None if all have ended: a task or thread may outlive its starter.
    """
    with _state.lock:
        enclosing = _nearest(parent, tracker)
        while enclosing is not None:
            run = enclosing.run
            if enclosing in _state.running or (run is not None and run.is_in_use):
                if run is not None:
                    run.joined += 1
                return enclosing
            enclosing = _nearest(enclosing.parent, tracker)
    return None


def join_open_run(tracker: str, run_id: str) -> OpenRun | None:
    """Join the run if this process has it open: a container may run several tasks, of one parent or with it."""
    with _state.lock:
        for run in _open_runs():
            if run.tracker == tracker and run.handle.id == run_id:
                run.joined += 1
                return run
    return None


def _innermost() -> TrackedCall | None:
    """Return the running call for a thread without a context; None if several trainings run at once."""
    running = _state.running[:]  # a copy without the lock: threads ask for each row that they log
    last = running[-1] if running else None
    if len(running) > 1 and any(call is not last and not _encloses(call, last) for call in running):
        return None
    return last


def _encloses(call: TrackedCall, inner: TrackedCall | None) -> bool:
    while inner is not None and inner.parent is not call:
        inner = inner.parent
    return inner is not None


def _nearest(call: TrackedCall | None, tracker: str) -> TrackedCall | None:
    while call is not None and call.tracker != tracker:
        call = call.parent
    return call
