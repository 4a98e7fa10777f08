"""One call of a decorated function, and the calls that run in this process.

Every rank loads this module; what only ranks with a run need is in `run`. The state is kept here, in a module that
wrappers import, and never in a wrapper: Elastic's spawn pickles those.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import opens_run
from flyteplugins_tracking._rank.pools import counts_of_world
from flyteplugins_tracking._rank.topology import Detection, examine
from flyteplugins_tracking._runs.context import ExecutionContext, Task
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.signals import HandlersPutOff, critical_section
from flyteplugins_tracking._util.text import causes
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError, TrackingError
from flyteplugins_tracking.trackers.base import RunRequest as RunRequest
from flyteplugins_tracking.trackers.config import TrackingConfig, is_disabled

if TYPE_CHECKING:
    from types import TracebackType

    from flyteplugins_tracking._job.failure import Failure
    from flyteplugins_tracking._runs.run import Run
    from flyteplugins_tracking._runs.run_file import RunFile
    from flyteplugins_tracking._runs.sigterm import Sigterm
    from flyteplugins_tracking._runs.stopping import Stopping
    from flyteplugins_tracking.trackers.base import Tracker

logger = logging.getLogger(__name__)

# How long a signal waits for a run that is being opened or closed: it exists at the server, and would stay "running".
_PATIENCE_S = 5.0
# How much later than one of its processes this one may get a SIGTERM that is sent to all of them.
_SIGTERM_S = 0.5
_POLL_S = 0.005
_LOST_CHILD = re.compile(
    r"DataLoader worker .*(?:Terminated|exited unexpectedly)|terminated abruptly|died with <Signals\.SIGTERM"
)
# click, and the packages whose exceptions are not subclasses of click's.
_CLICKS = frozenset({"click", "typer", "asyncclick", "rich_click"})
_DOCTOR = "To see what each rank detects, start this instead of the script: python -m flyteplugins_tracking"


class World:
    """What is around the calls of this process. The test kit has a world without services, signals and other processes.

    Attributes:
        is_real: Whether there are any.
    """

    is_real = True

    def config(self, config: TrackingConfig) -> TrackingConfig:
        """Return the arguments that have an effect here."""
        return config

    def tracker(self, tracker: Tracker) -> Tracker:
        """Return the tracker to use instead of the given one."""
        return tracker

    def context(self, context: ExecutionContext) -> ExecutionContext:
        """Return the execution context to use instead of the given one."""
        return context


class Call(PerProcess):
    """One call of a decorated function: the block is its body.

    In the block, the call has joined a run or has opened one, or this rank has none. The run ends with the status of
    the block: 0 for a return, 1 for an exception, the code of a SystemExit, 130 for a KeyboardInterrupt, and 143 after
    a SIGTERM, however the block ends.

    `__enter__` and `__exit__` are critical sections, for all signals. A generator under `contextlib.contextmanager` has
    none: an exception out of a signal handler could leave the run open.

    Attributes:
        config: The user's arguments.
        tracker: The tracker.
        context: The platform's side of the call.
        task: The task whose function is called, if it was decorated as one.
        parent: The call around this one, of any tracker.
        world: What is around it.
        found: Who this process is; empty if the call has joined another one.
        info: This rank; None outside a distributed job.
        number: The number of this call among those of the tracker in this process, or in this attempt of its task.
        run_file: The file of `run_file=`, on a rank that opens a run.
        parent_id: The run of the calling task, if this task continues it.
        run: The run that it has joined or opened; None on a rank without a run.
        listener: Listens for SIGTERM during the call. Each call has its own start and stop.
        stopping: What `should_stop` has started; None until the function calls it.
        is_parents: Whether this process was forked during the call, and must not end it.
    """

    found: Detection = Detection()
    info: DistributedInfo | None = None
    number: int = 1
    run_file: RunFile | None = None
    parent_id: str | None = None
    run: Run | None = None
    listener: Sigterm | None = None
    stopping: Stopping | None = None
    is_parents: bool = False
    _has_ended = False

    def __init__(
        self, config: TrackingConfig, tracker: Tracker, context: ExecutionContext, task: Task | None = None
    ) -> None:
        """Store the arguments, or what the world has instead of them."""
        self.world, outer = worlds[-1], current.get()
        self.config = self.world.config(config)
        self.tracker = self.world.tracker(tracker)
        self.context = self.world.context(context)
        self.task = task
        # Only this thread's own parent: decorated functions in several threads are several training runs.
        self.parent = None if outer is None or outer.is_parents else outer
        self._undo = ExitStack()
        register(self)

    def after_fork_in_child(self) -> None:
        self.is_parents = True

    def __repr__(self) -> str:
        place = "no job" if self.info is None else f"rank {self.info.rank} of {self.info.world_size}"
        return f"Call({self.tracker.name}, number {self.number}, {place}, {self.run or 'no run'})"

    @critical_section(_PATIENCE_S)
    def __enter__(self) -> Call:
        """Open the run. If that fails, or a signal's handler raises, nothing stays open.

        Raises:
            TrackingError: The run cannot be opened.
        """
        try:
            with HandlersPutOff():
                self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, TrackingError):
                # Its message says what to do. The library's frames would stand between the user's call and the message.
                raise error.with_traceback(None)  # noqa: B904 its cause is kept
            raise
        return self

    @critical_section(_PATIENCE_S)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo what `__enter__` has done, in reverse: the run is closed with the status of the block. Once."""
        if self.is_parents or self._has_ended:
            return
        try:
            with HandlersPutOff():
                self._undo.__exit__(kind, error, traceback)
        finally:
            self._has_ended = True

    @property
    def job(self) -> DistributedInfo | None:
        """This rank, if the other ranks of its job can be told and heard; None in a simulated job."""
        return self.info if self.world.is_real else None

    @property
    def is_disabled(self) -> bool:
        """Whether no rank has a run, because the user has turned tracking off. A test has its recorded runs.

        Raises:
            ConfigError: The variable has an unknown value.
        """
        return self.world.is_real and is_disabled()

    @property
    def timeout_s(self) -> float | None:
        """How long the platform lets the task run, in seconds; None if nothing ends it, as in a local execution."""
        return None if self.task is None or not self.context.on_cluster else self.task.timeout_s

    @property
    def attempt(self) -> int:
        """How many attempts of the run came before: told by the launcher or the job, by the platform, and by a file."""
        from flyteplugins_tracking._job.starts import outer_job

        is_program = self.context.base_id is None and self.found.pool is None and children.is_program()
        outer = outer_job(os.environ) if is_program else None
        count = self.info.restart_count if self.info else outer.restarts if outer else 0
        return count + self.context.attempt + (0 if self.run_file is None else self.run_file.earlier)

    @property
    def _has_workers(self) -> bool | None:
        return None if self.task is None else self.task.has_workers

    # What opens the call

    def _begin(self) -> None:
        _withdraw_announced()
        try:
            with ExitStack() as undo:
                undo.callback(self._reset, current.set(self))
                undo.push(self._close)
                self._open(undo)
                self._undo = undo.pop_all()
        except (TopologyError, IdentityError) as error:
            error.args = (f"{error}\n{_DOCTOR}",)
            raise

    def _open(self, undo: ExitStack) -> None:
        enclosing = None
        if self.config.run_mode != "new" and not self._has_workers:
            enclosing = _join_enclosing(self.parent, self.tracker.name)
        if enclosing is None:
            self._detect()
            self._open_run(undo)
        else:
            self.info, self.run = enclosing.info, enclosing.run
            if self.config.role is not None:
                text = "%s: role=%r is ignored: its function runs in the process of the function that has the run"
                logger.warning(text, self.tracker.name, self.config.role)
            if self.run is not None:
                from flyteplugins_tracking._runs.run import listen_for_sigterm

                listen_for_sigterm(self, self.run.opener.config.finish_timeout_s)
        state.begin(self)
        if self.listener is not None:
            self.listener.run_opened()
        if self.run is not None and self.run.opener is self:
            undo.enter_context(self.context.propagate_run(self.tracker, self.run.handle.run))
        self._watch_ranks(undo)

    def _detect(self) -> None:
        """Find out who this process is, and with it the arguments of this call."""
        self.found = examine(os.environ)
        self.info = self.found.info
        counts = self.context.call_counts
        if counts is None:
            counts = counts_of_world(self.info, self.found.pool)
        self.number = state.count(self.tracker.name, counts)
        logger.debug("%s: this process is %s, by %s", self.tracker.name, self.info or "no rank", self.found.variables)
        children.mark(self.found.variables)
        config, parent_run = self.config, None if self.is_disabled else self._run_of_calling_task()
        if parent_run is not None:
            # A role has a config of its own, also in the run of the task that calls it.
            own = {} if config.role is None else {"config": config.config}
            config, self.parent_id = config.for_parent({**parent_run, **own}), parent_run["id"]
        self.config = config.in_world(self.info)

    def _run_of_calling_task(self) -> Mapping[str, Any] | None:
        """Return the run of the task that calls this one, if this task continues it.

        Raises:
            ConfigError: It should, and the calling task has no run.
        """
        run_mode, name = self.config.run_mode, self.tracker.name
        is_distributed = self._has_workers or self.info is not None or self.found.is_child
        if self.config.role is not None:  # all ranks of its job have one writer
            joins = self.config.id is None
        else:
            joins = not is_distributed and run_mode != "new" and self.config.roles is None
        parent_run = self.context.parents.get(name) if joins else None
        if parent_run is None and self._has_workers is False and self.info is None and run_mode == "shared":
            raise ConfigError(
                "run_mode='shared' in a task without workers of its own continues the run of the task that calls it, "
                f"and that task has no {name} run: put tracking_init on that task too, or use run_mode='auto'"
            )
        return parent_run

    def _open_run(self, undo: ExitStack) -> None:
        config, is_off = self.config, self.is_disabled
        # A rank without a run needs no id: agreeing on one would cost imports and time.
        if is_off or not opens_run(self.info, config.run_mode, config.rank_scope, config.primary_rank):
            logger.debug("%s: this rank has no run", self.tracker.name)
            # Without a job, no tracker waits for the run of the primary, which has none either.
            info = None if is_off else self.info
            for tracker in _all_trackers(self.tracker) if is_off else [self.tracker]:
                restore = tracker.on_inactive_rank(config, info)
                if restore is not None:
                    undo.callback(restore)
            return
        from flyteplugins_tracking._runs.run import open_run

        try:
            self.run = open_run(self)
        except RuntimeError as error:
            if "start new thread" not in str(error):  # CPython's text
                raise
            # A limit of the machine or its container must not end the training job.
            logger.warning("%s: the function is called without a run: %s", self.tracker.name, error)
            if self.listener is not None:
                self.listener.stop()
                self.listener = None

    def _watch_ranks(self, undo: ExitStack) -> None:
        """Have the watch look at the job's ranks, if `hang_timeout_s` or `pulse_s` asks for it.

        It does so for one call: not if it does it for a function around this one, or in another thread.
        """
        if not self.config.is_monitored or self.is_disabled:
            return
        from flyteplugins_tracking._job.hang import RollCallDuty
        from flyteplugins_tracking._job.pulse import PulseDuty
        from flyteplugins_tracking._job.watch import ALONE, WATCH, Duty

        if WATCH.does(RollCallDuty, PulseDuty):
            return
        config, info, run, duties = self.config, self.info or ALONE, self.run, list[Duty]()
        shown_by = run if run is not None and run.plan.first else None  # the first primary
        if config.hang_timeout_s is not None:
            show = None if shown_by is None else shown_by.record_hang
            duties.append(RollCallDuty(info, config.hang_timeout_s, show, has_run=run is not None))
        if config.pulse_s is not None:
            log = None if shown_by is None else shown_by.add_to_next_row
            duties.append(PulseDuty(info, config.pulse_s, log))
        if WATCH.add(info, *duties, without="hang_timeout_s and pulse_s are ignored"):
            undo.push(lambda kind, *_: WATCH.remove(*duties, has_failed=kind is not None))

    # What closes it

    def _close(self, _: object, error: BaseException | None, __: object) -> None:
        """End the call with the function's status. The run is closed if no other call uses it."""
        if self.listener is not None:
            self.listener.has_come()  # even just now: the run's status asks when
        if error is not None and _may_be_of_sigterm(error):
            self._await_sigterm()
        exit_code = 0 if error is None else self._exit_code_of(error)
        logger.debug("%r ends with status %d", self, exit_code)
        failure = None if error is None else self._announce(error, exit_code)
        try:
            if self.stopping is not None:
                self.stopping.before_close()
            if self.run is None:
                state.end(self)
            else:
                self.run.leave(self, exit_code, failure)
        finally:
            if self.listener is not None:
                self.listener.stop(error)

    def _await_sigterm(self) -> None:
        """Wait a moment for the SIGTERM that a process of this one has had before: a launcher signals one by one."""
        deadline = time.monotonic() + _SIGTERM_S
        while not self._is_terminated and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @property
    def _is_terminated(self) -> bool:
        return self.listener is not None and self.listener.has_come()

    def _reset(self, token: Token[Call | None]) -> None:
        if self.stopping is not None:
            self.stopping.after_close()
        with suppress(ValueError):  # a coroutine that is left behind is closed in another context
            current.reset(token)
            # Two generators with a block each may end in the order in which they have started.
            outer = current.get()
            while outer is not None and outer._has_ended:
                outer = outer.parent
            current.set(outer)

    def _exit_code_of(self, error: BaseException) -> int:
        asyncio = sys.modules.get("asyncio")
        is_cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
        if is_cancelled and self.listener is not None and self.listener.has_come(signal.SIGINT):
            return INTERRUPTED  # asyncio makes a cancellation of Ctrl-C
        return exit_code_of(error, self.context.success_exceptions)

    def _announce(self, error: BaseException, exit_code: int) -> Failure | None:
        """Return why this rank fails, and tell the other ranks if its outermost call ends. Raises nothing.

        Returns:
            None if the rank does not fail, but is stopped.
        """
        if exit_code in (0, INTERRUPTED, TERMINATED) or self._is_terminated:
            return None
        failure = None
        try:
            from flyteplugins_tracking._job.failure import Failure
            from flyteplugins_tracking._job.failures import announce_failure

            failure = Failure.of_error(error, 0 if self.info is None else self.info.rank, exit_code)
            if self.job is not None and self.parent is None:
                announce_failure(error, failure, self.job)
                _announced.append((failure, self.job))
        except Exception:
            # The user's exception must leave the function, and not the library's: perhaps no thread can be started.
            logger.warning("the other ranks are not told why this one fails", exc_info=True)
        return failure

    def publish_files(self, is_async: bool = False) -> Any:
        """Make the files of a run that has ended an output of its task, if `download_logs` is set. Raises nothing.

        Returns:
            An awaitable if `is_async` and there are files; else None.
        """
        return None if self.run is None or self.is_parents else self.run.publish_files(self, is_async)


def _may_be_of_sigterm(error: BaseException) -> bool:
    """Whether an exception, or one that it comes from, says that another process of this one has been terminated."""
    with suppress(Exception):  # an exception's own `__str__` may raise
        # The end of a pipe to a child; and what torch, `concurrent.futures` and `subprocess` say.
        return any(
            isinstance(one, (EOFError, ConnectionError)) or _LOST_CHILD.search(str(one)) for one in causes(error)
        )
    return False


# The failures that this process has announced as the end of its rank.
_announced: list[tuple[Failure, DistributedInfo]] = []


def _withdraw_announced() -> None:
    """Take back what this rank has announced: its caller has handled the exception, since it calls a function again."""
    while _announced:
        from flyteplugins_tracking._job.failures import withdraw_failure

        try:
            withdraw_failure(*_announced.pop())
        except Exception:
            logger.warning("an exception that was handled may be taken for the end of this rank", exc_info=True)


def exit_code_of(error: BaseException, successes: tuple[type[BaseException], ...] = ()) -> int:
    """Return the status of a process that ends with `error`."""
    if isinstance(error, successes):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if _is_clicks(type(error)):
        # click ends the process with it: `Exit`, `UsageError` and other `ClickException`s; an `Abort` has none.
        code = getattr(error, "exit_code", 1)
        return code & 0xFF if isinstance(code, int) else 1
    if isinstance(error, SystemExit):
        # https://docs.python.org/3/library/exceptions.html#SystemExit
        # The system keeps the lowest 8 bits of the code, and Python makes -1 of a code that is no C integer.
        if isinstance(error.code, int):
            return error.code & 0xFF if -(2**63) <= error.code < 2**63 else 255
        return int(error.code is not None)
    return 1


def _is_clicks(kind: type[BaseException]) -> bool:
    """Whether it is a class of click's exceptions, or of a package that has a copy of click. None is imported."""
    return any(base.__module__.partition(".")[0] in _CLICKS for base in kind.__mro__)


# The call of this thread or task.
current: ContextVar[Call | None] = ContextVar("flyteplugins_tracking_call", default=None)
# The real world, and those of the tests that run: the last one holds, in every thread.
worlds = [World()]


class _State(PerProcess):
    """The calls of this process, and their runs.

    Attributes:
        calls: The calls that have not ended, also for threads that a function starts: they do not inherit the context.
        runs: The runs that are open, or that the last of their calls is closing.
        lock: Held while these and the users of a run change.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runs: list[Run] = []
        self.lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, tracker: str, counts: Counter[str] | None) -> int:
        """Count one more call, in `counts` or else in this process, and return the number of calls."""
        counts = self._counts if counts is None else counts
        with self.lock:
            counts[tracker] += 1
            return counts[tracker]

    def begin(self, call: Call) -> None:
        """Add a call that runs."""
        with self.lock:
            self.calls.append(call)

    def end(self, call: Call) -> None:
        """Remove a call that has ended, or that could not begin."""
        with self.lock:
            if call in self.calls:
                self.calls.remove(call)

    def open_runs(self) -> list[Run]:
        """Return the runs that calls use, of all threads."""
        with self.lock:
            return [run for run in self.runs if run.users > 0]


state = register(_State())


def get_run(tracker: str | None = None) -> Any:
    """Return the tracker's own run object.

    Args:
        tracker: The tracker's name, if several are stacked; None for that of the innermost decorated function.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads that the function starts have its run. If several decorated functions run in threads at the same
        time, start their threads with `contextvars.copy_context().run`: otherwise `get_run()` is None in them.
    """
    call = here()
    if tracker is not None:
        call = _nearest(call, tracker)
    return None if call is None or call.run is None else call.run.handle.run


def here() -> Call | None:
    """Return the call that this thread or task is in; None outside of a decorated function. See `get_run`."""
    call = current.get()
    if call is not None and not call.is_parents:
        return call
    return _innermost() if state.calls else None


@contextmanager
def override(world: World) -> Iterator[None]:
    """Have another world around the functions that are called in the block, in every thread."""
    worlds.append(world)
    try:
        yield
    finally:
        worlds.remove(world)


def _all_trackers(tracker: Tracker) -> list[Tracker]:
    """Return `tracker` and the built-in ones: the function's code may use the client of each."""
    from flyteplugins_tracking.trackers.registry import BUILT_IN, find_tracker

    return [tracker, *(other for other in map(find_tracker, BUILT_IN) if other is not tracker)]


def _join_enclosing(parent: Call | None, tracker: str) -> Call | None:
    """Join the run of the nearest call around this one that has not ended.

    Returns:
        The call whose run, if it has one, is joined. None if all have ended: a task or thread may outlive its starter.
    """
    with state.lock:
        enclosing = _nearest(parent, tracker)
        while enclosing is not None:
            run = enclosing.run
            if enclosing in state.calls or (run is not None and run.users > 0):
                if run is not None:
                    run.users += 1
                return enclosing
            enclosing = _nearest(enclosing.parent, tracker)
    return None


def _innermost() -> Call | None:
    """Return the running call for a thread without a context; None if several training runs are open together."""
    running = state.calls[:]  # a copy without the lock: threads ask for each row that they log
    last = running[-1] if running else None
    if len(running) > 1 and any(call is not last and not _encloses(call, last) for call in running):
        return None
    return last


def _encloses(call: Call, inner: Call | None) -> bool:
    while inner is not None and inner.parent is not call:
        inner = inner.parent
    return inner is not None


def _nearest(call: Call | None, tracker: str) -> Call | None:
    while call is not None and call.tracker.name != tracker:
        call = call.parent
    return call
