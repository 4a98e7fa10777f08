"""One call of a decorated function: what is done when it begins, and what when it ends.

Every rank loads this module; what only ranks with a run need is in `opening` and `run`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import opens_run, position
from flyteplugins_tracking._rank.pools import counts_of_world
from flyteplugins_tracking._rank.topology import Detection, examine
from flyteplugins_tracking._runs.calls import current, state
from flyteplugins_tracking._runs.context import Asked
from flyteplugins_tracking._runs.exit_codes import exit_code_of
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import when_loaded
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.signals import HandlersPutOff, critical_section
from flyteplugins_tracking._util.text import causes
from flyteplugins_tracking._util.threads import wait_until
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError, TrackingError
from flyteplugins_tracking.trackers.registry import (
    BUILT_IN,
    find_tracker,
    join_clients_calls,
    open_waiting,
    waiting,
)

if TYPE_CHECKING:
    from types import TracebackType

    from flyteplugins_tracking._job.failure import Failure
    from flyteplugins_tracking._job.watch import Duty
    from flyteplugins_tracking._runs.run import Run
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
_DOCTOR = "To see what each rank detects, start this instead of the script: python -m flyteplugins_tracking"


class Call(PerProcess):
    """One call of a decorated function: the block is its body.

    In the block, the call has joined a run or has opened one, or this rank has none. The run ends with the status of
    the block: 0 for a return, 1 for an exception, the code of a SystemExit, 130 for a KeyboardInterrupt, and 143 after
    a SIGTERM, however the block ends.

    `__enter__` and `__exit__` are critical sections, for all signals. A generator under `contextlib.contextmanager` has
    none: an exception out of a signal handler could leave the run open.

    Attributes:
        asked: What it asks for.
        parent: The call around this one, of any tracker.
        who: This process.
        number: The number of this call among those of the tracker in this process, or in this attempt of its task.
        run: The run that it has joined or opened; None on a rank without a run.
        listener: Listens for SIGTERM during the call. Each call has its own start and stop.
        stopping: What `should_stop` has started; None until the function calls it.
        is_parents: Whether this process was forked during the call, and must not end it.
        opens_later: Whether the run is opened by the script's own call of the client: `flyteplugins-tracking run`.
    """

    who = Detection()
    number = 1
    run: Run | None = None
    listener: Sigterm | None = None
    stopping: Stopping | None = None
    is_parents = False
    opens_later = False
    _has_ended = False
    _exit_code = INTERRUPTED  # if nothing else is noted: only a second Ctrl-C keeps it from that

    def __init__(self, asked: Asked) -> None:
        """Does nothing yet."""
        outer = current.get()
        self.asked = asked
        # Only this thread's own parent: decorated functions in several threads are several training runs.
        self.parent = None if outer is None or outer.is_parents else outer
        self._around = ExitStack()  # what the function has around it: its child tasks' run, or clients that open none
        self._duties: Sequence[Duty] = ()
        register(self)

    def after_fork_in_child(self) -> None:
        self.is_parents = True

    def __repr__(self) -> str:
        info = self.who.info
        place = "no job" if info is None else f"rank {info.rank} of {info.world_size}"
        return f"Call({self.asked.tracker.name}, number {self.number}, {place}, {self.run or 'no run'})"

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
            _name_doctor(error)
            if isinstance(error, TrackingError):
                # Its message says what to do. The library's frames would stand between the user's call and the message.
                raise error.with_traceback(None)  # noqa: B904 its cause is kept
            raise
        return self

    @critical_section(_PATIENCE_S)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the call, once: these steps in this order. If one raises, the others are taken with that error."""
        if self.is_parents or self._has_ended:
            return
        steps = (
            self._stop_watching,  # which rank hangs or is slow
            lambda _: self._around.close(),  # tasks do not continue the run any more, and clients open runs again
            self._note_status,
            self._announce_failure,  # to its run, and to the other ranks, which may take seconds
            self._record_stop,  # of `should_stop`
            self._leave_run,  # the last call of a run closes it: the steps of that are in `Run.close`
            self._stop_listening,  # raises the exit if SIGTERM has come
            self._leave_context,  # `get_run` is that of the function around
        )
        try:
            with HandlersPutOff():
                _take(steps, error)
        finally:
            self._has_ended = True

    @property
    def job(self) -> DistributedInfo | None:
        """This rank, if the other ranks of its job can be told and heard; None in a simulated job."""
        return self.who.info if self.asked.world.is_real else None

    @property
    def own_run(self) -> Run | None:
        """The run that it has opened; None if it has joined one, or has none."""
        return self.run if self.run is not None and self.run.asked is self.asked else None

    def listen_for_sigterm(self, timeout_s: float, package: str | None) -> None:
        """Listen for SIGTERM from now on, if that is possible in this thread.

        Args:
            timeout_s: Seconds that finishing the run may take.
            package: The vendor's package, as the tracker imports it; None without a run.
        """
        from flyteplugins_tracking._runs.run import SIGTERM

        if self.asked.world.is_real and SIGTERM.start(package, timeout_s):
            if self.listener is not None:  # `should_stop()` came before the script's own opening
                self.listener.stop()
            self.listener = SIGTERM

    def publish_files(self, is_async: bool = False) -> Any:
        """Make the files of a run that has ended an output of its task, if `download_logs` is set. Raises nothing.

        Returns:
            An awaitable if `is_async` and there are files; else None.
        """
        run = self.own_run
        return None if run is None or self.is_parents else run.publish_files(is_async)

    # What begins the call

    def _begin(self) -> None:
        _withdraw_announced()
        current.set(self)
        asked = self.asked
        enclosing = None
        if asked.config.run_mode != "new" and not asked.task.has_workers:
            if self.parent is not None:
                open_waiting(asked.tracker.name, asked.config.arguments)
            enclosing = state.join(self.parent, asked.tracker.name)
        if enclosing is None:
            self._open()
        else:
            self.who, self.run = enclosing.who, enclosing.run
            if asked.config.role is not None:
                text = "%s: role=%r is ignored: its function runs in the process of the function that has the run"
                logger.warning(text, asked.tracker.name, asked.config.role)
            if self.run is not None:
                self.listen_for_sigterm(self.run.asked.config.finish_timeout_s, asked.tracker.package)
        state.begin(self)
        self._use_run()

    def _use_run(self) -> None:
        """Take up what needs the run, or would need it."""
        if self.listener is not None:
            self.listener.run_opened()
        run = self.own_run
        if run is not None:
            self._around.enter_context(self.asked.context.propagate_run(self.asked.tracker, run.handle.run))
        self._watch_ranks()

    def _open(self) -> None:
        """Find out who this process is, and open its run if it should have one, or have the script open it."""
        asked, self.who = self.asked, examine(os.environ)
        info, name = self.who.info, asked.tracker.name
        counts = asked.context.call_counts
        self.number = state.count(name, counts_of_world(info, self.who.pool) if counts is None else counts)
        logger.debug("%s: this process is %s, by %s", name, info or "no rank", self.who.variables)
        children.mark(self.who.variables)
        config, is_off, parent_id = asked.config, asked.is_disabled, None
        parent_run = None if is_off else _run_of_calling_task(asked, self.who)
        if parent_run is not None:
            # A role has a config of its own, also in the run of the task that calls it.
            own = {} if config.role is None else {"config": config.config}
            config, parent_id = config.for_parent({**parent_run, **own}), parent_run["id"]
        config = config.in_world(info)
        self.asked = asked = replace(asked, config=config)
        if is_off:
            self._keep_clients_idle(is_off)
        elif self.opens_later and name in BUILT_IN:
            self._wait_for_script()
        else:
            self._open_planned(parent_id)

    def _wait_for_script(self) -> None:
        """Have the script's first call of a client open the run: of any, if the command names no tracker."""
        config = self.asked.config
        self._around.callback(waiting.openers.clear)
        for name in BUILT_IN if "tracker" not in config.given else (self.asked.tracker.name,):
            tracker = find_tracker(name)
            if set(tracker.arguments).issuperset(config.options):
                waiting.openers[name] = partial(self._open_for_script, tracker)
                self._around.callback(when_loaded(name, partial(join_clients_calls, name, config)))

    @critical_section(_PATIENCE_S)
    def _open_for_script(self, tracker: Tracker, arguments: Mapping[str, Any]) -> None:
        """Open the run of a script that itself asks for one, or have its clients idle if another rank has the run."""
        asked, config, info = self.asked, self.asked.config, self.who.info
        if config.run_mode != "auto" or config.run_file is not None:  # the ranks have one id, or the file has it
            arguments = {name: value for name, value in arguments.items() if name != "id"}
        try:
            with HandlersPutOff():
                config = config.with_defaults({**arguments, "tracker": tracker.name})
                if info is not None and config.run_mode == "auto" and "primary_rank" not in config.given:
                    from flyteplugins_tracking._job.board import rank_that_opens

                    rank = rank_that_opens(info, os.environ, config.rank_scope, tracker.name)
                    # Where all ranks call it, rank 0 is the one that logs: it has a run of its own if it comes late.
                    is_late = position(info, config.rank_scope) == 0 and rank != 0
                    config = replace(config, run_mode="new") if is_late else replace(config, primary_rank=rank)
                self.asked = replace(asked, tracker=tracker, config=config.in_world(info))
                self._open_planned(None)
                self._stop_watching(None)  # it has begun without the run
                self._use_run()
        except BaseException as error:
            if self.run is None:  # the script may go on, and ask again
                self._stop_listening(error)
                self.asked, self.listener = asked, None
            _name_doctor(error)
            raise

    def _open_planned(self, parent_id: str | None) -> None:
        """Open the run if this rank should have one. If not, it needs no id, which would cost imports and time."""
        asked, config, name, info = self.asked, self.asked.config, self.asked.tracker.name, self.who.info
        if not opens_run(info, config.run_mode, config.rank_scope, config.primary_rank):
            logger.debug("%s: this rank has no run", name)
            self._keep_clients_idle(False)
            return
        from flyteplugins_tracking._runs.opening import open_run

        try:
            self.listen_for_sigterm(config.finish_timeout_s, asked.tracker.package)
            self.run = open_run(asked, self.who, self.number, parent_id)
        except RuntimeError as error:
            if "start new thread" not in str(error):  # CPython's text
                raise
            # A limit of the machine or its container must not end the training job.
            logger.warning("%s: the function is called without a run: %s", name, error)
            if self.listener is not None:
                self.listener.stop()
                self.listener = None

    def _keep_clients_idle(self, is_off: bool) -> None:
        """Have the clients that the function's code may use open no run, on a rank without one."""
        trackers = [self.asked.tracker]
        if is_off:
            trackers += (other for other in map(find_tracker, BUILT_IN) if other is not self.asked.tracker)
        for tracker in trackers:
            # Without a job, no tracker waits for the run of the primary, which has none either.
            restore = tracker.on_inactive_rank(self.asked.config, None if is_off else self.who.info)
            if restore is not None:
                self._around.callback(restore)

    def _watch_ranks(self) -> None:
        """Have the watch look at the job's ranks, if `hang_timeout_s` or `pulse_s` asks for it.

        It does so for one call: not if it does it for a function around this one, or in another thread.
        """
        config, run = self.asked.config, self.run
        is_asked_for = config.hang_timeout_s is not None or config.pulse_s is not None
        if not is_asked_for or self.asked.is_disabled:
            return
        from flyteplugins_tracking._job.hang import RollCallDuty
        from flyteplugins_tracking._job.pulse import PulseDuty
        from flyteplugins_tracking._job.watch import ALONE, WATCH, Duty

        if WATCH.does(RollCallDuty, PulseDuty):
            return
        info, duties = self.who.info or ALONE, list[Duty]()
        shown_by = run if run is not None and run.plan.first else None  # the first primary
        if config.hang_timeout_s is not None:
            show = None if shown_by is None else shown_by.record_hang
            duties.append(RollCallDuty(info, config.hang_timeout_s, show, has_run=run is not None))
        if config.pulse_s is not None:
            log = None if shown_by is None else shown_by.add_to_next_row
            duties.append(PulseDuty(info, config.pulse_s, log))
        if WATCH.add(info, *duties, without="hang_timeout_s and pulse_s are ignored"):
            self._duties = duties

    # What ends it, in the order of `__exit__`

    def _stop_watching(self, error: BaseException | None) -> None:
        if self._duties:
            from flyteplugins_tracking._job.watch import WATCH

            WATCH.remove(*self._duties, has_failed=error is not None)

    def _note_status(self, error: BaseException | None) -> None:
        self._has_come()  # even just now: the run's status asks when
        if error is not None and _may_be_of_sigterm(error):
            wait_until(self._has_come, _SIGTERM_S, _POLL_S)  # a launcher signals one process after the other
        asyncio = sys.modules.get("asyncio")
        is_cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
        if is_cancelled and self._has_come(signal.SIGINT):
            self._exit_code = INTERRUPTED  # asyncio makes a cancellation of Ctrl-C
        else:
            self._exit_code = 0 if error is None else exit_code_of(error, self.asked.context.success_exceptions)
        logger.debug("%r ends with status %d", self, self._exit_code)

    def _has_come(self, number: int = signal.SIGTERM) -> bool:
        return self.listener is not None and self.listener.has_come(number)

    def _announce_failure(self, error: BaseException | None) -> None:
        """Note why this rank fails, if it is not stopped, and tell the other ranks if its outermost call ends."""
        if error is None or self._exit_code in (0, INTERRUPTED, TERMINATED) or self._has_come():
            return
        try:
            from flyteplugins_tracking._job.failure import Failure
            from flyteplugins_tracking._job.failures import announce_failure

            info, run = self.who.info, self.own_run
            failure = Failure.of_error(error, 0 if info is None else info.rank, self._exit_code)
            if run is not None:
                run.opener_failure = failure  # at once: the notice may wait for another host, and a SIGTERM may come
            if self.job is not None and self.parent is None:
                announce_failure(error, failure, self.job)
                _announced.append((failure, self.job))
        except Exception:
            # The user's exception must leave the function, and not the library's: perhaps no thread can be started.
            logger.warning("the other ranks are not told why this one fails", exc_info=True)

    def _record_stop(self, _: BaseException | None) -> None:
        if self.stopping is not None:
            self.stopping.before_close()

    def _leave_run(self, _: BaseException | None) -> None:
        with nullcontext() if self.listener is None else self.listener.closing():
            is_last = state.end(self)
            if self.run is not None:
                self.run.leave(None if self.own_run is None else self._exit_code, is_last)

    def _stop_listening(self, error: BaseException | None) -> None:
        if self.listener is not None:
            self.listener.stop(error)

    def _leave_context(self, _: BaseException | None) -> None:
        if self.stopping is not None:
            self.stopping.after_close()
        if current.get() is self:  # and not a coroutine's that is left behind, and closed in another context
            # Two generators with a block each may end in the order in which they have started.
            outer = self.parent
            while outer is not None and outer._has_ended:
                outer = outer.parent
            current.set(outer)


def _take(steps: Sequence[Callable[[BaseException | None], object]], error: BaseException | None) -> None:
    """Take each step, also if one before it has raised: the later ones get that error, and it is raised at the end."""
    for number, step in enumerate(steps, 1):
        try:
            step(error)
        except BaseException as raised:
            _take(steps[number:], raised)
            raise


def _name_doctor(error: BaseException) -> None:
    """Say in the error how to look into it, once: the call of a function may have opened the run around it."""
    if isinstance(error, (TopologyError, IdentityError)) and _DOCTOR not in str(error):
        error.args = (f"{error}\n{_DOCTOR}",)


def _run_of_calling_task(asked: Asked, who: Detection) -> Mapping[str, Any] | None:
    """Return the run of the task that calls this one, if this task continues it.

    Raises:
        ConfigError: It should, and the calling task has no run.
    """
    config, name = asked.config, asked.tracker.name
    is_distributed = asked.task.has_workers or who.info is not None or who.is_child
    if config.role is not None:  # all ranks of its job have one writer
        joins = config.id is None
    else:
        joins = not is_distributed and config.run_mode != "new" and config.roles is None
    parent_run = asked.context.parents.get(name) if joins else None
    if parent_run is None and asked.task.has_workers is False and who.info is None and config.run_mode == "shared":
        raise ConfigError(
            "run_mode='shared' in a task without workers of its own continues the run of the task that calls it, "
            f"and that task has no {name} run: put tracking_init on that task too, or use run_mode='auto'"
        )
    return parent_run


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
