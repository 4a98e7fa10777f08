"""An open W&B run. Only the decorated function's end ends it. What is logged after an early end opens it again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.critical import critical_section
from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import first_line, without_credentials
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT, restart_count_of
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.rows import NextRow
from flyteplugins_tracking.trackers.wandb import HOST, outbox, vendor
from flyteplugins_tracking.trackers.wandb.rollback import Rollback

logger = logging.getLogger(__name__)

# The properties that change the run, by being set or through the object that they return.
_CHANGING = ("config", "name", "notes", "step", "summary", "tags")
# What `WandbHandle._call_open` returns if the run is not open.
_NOT_OPEN = object()
# The run's attribute that holds its handle.
HANDLE = "_flyteplugins_tracking_handle"
# The key of `save_state` in the summary: W&B's pages do not show keys that begin with "_".
_STATE = "_flyteplugins_tracking"
# The status of a run that is ended to be rewound: until then, its last attempt has failed.
_FAILED = 1
# How long a signal waits for a call of the run to return: an exception out of it would leave the run half written.
_PATIENCE_S = 1.0
# The most characters of a config's JSON that are passed to each task that a task calls.
_MAX_CONFIG = 16_384


class WandbHandle(Handle):
    """An open W&B run. `wandb.run` is this run while the function runs."""

    def __init__(
        self,
        run: Any,
        before: Any,
        request: RunRequest,
        reopen: Callable[[Any, bool], Any],
        rewind: Callable[[Any, int], Any] | None = None,
    ) -> None:
        """Take over the run, and make it `wandb.run`.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            reopen: Takes the run and whether it shall be offline. Returns it, open again, as another object.
            rewind: Takes the run, which has ended, and a step. Returns it, open again, without its rows from that step
                on; raises if W&B does not do that. None if the run cannot be rewound.
        """
        self.run = run
        self.id, self._offline = run.id, bool(run.offline)
        self._request = request
        self._open_again, self._open_rewound = reopen, rewind
        self._before = None if before is run else before
        # `wandb.init` may return a run that another function has open. That function ends it.
        self._is_ours = HANDLE not in vars(run)
        self._ender = 0  # the id of the thread that ends the run
        self._callers: set[int] = set()  # the ids of the threads that are in one of its methods
        self._closing = self._timed_out = self._lost = self._died = False
        self._ended = threading.Event()
        self._lock = threading.RLock()  # held while the run ends or opens. Reentrant: wandb's hooks call its methods
        self._held: list[Callable[[], Any]] = []  # the calls that log rows while the run ends
        self._holding = threading.Lock()  # protects `_held` together with the state
        self._abandoned: list[str] = []  # the directories of wandb-cores that have died
        self._next_row = NextRow()
        self._openings = 1  # how often the run has been opened
        self._definitions: list[Callable[[], Any]] = []  # repeated after the run is opened again
        self._state: dict[str, str] = {}  # what the summary has of `save_state`, at the latest when the run ends
        self._rest_sent = threading.Event()  # set once the run has what earlier attempts have left
        self._rollback = self._rollback_of(request)
        if self._is_ours:
            self._take_over()
            self._send_rest()

    def _rollback_of(self, request: RunRequest) -> Rollback:
        can_rewind = request.config.rollback == "rewind" and self._open_rewound is not None
        return Rollback(
            request.config.step_metric,
            restart_count_of(request),
            lambda: int(self.run.starting_step) if self._outbox.first_step is None else self._outbox.first_step,
            self._next_step,
            self._rewind if can_rewind else None,
        )

    @property
    def _outbox(self) -> outbox.Outbox:
        return outbox.of(self.run)

    def _next_step(self) -> int:
        known = self._outbox.next_step
        # W&B says 0 until a row was logged.
        return max(int(self.run.step), int(self.run.starting_step)) if known is None else known

    @property
    def files(self) -> str | None:
        return None if getattr(self.run, "disabled", False) else str(self.run.dir)

    def summary(self) -> Mapping[str, Any]:
        with contextlib.suppress(Exception):  # its wandb-core may have died
            return {key: value for key, value in dict(self.run.summary).items() if not key.startswith("_")}
        return {}

    def unsent(self) -> Sequence[str]:
        is_behind = self._timed_out or self._lost or bool(self.run.offline)
        return [*self._abandoned, *([directory(self.run)] if is_behind and self.files is not None else [])]

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory)

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.run.summary.update(dict(values))
        if self.files is not None:
            path = Path(self.files, f"{name}.txt")
            replace_whole(path, text, 0o666)
            self.run.save(str(path), base_path=self.files, policy="now")

    def save_state(self, text: str) -> None:
        state = f"{time.time():.3f} {text}"
        self._state = {_STATE: state}
        self._call_open(_update_summary, (self._state,), {})  # or later: no run is opened again for it
        if self.files is not None:
            outbox.save_state(self.run, state)  # the summary of an attempt that is killed may not have arrived

    def saved_state(self) -> str | None:
        if self.files is None:
            return None
        states = outbox.saved_states(self.run)
        if self.run.resumed:  # its summary is from the server
            states.append(str(self.run.summary.get(_STATE)))
        # The last attempt may have run on another machine.
        latest = max(states, key=_time_of, default="")
        return latest.partition(" ")[2] or None

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        # Not `log(values, commit=False)`: it would open a run again that a signal has ended.
        self._next_row.add(values)

    def how_to_view(self) -> str:
        # W&B itself prints the page of a run that it has sent.
        if not self.run.offline or self.run.settings.silent or self.files is None:
            return ""
        path = directory(self.run)
        # The viewer of the directory above shows the run's other nodes and ranks too, the newest run first.
        return f"wandb leet {shlex.quote(os.path.dirname(path))}; to send it: {how_to_send(path)}"

    def finish(self, exit_code: int) -> None:
        self._rest_sent.wait(self._request.config.finish_timeout_s)
        with self._lock:
            if self._held or self._died:
                self._reopen()
                self._replay()
            try:
                if self._is_ours and not self._ended.is_set():
                    self._finish_alive(exit_code)
            finally:
                if self._offline:
                    vendor.end_service_with_process()
                self._let_go()

    def finish_on_signal(self, exit_code: int) -> None:
        self._rest_sent.wait(self._request.config.finish_timeout_s / 2)
        with self._lock:
            if self._ended.is_set() or not self._is_ours:
                return
            self._closing = True
            self._await_callers()
            self._finish_alive(exit_code, stays_global=True)

    def may_end(self) -> bool:
        """Whether the run's own `finish` may end it now.

        Frameworks call it while the function runs, Accelerate's `end_training()` for one. These calls do nothing: a
        crash after such an end would be reported as a success.
        """
        return self._ender == threading.get_ident()

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the run's methods. If the run was ended early, open it again first."""
        self._request.watch.before_row()
        if method.__name__ == "log":
            self._request.steps.row_logged(*args, **kwargs)
            if args[1:] or kwargs or self._next_row.waiting or self._rollback.has_gone_back:
                method, args, kwargs = self._completed(method, args, kwargs)
        elif method.__name__ == "define_metric":
            self._note_step_column(*args, **kwargs)
        result = self._call_open(method, args, kwargs)
        return self._call_late(method, args, kwargs) if result is _NOT_OPEN else result

    def _note_step_column(self, name: Any = None, step_metric: Any = None, *_: Any, **__: Any) -> None:
        column = getattr(step_metric, "name", step_metric)  # it may be an earlier `define_metric`'s
        if name == "*" and isinstance(column, str):
            self._request.steps.column_defined(column)

    def _completed(self, log: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `log` and its arguments with the values that wait for this row, and with the place of the row."""
        if self._next_row.waiting and args and isinstance(args[0], dict):
            args = ({**self._next_row.take(), **args[0]}, *args[1:])
        if self._rollback.rewinds:
            self._rest_sent.wait()
        if self._rest_sent.is_set():
            args, kwargs = self._placed(*args, **kwargs)
        else:  # the row is held: the rows before it have no steps yet
            log = self._placed_late(log)
        return log, args, kwargs

    def _placed(self, data: Any, step: Any = None, commit: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of `log` with which W&B keeps the row, also if its step is one that the run has."""
        data, step = self._rollback.place(data, step, self._define_step)
        return (data, step, commit), kwargs

    def _placed_late(self, log: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(log)
        def placed(run: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._placed(*args, **kwargs)
            return log(run, *args, **kwargs)

        return placed

    def _define_step(self) -> None:
        self.run.define_metric("*", step_metric=self._request.config.step_metric)

    @critical_section(_PATIENCE_S)
    def _call_open(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method if the run is open, and return what it returned; `_NOT_OPEN` if the run is not open."""
        thread, opening, callers = threading.get_ident(), self._openings, self._callers
        is_outermost = thread not in callers
        callers.add(thread)
        try:
            if not self._closing or not is_outermost or self._ender == thread:
                if method.__name__ == "define_metric":
                    self._definitions.append(lambda: method(self.run, *args, **kwargs))
                return method(self.run, *args, **kwargs)
        except vendor.service_gone(self.run) as error:
            if self._ender == thread or not is_outermost:
                raise
            self._notice_death(error, opening)
        finally:
            if is_outermost:
                callers.discard(thread)
        return _NOT_OPEN

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Use a property or callback that can change the run. If the run was ended early, open it again first."""
        thread, opening = threading.get_ident(), self._openings
        try:
            if not self._ended.is_set() or self._ender == thread:
                return accessor(self.run, *args, **kwargs)
        except vendor.service_gone(self.run) as error:
            if self._ender == thread or thread in self._callers:
                raise
            self._notice_death(error, opening)
        return self._call_late(accessor, args, kwargs)

    def _call_late(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._request.watch.wait_for_user_handler()
        if method.__name__ == "log" and self._hold(method, args, kwargs):
            return None
        with self._lock:
            self._reopen()
        return None if self._lost else method(self.run, *args, **kwargs)

    def _hold(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Keep a row if the run is just ending. A copy: the function may use its dictionary for the next row too."""
        args_copy = [dict(value) if isinstance(value, dict) else value for value in args]
        kwargs_copy = {name: dict(value) if isinstance(value, dict) else value for name, value in kwargs.items()}
        with self._holding:
            is_ending = self._closing and not self._ended.is_set()
            if is_ending:
                self._held.append(lambda: method(self.run, *args_copy, **kwargs_copy))
            return is_ending

    def _replay(self) -> None:
        with self._holding:
            held, self._held = self._held, []
        for call in held:
            if not self._lost:
                call()

    def _notice_death(self, error: BaseException, opening: int) -> None:
        """Mark the run as ended, because its wandb-core has died: it may have been killed for its memory.

        Args:
            error: The error of a method of the run.
            opening: The value of `_openings` when that method was called. Does nothing if the run was opened since.
        """
        # Before the lock is taken: it may wait.
        was_torn_down = vendor.was_torn_down(self.run, error, self._request.config.finish_timeout_s / 2)
        with self._lock:
            if self._ended.is_set() or opening != self._openings:
                return
            if not was_torn_down:
                text = "wandb-core has died (%s). A new one continues run %s, and sends the rest from %s"
                logger.warning(text, type(error).__name__, self.id, directory(self.run))
            if self._offline or not was_torn_down:
                self._abandoned.append(directory(self.run))
            self._outbox.close()
            vendor.set_finished(self.run)
            self._died = self._closing = True
            self._ended.set()

    def _send_rest(self) -> None:
        """Send in the background what there was no time for at the opening. Rows are held meanwhile."""
        if self._outbox.send_earlier(time.monotonic()):
            self._rest_sent.set()
            return
        self._closing = True
        threading.Thread(target=self._sending_rest, daemon=True, name="flyteplugins-tracking-tail").start()

    def _sending_rest(self) -> None:
        try:
            self._outbox.send_earlier()
            while True:
                self._replay()
                with self._holding:
                    if not self._held:
                        self._closing = False
                        return
        finally:
            self._rest_sent.set()

    def _take_over(self) -> None:
        vars(self.run)[HANDLE] = self
        guard(self.run)
        vendor.report_changes(self.run)
        vendor.set_global_run(self.run)

    def _let_go(self) -> None:
        if self._is_ours:
            del vars(self.run)[HANDLE]
            self.run.__class__ = type(self.run).__mro__[1]
        before = self._before
        if before is not None and (HANDLE in vars(before) or not vendor.is_finished(before)):
            vendor.set_global_run(before)
        elif vendor.global_run() is self.run:
            vendor.set_global_run(None)

    def _be_global(self) -> None:
        """Make this `wandb.run`, unless another run is open: of a trial that this one's function has started."""
        current = vendor.global_run()
        if current is None or current is self.run or vendor.is_finished(current):
            vendor.set_global_run(self.run)

    def _await_callers(self, timeout_s: float = 1.0) -> None:
        """Wait for other threads: what they are logging must come before the run's end."""
        deadline = time.monotonic() + timeout_s
        while self._callers - {threading.get_ident()} and time.monotonic() < deadline:
            time.sleep(0.001)

    def _finish_alive(self, exit_code: int, stays_global: bool = False) -> None:
        """End the run. If its wandb-core is gone, a new one sends the rest and ends the run.

        `wandb.teardown` has ended it with a status of its own. A launcher's SIGTERM may reach wandb-core before us. The
        new one may die too: what it leaves has the next one send.
        """
        until = time.monotonic() + self._request.config.finish_timeout_s
        while not self._lost:
            try:
                self._finish_run(exit_code, stays_global)
                return
            except vendor.service_gone(self.run) as error:
                self._ended.clear()
                self._notice_death(error, self._openings)
                if time.monotonic() < until:
                    self._reopen()
                    self._closing = True
                else:
                    self._give_up()

    def _finish_run(self, exit_code: int, stays_global: bool = False) -> None:
        self._ender = threading.get_ident()
        try:
            # In the summary: a row of its own would take a step.
            waiting = {**self._next_row.take(), **self._state}
            if waiting:
                self.run.summary.update(waiting)
            if exit_code == TERMINATED and self._request.plan.primary:
                self.run.mark_preempting()
            self._outbox.end(exit_code)
            vendor.finish_within(self._request.config.finish_timeout_s, self.run, lambda: self._end(exit_code))
            self._outbox.clear()
            if self.run.offline and not self._offline:
                logger.warning(
                    "W&B: run %s has continued offline. To send what W&B has not got, run: %s",
                    self.id,
                    how_to_send(self.unsent()),
                )
        except TimeoutError:
            self._timed_out = True
            logger.warning(
                "W&B: run %s was not sent completely within %s. Nothing is lost. To send the rest, run: %s",
                self.id,
                self._request.config.finish_limit,
                how_to_send(directory(self.run)),
            )
        finally:
            if stays_global:
                self._be_global()
            self._ender = 0
            self._ended.set()

    def _end(self, exit_code: int) -> None:
        self._ender = threading.get_ident()  # it may be another thread than `_finish_run`'s
        self.run.finish(exit_code=exit_code)

    @critical_section(_PATIENCE_S)
    def _reopen(self) -> None:
        """Open the run again, in the object that the function holds."""
        if self._lost or not self._ended.is_set():
            return
        self._ender = threading.get_ident()
        try:
            for is_last in (False, False, True):  # a new wandb-core may die too
                try:
                    self._adopt(self._open_again(self.run, self._offline or self._timed_out))
                    return
                except Exception:
                    self._outbox.close()
                    if is_last:
                        self._give_up()
        finally:
            self._ender = 0

    def _give_up(self) -> None:
        """Leave what the run has to the user: it cannot be opened again."""
        self._lost = True
        logger.warning(
            "W&B: run %s has ended and cannot be opened again: what is logged from now on is lost. To send what it "
            "has, run: %s",
            self.id,
            " ; ".join(map(how_to_send, self._abandoned or [directory(self.run)])),
            exc_info=True,
        )

    @critical_section(_PATIENCE_S)
    def _rewind(self, step: int) -> str | None:
        """Have W&B drop the rows from a step on. Returns why it does not. The run is open again in either case.

        W&B rewinds runs that have ended only.
        """
        if RESTART_COUNT in self.summary():
            return "an earlier attempt has rows at other steps than its own"
        if not vendor.is_only_run(self.run):
            return "this process has another run open"
        with self._lock:
            self._died = self._closing = True  # `finish` opens the run again if an exception comes in between
            self._await_callers()
            self._finish_run(_FAILED, stays_global=True)
            obstacle = self._why_not_rewound(step)
            if obstacle is not None:
                self._reopen()
            return obstacle

    def _why_not_rewound(self, step: int) -> str | None:
        """Open the run that has ended, rewound. Returns why that cannot be."""
        if self._open_rewound is None or self._timed_out:
            return f"it was not sent completely within {self._request.config.finish_limit}"
        self._ender = threading.get_ident()
        try:
            self._adopt(self._open_rewound(self.run, step))
        except Exception as error:
            return first_line(error.__cause__ or error)
        finally:
            self._ender = 0
        return None

    def _adopt(self, reopened: Any) -> None:
        """Continue with the state of `reopened` in the object that the function holds."""
        if reopened.id != self.id:
            raise RuntimeError(f"W&B opened run {reopened.id} instead of run {self.id}")
        vendor.take_over_state(self.run, reopened)
        vars(self.run)[HANDLE] = self
        vendor.report_changes(self.run)
        self._be_global()
        for define in self._definitions:
            define()
        self._openings += 1
        if not self.run.offline:  # the new wandb-core sends what the old one had not
            self._abandoned = []
        with self._holding:
            self._died = self._closing = False
            self._ended.clear()
        self._replay()


def _update_summary(run: Any, values: Mapping[str, Any]) -> None:
    run.summary.update(dict(values))


def guard(run: Any) -> None:
    """Route the calls of the run's methods through its handle, `vars(run)[HANDLE]`."""
    kind: Any = type(run)
    run.__class__ = _guarded(kind)


def _new(kind: Any) -> Any:
    """A run of wandb's own class, for `pickle`."""
    return kind.__new__(kind)


@functools.cache
def _guarded(kind: Any) -> Any:
    """A subclass of `wandb.Run` whose methods call its handle. With a subclass, `log = run.log` is guarded too."""
    members: dict[str, Any] = {name: _guard(getattr(kind, name)) for name in _methods(kind)}
    members.update({name: _guard_ending(getattr(kind, name)) for name in vendor.ENDINGS if hasattr(kind, name)})
    members.update({name: _guard_property(getattr(kind, name)) for name in _CHANGING if hasattr(kind, name)})
    members.update({name: _guard_change(getattr(kind, name)) for name in vendor.CALLBACKS if hasattr(kind, name)})
    row_method = vendor.row_method(kind)
    if row_method is not None:
        members[row_method.__name__] = _guard_row(row_method)
    members["__reduce_ex__"] = lambda run, _: (_new, (kind,), run.__getstate__())
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, **members})


def _methods(kind: type) -> list[str]:
    public = [name for name in dir(kind) if not name.startswith("_")]
    return [name for name in public if inspect.isfunction(inspect.getattr_static(kind, name))]


def _guard(method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def guarded(run: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(run).get(HANDLE)
        return method(run, *args, **kwargs) if handle is None else handle.use(method, *args, **kwargs)

    return guarded


def _guard_property(member: Any) -> Any:
    if not isinstance(member, property):
        return member
    return property(_guard_change(member.fget), _guard_change(member.fset) if member.fset else None, doc=member.__doc__)


def _guard_change(accessor: Any) -> Any:
    @functools.wraps(accessor)
    def guarded(run: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(run).get(HANDLE)
        return accessor(run, *args, **kwargs) if handle is None else handle.change(accessor, *args, **kwargs)

    return guarded


def _guard_row(log: Callable[..., Any]) -> Any:
    """Keep what `watch` adds to the run's next row: in a shared run, that row may be another rank's."""

    @functools.wraps(log)
    def guarded(run: Any, data: Any, step: Any = None, commit: bool | None = None) -> Any:
        keep = getattr(vars(run).get(HANDLE), "keep_for_next_row", None) if commit is False else None
        return log(run, data, step, commit) if keep is None else keep(data)

    return guarded


def _guard_ending(method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def guarded(run: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(run).get(HANDLE)
        return method(run, *args, **kwargs) if handle is None or handle.may_end() else None

    return guarded


def _time_of(state: str) -> float:
    """Return when a state was saved, in seconds since the epoch; 0 for a text that is none."""
    time_s = state.partition(" ")[0]
    return float(time_s) if time_s.replace(".", "", 1).isdecimal() else 0.0


def directory(run: Any) -> str:
    """The directory of the run's `.wandb` file, which `flyteplugins_tracking send` takes."""
    return os.path.dirname(str(run.dir))


def passed_on(run: Any) -> Mapping[str, Any] | None:
    """Return the values with which another process continues this run; None if the run is disabled."""
    if getattr(run, "disabled", False):
        return None
    place = {"id": run.id, "project": run.project or None, "entity": run.entity or None}
    if run.offline:
        return {**place, "mode": "offline"}
    return {**place, HOST: without_credentials(str(run.settings.base_url)), "config": _passed_on_config(run)}


def _passed_on_config(run: Any) -> dict[str, Any] | None:
    """The run's config, for a task in another process; None if it is too long to be passed to each task."""
    # JSON has no numbers for NaN and infinities: they become text.
    text = json.dumps(dict(run.config), default=str)
    config: dict[str, Any] = json.loads(text, parse_constant=str)
    if len(text) <= _MAX_CONFIG:
        return config
    logger.warning(
        "W&B: the config of run %s has more than %d characters: tasks in other processes do not get it",
        run.id,
        _MAX_CONFIG,
    )
    return None
