"""The life of a run around one call: whether this rank opens one, and the status that it ends with.

Every rank loads this module. The parts that only ranks with a run need are in `open` and `close`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import opens_run
from flyteplugins_tracking._rank.pools import counts_of_world
from flyteplugins_tracking._rank.topology import Detection, detect, examine
from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs.calls import Task, TrackedCall
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._util.critical import critical_section
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError, TrackingError
from flyteplugins_tracking.trackers.base import RunRequest as RunRequest
from flyteplugins_tracking.trackers.config import TrackingConfig

if TYPE_CHECKING:
    from types import TracebackType

    from flyteplugins_tracking._job.failures import Failure
    from flyteplugins_tracking.trackers.base import Tracker

logger = logging.getLogger(__name__)

# How long a signal waits for a run that is being opened or closed: it exists at the server, and would stay "running".
_PATIENCE_S = 5.0
# The failures that this process has announced as the end of its rank.
_announced: list[tuple[Failure, DistributedInfo]] = []
_DOCTOR = "To see what each rank detects, start this instead of the script: python -m flyteplugins_tracking"


class CallLifecycle:
    """Runs a block with its tracking run open, if this rank has one, and ends the run with the block's status.

    The status is 0 for a return, 1 for an exception, the code of a SystemExit, 130 for a KeyboardInterrupt, and 143
    after a SIGTERM, however the block ends.

    A class, so that its two methods are critical sections: in those of `contextmanager` an exception out of a signal
    handler could leave the run open.
    """

    def __init__(
        self, config: TrackingConfig, tracker: Tracker, context: ExecutionContext, task: Task | None = None
    ) -> None:
        """Store the arguments; the run is opened on entry.

        Args:
            config: The user's arguments.
            tracker: The tracker.
            context: The platform's side of the call.
            task: The task whose function the block is, if it was decorated as one.
        """
        self._block = _tracked(config, tracker, context, task)

    @critical_section(_PATIENCE_S)
    def __enter__(self) -> TrackedCall:
        try:
            return self._block.__enter__()
        except TrackingError as error:
            if isinstance(error, (TopologyError, IdentityError)):
                error.args = (f"{error}\n{_DOCTOR}",)
            # Its message says what to do. Its frames are ours, and would stand between the user's call and the message.
            raise error.with_traceback(None)  # noqa: B904 its cause is kept

    @critical_section(_PATIENCE_S)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, traceback)


@contextmanager
def _tracked(
    config: TrackingConfig, tracker: Tracker, context: ExecutionContext, task: Task | None
) -> Iterator[TrackedCall]:
    override = calls.active_override()
    if override is not None:
        tracker, context = override.tracker(tracker), override.context(context)
    # Only this thread's own parent: decorated functions in several threads at once are several trainings.
    start = _Start(tracker, config, context, task, calls.current.get(), override)
    token = None
    exit_code, failure = 0, None
    _withdraw_announced()
    try:
        call = start.call()
    except Exception as error:
        _announce(error, 1, start.info, start.is_outermost)
        raise
    try:
        token = calls.current.set(call)
        if call.watcher is not None:
            call.watcher.run_opened()
        with _propagated_run(call, tracker, context), _monitored(call, config, context):
            yield call
            context.on_return(call)
    except BaseException as error:
        exit_code = _exit_code_of_call(error, call, context)
        failure = _failure(call, error, exit_code, start)
        raise
    finally:
        try:
            if call.stopping is not None:
                call.stopping.before_close()
            _close(call, exit_code, failure)
        finally:
            if call.stopping is not None:
                call.stopping.after_close()
            if token is not None:
                with suppress(ValueError):  # a coroutine that is left behind is closed in another context
                    calls.current.reset(token)


def publish_files(call: TrackedCall, is_async: bool = False) -> Any:
    """Make the files of a run that has ended an output of its task, if `download_logs` is set. Raises nothing.

    Returns:
        An awaitable if `is_async` and there are files; else None.
    """
    if call.run is None or not call.is_opener or call.run.published_dir is None:
        return None
    from flyteplugins_tracking._runs import close as closing

    return closing.publish_files(call.run, call.run.published_dir, is_async)


def exit_code_of(error: BaseException, successes: tuple[type[BaseException], ...] = ()) -> int:
    """Return the status of a process that ends with `error`."""
    if isinstance(error, successes):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        # https://docs.python.org/3/library/exceptions.html#SystemExit
        # The system keeps the lowest 8 bits of the code.
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _exit_code_of_call(error: BaseException, call: TrackedCall, context: ExecutionContext) -> int:
    asyncio = sys.modules.get("asyncio")
    is_cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
    if is_cancelled and call.watcher is not None and call.watcher.was_interrupted():
        return INTERRUPTED  # asyncio makes a cancellation of Ctrl-C
    return exit_code_of(error, context.success_exceptions)


class _Start(NamedTuple):
    """Makes the call: it joins a run, opens one, or has none."""

    tracker: Tracker
    config: TrackingConfig
    context: ExecutionContext
    task: Task | None
    parent: TrackedCall | None
    override: calls.Override | None

    @property
    def info(self) -> DistributedInfo | None:
        """This rank, as far as it can be told."""
        with suppress(TopologyError):
            return examine(os.environ).info
        return None

    @property
    def is_outermost(self) -> bool:
        """Whether the call's exceptions are the end of the rank, as far as this library knows."""
        return self.parent is None and not self.context.is_simulated

    @property
    def _has_workers(self) -> bool | None:
        return None if self.task is None else self.task.has_workers

    @property
    def _timeout_s(self) -> float | None:
        """The time that the platform gives the task. In a local execution, nothing ends it."""
        return None if self.task is None or not self.context.on_cluster else self.task.timeout_s

    def call(self) -> TrackedCall:
        """Return the call, which is registered as running.

        Raises:
            TrackingError: The run cannot be opened. Nothing is left open then.
        """
        if self.config.run_mode != "new" and not self._has_workers:
            enclosing = calls.join_enclosing(self.parent, self.tracker.name)
            if enclosing is not None:
                return self._join(enclosing)
        return self._open()

    def _join(self, enclosing: TrackedCall) -> TrackedCall:
        if enclosing.run is None:
            call = self._without_run(None, detect(os.environ))
        else:
            from flyteplugins_tracking._runs import open as opening

            call = opening.call_of_joined_run(
                self.tracker, enclosing.run, self.config, self.context, self.parent, self.override, self._timeout_s
            )
        calls.begin(call)
        return call

    def _without_run(self, restore: Callable[[], object] | None, info: DistributedInfo | None) -> TrackedCall:
        return TrackedCall(
            self.tracker.name,
            self.parent,
            self.override,
            info=info,
            restore=restore,
            config=self.config,
            is_simulated=self.context.is_simulated,
            timeout_s=self._timeout_s,
        )

    def _open(self) -> TrackedCall:
        found = examine(os.environ)
        info = found.info
        counts = self.context.call_counts
        if counts is None:
            counts = counts_of_world(info, found.pool)
        call_index = calls.count(self.tracker.name, counts)
        children.mark(found.variables)
        config, parent_run = self._config_and_parent_run(found)
        config = config.in_world(info)
        # A rank without a run needs no id: agreeing on one would cost imports and time.
        if not opens_run(info, config.run_mode, config.rank_scope, config.primary_rank):
            call = self._without_run(self.tracker.on_inactive_rank(config, info), info)
            calls.begin(call)
            return call
        try:
            return self._open_run(config, found, call_index, parent_run)
        except RuntimeError as error:
            if "start new thread" not in str(error):  # CPython's text
                raise
            # A limit of the machine or its container must not keep the training from its work.
            logger.warning("%s: the function is called without a run: %s", self.tracker.name, error)
        call = self._without_run(None, info)
        calls.begin(call)
        return call

    def _open_run(
        self, config: TrackingConfig, found: Detection, call_index: int, parent_run: Mapping[str, Any] | None
    ) -> TrackedCall:
        from flyteplugins_tracking._runs import open as opening

        info = found.info
        with opening.watching(self.tracker, config, self.context, info) as (watcher, failures):
            parent_id = None if parent_run is None else parent_run["id"]
            plan = opening.plan_run(config, self.tracker, self.context, found, call_index, parent_id)
            opener = opening.Opener(
                self.tracker,
                plan,
                config,
                info,
                self.context,
                watcher,
                failures,
                self.context.has_report if self.task is None else self.task.has_report,
                pool=found.pool,
                timeout_s=self._timeout_s,
            )
            return opener.open(self.parent, self.override)

    def _config_and_parent_run(self, found: Detection) -> tuple[TrackingConfig, Mapping[str, Any] | None]:
        """Return the arguments of this call, and the run of the calling task if this task continues it."""
        config, name, info = self.config, self.tracker.name, found.info
        is_distributed = self._has_workers or info is not None or found.is_child
        parent_run = None if is_distributed or config.run_mode == "new" else self.context.parents.get(name)
        if parent_run is not None:
            return config.for_parent(parent_run), parent_run
        if self._has_workers is False and info is None and config.run_mode == "shared":
            raise ConfigError(
                "run_mode='shared' in a task without workers of its own continues the run of the task that calls it, "
                f"and that task has no {name} run: put tracking_init on that task too, or use run_mode='auto'"
            )
        return config, None


@contextmanager
def _monitored(call: TrackedCall, config: TrackingConfig, context: ExecutionContext) -> Iterator[None]:
    """Have a thread look at the job's ranks while the function runs, if `hang_timeout_s` or `pulse_s` asks for it."""
    if not config.is_monitored or context.is_simulated:
        yield
        return
    from flyteplugins_tracking._runs import monitor as monitoring

    monitor = monitoring.start_monitor(call, config)
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if monitor is not None and call.pid == os.getpid():
            monitor.stop(has_failed)


def _propagated_run(call: TrackedCall, tracker: Tracker, context: ExecutionContext) -> AbstractContextManager[None]:
    """Let tasks that the function calls continue the run that it has opened."""
    if call.run is None or not call.is_opener:
        return nullcontext()
    return context.propagate_run(tracker, call.run.vendor_run)


def _failure(call: TrackedCall, error: BaseException, exit_code: int, start: _Start) -> Failure | None:
    """Return why this rank fails, and tell the others. None if it does not fail, but is stopped."""
    is_terminated = call.watcher is not None and call.watcher.terminated
    if exit_code in (0, INTERRUPTED, TERMINATED) or is_terminated or call.pid != os.getpid():
        return None
    return _announce(error, exit_code, call.info, start.is_outermost)


def _announce(error: BaseException, exit_code: int, info: DistributedInfo | None, is_outermost: bool) -> Failure | None:
    """Return the failure of this rank, and tell the other ranks of it if its outermost call ends. Raises nothing."""
    failure = None
    try:
        from flyteplugins_tracking._job.failures import Failure, announce_failure

        failure = Failure.of_error(error, 0 if info is None else info.rank, exit_code)
        if info is not None and is_outermost:
            announce_failure(error, failure, info)
            _announced.append((failure, info))
    except Exception:
        # The user's exception must leave the function, and not one of ours: there may be no thread to be had any more.
        logger.warning("the other ranks are not told why this one fails", exc_info=True)
    return failure


def _withdraw_announced() -> None:
    """Take back what this rank has announced: its caller has handled the exception, since it calls a function again."""
    while _announced:
        from flyteplugins_tracking._job.failures import withdraw_failure

        try:
            withdraw_failure(*_announced.pop())
        except Exception:
            logger.warning("an exception that was handled may be taken for the end of this rank", exc_info=True)


def _close(call: TrackedCall, exit_code: int, failure: Failure | None) -> None:
    if call.pid != os.getpid():
        return
    if call.run is None:
        try:
            calls.end(call, exit_code)
        finally:
            if call.restore is not None:
                call.restore()
            if call.watcher is not None:
                call.watcher.stop()
        return
    from flyteplugins_tracking._runs import close as closing

    closing.close(call, call.run, exit_code, failure)
