"""A W&B run while it is open: the lifecycle alone ends it, and what is logged after an early end opens it again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.signals import TERMINATED
from flyteplugins_tracking.trackers.wandb.options import HOST, without_credentials
from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)

# What the vendor and the frameworks call to end "the" run. While the function runs it is ours to end.
_ENDINGS = ("finish", "_finish")
# The properties whose value, or what is set there, changes the run.
_CHANGING = ("config", "name", "notes", "step", "summary", "tags")
_CALLBACKS = ("_summary_update_callback", "_config_callback")
HANDLE = "_flyteplugins_tracking_handle"
# How long the JSON of a config may be that is handed to each task that a task calls.
_MOST_CONFIG = 16_384


class WandbHandle(Handle):
    """An open W&B run, which `wandb.run` is while the function runs."""

    def __init__(self, run: Any, before: Any, request: RunRequest, reopen: Callable[[Any, bool], Any]) -> None:
        """`before` was `wandb.run`; `reopen` gives a run again, offline or not, in another object."""
        self.run = run
        self.id, self._offline = run.id, bool(run.offline)
        self._request = request
        self._open_again = reopen
        self._before = None if before is run else before
        # A run that another function has open, and that `wandb.init` has returned again, is that one's to end.
        self._is_ours = HANDLE not in vars(run)
        self._ender = 0  # the thread that ends the run
        self._callers: set[int] = set()  # the threads that are in one of its methods
        self._closing = self._timed_out = self._lost = self._died = False
        self._ended = threading.Event()
        self._lock = threading.RLock()  # held while the run ends or opens; the vendor's hooks call its methods
        self._held: list[Callable[[], Any]] = []  # what is logged while the run ends
        self._holding = threading.Lock()  # held to look at these and at the state at once
        self._abandoned: list[str] = []  # what a wandb-core that has died had written
        self._openings = 1  # how often the run has been opened
        self._definitions: list[Callable[[], Any]] = []  # what a run that is opened again must be told again
        if self._is_ours:
            self._take_over()

    @property
    def files(self) -> str | None:
        """See `Handle.files`."""
        return None if getattr(self.run, "disabled", False) else str(self.run.dir)

    def summary(self) -> Mapping[str, Any]:
        """See `Handle.summary`."""
        with contextlib.suppress(Exception):  # its wandb-core may be gone
            return {key: value for key, value in dict(self.run.summary).items() if not key.startswith("_")}
        return {}

    def unsent(self) -> Sequence[str]:
        """See `Handle.unsent`."""
        is_behind = self._timed_out or self._lost or bool(self.run.offline)
        return [*self._abandoned, *([directory(self.run)] if is_behind and self.files is not None else [])]

    def how_to_send(self, directory: str) -> str:
        """See `Handle.how_to_send`."""
        return f"wandb sync {directory}"

    def finish(self, exit_code: int) -> None:
        """See `Handle.finish`."""
        with self._lock:
            if self._held or self._died:
                self._reopen()
                self._replay()
            try:
                if self._is_ours and not self._ended.is_set():
                    self._end_alive(exit_code)
            finally:
                self._let_go()

    def end_early(self, exit_code: int) -> None:
        """See `Handle.end_early`."""
        with self._lock:
            if self._ended.is_set() or not self._is_ours:
                return
            self._closing = True
            self._await_callers()
            self._end_alive(exit_code, stays_global=True)

    def may_end(self) -> bool:
        """Whether the run's own `finish` ends it. What the frameworks call while the function runs does nothing.

        Accelerate's `end_training()` and hyperparameter searches call it; after it a crash would be a success.
        """
        return self._ender == threading.get_ident()

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the run's methods, and open the run again for it where it has ended early."""
        self._request.watch.renew()
        thread, opening = threading.get_ident(), self._openings
        is_outermost = thread not in self._callers
        self._callers.add(thread)
        try:
            if not self._closing or not is_outermost or self._ender == thread:
                if method.__name__ == "define_metric":
                    self._definitions.append(lambda: method(self.run, *args, **kwargs))
                with _TornDownIsTold(self.run):
                    return method(self.run, *args, **kwargs)
        except service_gone() as error:
            if self._ender == thread or not is_outermost:
                raise
            self._notice_death(error, opening)
        finally:
            if is_outermost:
                self._callers.discard(thread)
        return self._call_late(method, args, kwargs)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Use a property or callback that can change the run, and open the run again where it has ended early."""
        thread, opening = threading.get_ident(), self._openings
        try:
            if not self._ended.is_set() or self._ender == thread:
                with _TornDownIsTold(self.run):
                    return accessor(self.run, *args, **kwargs)
        except service_gone() as error:
            if self._ender == thread or thread in self._callers:
                raise
            self._notice_death(error, opening)
        return self._call_late(accessor, args, kwargs)

    def _call_late(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._request.watch.await_handler()
        if method.__name__ == "log" and self._hold(method, args, kwargs):
            return None
        with self._lock:
            self._reopen()
        return None if self._lost else method(self.run, *args, **kwargs)

    def _hold(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Keep a row while the run ends. As a copy: the function may use its dictionary for the next row too."""
        held = [dict(value) if isinstance(value, dict) else value for value in args]
        named = {name: dict(value) if isinstance(value, dict) else value for name, value in kwargs.items()}
        with self._holding:
            is_ending = self._closing and not self._ended.is_set()
            if is_ending:
                self._held.append(lambda: method(self.run, *held, **named))
            return is_ending

    def _replay(self) -> None:
        with self._holding:
            held, self._held = self._held, []
        for call in held:
            if not self._lost:
                call()

    def _notice_death(self, error: BaseException, opening: int) -> None:
        """The wandb-core of that `opening` is gone, killed for its memory perhaps. The run goes on in another."""
        with self._lock:
            if self._ended.is_set() or opening != self._openings:
                return
            was_torn_down = _was_torn_down(error)
            if not was_torn_down:
                logger.warning(
                    "wandb-core has died (%s). Run %s goes on in another; what this one had not sent: wandb sync %s",
                    type(error).__name__,
                    self.id,
                    directory(self.run),
                )
            if self._offline or not was_torn_down:
                self._abandoned.append(directory(self.run))
            self.run._is_finished = self._died = self._closing = True
            self._ended.set()

    def _take_over(self) -> None:
        vars(self.run)[HANDLE] = self
        guard(self.run)
        guard_changes(self.run)
        make_global(self.run)

    def _let_go(self) -> None:
        if self._is_ours:
            del vars(self.run)[HANDLE]
            self.run.__class__ = type(self.run).__mro__[1]
        before = self._before
        if before is not None and (HANDLE in vars(before) or not getattr(before, "_is_finished", False)):
            make_global(before)
        elif global_run() is self.run:  # it has ended early, while another function was still to log to it
            unset_global()

    def _be_global(self) -> None:
        """Be `wandb.run`, unless that is an open run: of a trial, for instance, that this one's function has begun."""
        current = global_run()
        if current is None or current is self.run or getattr(current, "_is_finished", False):
            make_global(self.run)

    def _await_callers(self, timeout_s: float = 1.0) -> None:
        """What other threads are about to log must come before the run's end."""
        until = time.monotonic() + timeout_s
        while self._callers - {threading.get_ident()} and time.monotonic() < until:
            time.sleep(0.001)

    def _end_alive(self, exit_code: int, stays_global: bool = False) -> None:
        """End the run; where `wandb.teardown` has ended it with a status of its own, in another wandb-core."""
        try:
            self._end(exit_code, stays_global)
        except service_gone() as error:
            if not _was_torn_down(error):
                raise
            self._ended.clear()
            self._notice_death(error, self._openings)
            self._reopen()
            if not self._lost:
                self._closing = True
                self._end(exit_code, stays_global)

    def _end(self, exit_code: int, stays_global: bool = False) -> None:
        self._ender = threading.get_ident()
        try:
            with _TornDownIsTold(self.run):
                if exit_code == TERMINATED and self._request.plan.primary:
                    self.run.mark_preempting()
                self.run.finish(exit_code=exit_code)
        except TimeoutError:
            self._timed_out = True
            logger.warning(
                "W&B did not take all of run %s within finish_timeout_s=%g. Nothing is lost: wandb sync %s",
                self.id,
                self._request.config.finish_timeout_s,
                directory(self.run),
            )
        finally:
            if stays_global:
                self._be_global()
            self._ender = 0
            self._ended.set()

    def _reopen(self) -> None:
        """Go on with the run, in the object that the function holds."""
        if self._lost or not self._ended.is_set():
            return
        self._ender = threading.get_ident()
        try:
            self._adopt(self._open_again(self.run, self._offline or self._timed_out))
        except Exception:
            self._lost = True
            logger.warning("W&B: run %s has ended, and what is logged now is lost", self.id, exc_info=True)
        finally:
            self._ender = 0

    def _adopt(self, reopened: Any) -> None:
        """Be `reopened`: share its state, and take its place in the vendor's list."""
        if reopened.id != self.id:
            raise RuntimeError(f"asked for run {self.id}, W&B gave run {reopened.id}")
        reopened._wl.remove_active_run(reopened)
        self.run.__dict__ = reopened.__dict__
        vars(self.run)[HANDLE] = self
        reopened._wl.add_active_run(self.run)
        guard_changes(self.run)
        self._be_global()
        for define in self._definitions:
            define()
        self._openings += 1
        with self._holding:
            self._died = self._closing = False
            self._ended.clear()
        self._replay()


def guard(run: Any) -> None:
    """Have the run's methods ask the handle that `vars(run)[HANDLE]` is."""
    kind: Any = type(run)
    run.__class__ = _guarded(kind)


def guard_changes(run: Any) -> None:
    """Have the run's summary and config report to its guarded methods: these may be held and changed late, too."""
    with contextlib.suppress(AttributeError, KeyError):  # a disabled run's
        run.summary._set_update_callback(run._summary_update_callback)
        run.config._set_callback(run._config_callback)


def service_gone() -> tuple[type[BaseException], ...]:
    """What the run's methods raise when wandb-core has died, or was stopped: see `_torn_down`."""
    mailbox = sys.modules.get("wandb.sdk.mailbox")
    closed = getattr(mailbox, "MailboxClosedError", None)
    return tuple(error for error in (ConnectionError, closed, _torn_down()) if error is not None)


def _torn_down() -> type[BaseException] | None:
    """What they raise after `wandb.teardown`, as `wandb.agent` calls it before each trial: it has sent everything."""
    asyncio_manager = sys.modules.get("wandb.sdk.lib.asyncio_manager")
    return getattr(asyncio_manager, "AlreadyJoinedError", None)


class _TornDownIsTold:
    """Has a run whose client was torn down say so, also to a thread that was given the id of the client's own.

    A class, since each row comes through here: a generator would take as long as the rest of the guard.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if not isinstance(error, ValueError):
            return
        kind, client = _torn_down(), getattr(getattr(self._run, "_interface", None), "_asyncer", None)
        if kind is not None and getattr(client, "_joined", False):
            raise kind(str(error)) from error


def _was_torn_down(error: BaseException) -> bool:
    kind = _torn_down()
    return kind is not None and isinstance(error, kind)


def _new(kind: Any) -> Any:
    """For `pickle`: a run of the vendor's own class."""
    return kind.__new__(kind)


@functools.cache
def _guarded(kind: Any) -> Any:
    """A `wandb.Run` whose methods ask its handle first. A subclass, so that also `log = run.log` is the guarded one."""
    members: dict[str, Any] = {name: _guard(getattr(kind, name)) for name in _methods(kind)}
    members.update({name: _guard_ending(getattr(kind, name)) for name in _ENDINGS if hasattr(kind, name)})
    members.update({name: _guard_property(getattr(kind, name)) for name in _CHANGING if hasattr(kind, name)})
    members.update({name: _guard_change(getattr(kind, name)) for name in _CALLBACKS if hasattr(kind, name)})
    if hasattr(kind, "_log"):
        members["_log"] = _guard_row(kind._log)
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
        return method(run, *args, **kwargs) if handle is None else handle.call(method, *args, **kwargs)

    return guarded


def _guard_property(own: Any) -> Any:
    if not isinstance(own, property):
        return own
    return property(_guard_change(own.fget), _guard_change(own.fset) if own.fset else None, doc=own.__doc__)


def _guard_change(accessor: Any) -> Any:
    @functools.wraps(accessor)
    def guarded(run: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(run).get(HANDLE)
        return accessor(run, *args, **kwargs) if handle is None else handle.change(accessor, *args, **kwargs)

    return guarded


def _guard_row(own: Callable[..., Any]) -> Any:
    """What `watch` hands over for the run's next row: in a shared run that may be another rank's."""

    @functools.wraps(own)
    def guarded(run: Any, data: Any, step: Any = None, commit: bool | None = None) -> Any:
        keep = getattr(vars(run).get(HANDLE), "keep_for_next_row", None)
        return own(run, data, step, commit) if keep is None or commit is not False else keep(data)

    return guarded


def _guard_ending(method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def guarded(run: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(run).get(HANDLE)
        return method(run, *args, **kwargs) if handle is None or handle.may_end() else None

    return guarded


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Keep the vendor's reports on itself from being started, which the user can ask for with the variable.

    While the server is mute they hold up this process's end, by 10 s and more.
    """
    if "WANDB_ERROR_REPORTING" in os.environ:
        yield
        return
    with contextlib.suppress(ImportError):
        from wandb.analytics.opentelemetry import opentelemetry_proxy

        opentelemetry_proxy.disable()
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        yield
    finally:
        del os.environ["WANDB_ERROR_REPORTING"]


def directory(run: Any) -> str:
    """What `wandb sync` takes."""
    return os.path.dirname(str(run.dir))


def global_run() -> Any:
    """What `wandb.run` is; None for a forked child, where it is the parent's."""
    import wandb

    inherited = wandb.run is not None and getattr(wandb.run, "_init_pid", os.getpid()) != os.getpid()
    return None if inherited else wandb.run


def unset_global() -> None:
    """Set `wandb.run` to None."""
    from wandb.sdk.lib import module

    module.unset_globals()


def make_global(run: Any) -> None:
    """Set `wandb.run` and `wandb.log`, where the frameworks log to; `reinit="create_new"` leaves them."""
    with contextlib.suppress(ImportError):
        from wandb.sdk.wandb_init import _set_global_run

        _set_global_run(run)


def passed_on(run: Any) -> Mapping[str, Any] | None:
    """See `Tracker.pass_on`."""
    if getattr(run, "disabled", False):
        return None
    place = {"id": run.id, "project": run.project or None, "entity": run.entity or None}
    if run.offline:
        return {**place, "mode": "offline"}
    return {**place, HOST: without_credentials(str(run.settings.base_url)), "config": _passed_on_config(run)}


def _passed_on_config(run: Any) -> dict[str, Any] | None:
    """The config that a task in another process reads; None for one that is too long to travel with each task."""
    # What JSON has no number for, it has text for.
    text = json.dumps(dict(run.config), default=str)
    config: dict[str, Any] = json.loads(text, parse_constant=str)
    if len(text) <= _MOST_CONFIG:
        return config
    logger.warning(
        "W&B: the config of run %s is longer than %d bytes: tasks in other processes do not see it",
        run.id,
        _MOST_CONFIG,
    )
    return None
