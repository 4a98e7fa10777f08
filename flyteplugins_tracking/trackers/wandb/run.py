"""An open W&B run. The decorated function's end ends it, or SIGTERM: what is logged after that is kept, and sent."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import listed, without_credentials
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.gate import NOT_OPEN, Gate
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.attempts import Place
from flyteplugins_tracking.trackers.wandb.ending import Upload, agent_of_trial, has_stopped_trial
from flyteplugins_tracking.trackers.wandb.names import HOST
from flyteplugins_tracking.trackers.wandb.placement import Placement
from flyteplugins_tracking.trackers.wandb.sender import close_again

logger = logging.getLogger(__name__)

# The methods that end the run.
_ENDING = ("finish", "__exit__")
# The properties that change the run by being set, or that ask wandb-core.
_CHANGING = ("name", "notes", "step", "tags")
# The methods of a run's config and summary that change it, or that ask wandb-core.
_CHANGES = {
    "config": ("__setitem__", "__setattr__", "update", "setdefaults", "update_locked", "merge_locked"),
    "summary": (
        *("__setitem__", "__setattr__", "__delitem__", "__delattr__", "__getitem__", "__getattr__"),
        *("update", "get", "keys"),
    ),
}
# Those that set values; of the config, they raise if a value is changed.
_SETTING = ("__setitem__", "__setattr__", "update")
# The run's attribute that holds its handle; and that of its config and summary which holds the run.
HANDLE, RUN = "_flyteplugins_tracking_handle", "_flyteplugins_tracking_run"
# The most characters of a config's JSON that are passed to each task that a task calls: of a longer one, none are.
_MAX_CONFIG = 16_384


class WandbHandle(ClientHandle):
    """An open W&B run. `wandb.run` is this run while the function runs.

    Attributes:
        kind: The client's class of the run.
        pid: The process that has opened the run.
        is_described: Whether a `wandb.init` of the function has joined the run.
    """

    is_described = False

    def __init__(self, run: Any, before: Any, request: RunRequest, barrier: WriterBarrier | None = None) -> None:
        """Take over the run, and make it `wandb.run`.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            barrier: Where the primary waits for the other ranks; None if there are none.
        """

        def deaths() -> tuple[type[BaseException], ...]:
            # Another thread's call may have met the death before, and W&B's own then says that the run is finished.
            return (Exception,) if vendor.is_finished(run) else vendor.service_gone(run, sys.exc_info()[1])

        super().__init__(request, "W&B", None, Gate("W&B", run.id, deaths=deaths, on_death=self._on_death), barrier)
        self.run, self.id = run, run.id
        self._outbox = outbox.of(run)
        kind: Any = type(run)
        self._before, self.kind = before, kind
        self.pid = os.getpid()
        self._is_incomplete = False  # whether W&B may lack something after the run's end
        self._has_died = False  # whether wandb-core has, and nobody has ended the run since
        self._summary: dict[str, Any] = {}  # what the function has set in it, to be read after the run's end
        self._placement = Placement(run, self.kind, request, self.warn_once)
        self._agent = agent_of_trial()
        vars(run)[HANDLE] = self
        run.__class__ = _guarded(kind)
        guard_values(run)
        vendor.set_global_run(run)
        if self.files is not None and run.offline:
            vendor.replace_sync_command(run, lambda: self._command)

    @property
    def files(self) -> str | None:
        return None if self.is_disabled else str(self.run.dir)

    @property
    def is_disabled(self) -> bool:
        return bool(getattr(self.run, "disabled", False))

    def unsent(self) -> Sequence[str]:
        is_behind = self._is_incomplete or self._is_late or bool(self.run.offline)
        return [str(outbox.run_directory(self.run))] if is_behind and self.files is not None else []

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory)

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.run.summary.update(dict(values))
        if self.files is not None:
            path = Path(self.files, f"{name}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)  # that of a role
            replace_whole(path, text, 0o666)
            self.run.save(str(path), base_path=self.files, policy="now")

    def forget_event(self, name: str, keys: Sequence[str]) -> None:  # noqa: ARG002 its file stays
        with contextlib.suppress(Exception):  # its wandb-core may have died, or it is disabled
            if self.run.resumed:  # a wandb-core that does not have the run any more does not answer, for a minute
                vendor.forget(self.run, keys)

    def how_to_view(self) -> str:
        return ""  # W&B's own last lines name the page, or the command of `vendor.replace_sync_command`

    def finish(self, exit_code: int) -> None:
        try:
            super().finish(exit_code)
        finally:
            self._let_go()

    def mark_preempting(self, timeout_s: float) -> None:  # noqa: ARG002 wandb-core sends it, and the rows, at once
        # The function may have ended meanwhile: a handler that it has installed does not wait for this.
        if not self.run.offline and self._gate.state == "open" and self._is_preempted():
            self._gate.call(lambda: self.kind.mark_preempting(self.run))

    def _is_preempted(self) -> bool:
        """Whether a SIGTERM is to be shown as a preemption here."""
        return self.request.plan.ends_run and not has_stopped_trial(self._agent)

    def end_by_user(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the run's methods that end it, if this handle does.

        Frameworks call them while the function runs, Accelerate's `end_training()` for one. These calls do nothing: a
        crash after such an end would be shown as a success. A failure that the first of them tells is the run's, if the
        function returns.
        """
        if self._gate.is_ender:
            return method(self.run, *args, **kwargs)
        given = args[0] if args else kwargs.get("exit_code")
        self.tell_end(int(given is not None) if method.__name__ == "__exit__" else given)
        return None

    def prefixed(self, name: Any) -> Any:
        """Return a name of the function's, or a mapping of such names, as it is in the run."""
        return name

    def _make_row(self, data: Any) -> Any:
        # For another type, W&B says why.
        if self._summary and isinstance(data, dict) and (replaced := self._summary.keys() & data.keys()):
            self._outbox.forget(replaced)
            self._summary = {key: value for key, value in self._summary.items() if key not in replaced}
        return data

    def write(self, row: Any, step: Any, **kwargs: Any) -> None:
        with self._outbox.order:  # between a row's step and W&B's taking it, no other thread's row comes
            if step is not None or self._placement.distance:
                row, step = self._placement.place(row, step)
            self.kind.log(self.run, row, step, **kwargs)  # it comes out in `WandbOutbox._publish`

    def _write(self, row: Any, step: Any, kwargs: Mapping[str, Any]) -> None:
        self.write(row, step, **kwargs)  # the function gets what W&B's client raises

    def _write_late(self, *row: Any) -> None:
        self._keep(lambda: self._write(*row))

    def use(self, method: Callable[..., Any], *args: Any, late: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Call another one of the run's methods, or use a property. If the run has ended, use `late`, or keep it."""
        if os.getpid() != self.pid:
            return method(self.run, *args, **kwargs)
        self._placement.has_definitions |= method.__name__ == "define_metric"

        def call(used: Callable[..., Any] = method) -> Any:
            return used(self.run, *args, **kwargs)

        used = late or (self._late_step if method.__name__ == "step" else method)
        return self._gate.call(call, lambda: self._keep(lambda: call(used), f"{method.__name__}()"))

    def _late_step(self, _: Any) -> int:
        """The step of a run that has ended: nobody is asked for it."""
        return self._outbox.next_step or 0

    def change_config(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the config that changes it. A later attempt may change what an earlier one has set."""

        def change(run: Any, *given: Any, **named: Any) -> Any:
            if getattr(run, "resumed", False) and method.__name__ == "update" and len(given) == 1:
                named = {"allow_val_change": True, **named}
            elif getattr(run, "resumed", False) and method.__name__ in ("__setitem__", "__setattr__"):
                return vendor.update_config(run, dict([given]))
            return method(run.config, *given, **named)

        return self.use(change, *args, **kwargs)

    def change_summary(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the summary."""
        if method.__name__ in _SETTING:
            self._summary.update((args[0] if args else kwargs["d"]) if method.__name__ == "update" else [args])
        elif method.__name__ in ("__delitem__", "__delattr__"):
            self._summary.pop(args[0], None)
        is_change = method.__name__ in (*_SETTING, "__delitem__", "__delattr__")
        result = self.use(
            lambda run, *given, **named: method(run.summary, *given, **named),
            *args,
            late=None if is_change else lambda _, key=None, default=None: self._summary.get(key, default),
            **kwargs,
        )
        return tuple(self._summary) if result is None and method.__name__ == "keys" else result

    def _let_go(self) -> None:
        del vars(self.run)[HANDLE]
        self.run.__class__ = self.kind
        if not self.is_disabled:  # W&B's own raises, in the thread or task that logs on
            vars(self.run)["log"] = lambda *_, **__: self._gate.warn(NOT_OPEN)
        before = self._before
        if before is not None and (HANDLE in vars(before) or not vendor.is_finished(before)):
            vendor.set_global_run(before)
        elif vendor.global_run() is self.run:
            vendor.set_global_run(None)
            wandb: Any = sys.modules["wandb"]
            wandb.log = self.run.log

    def _be_global(self) -> None:
        """Make this `wandb.run`, unless another run is open: of a trial that this one's function has started."""
        current = vendor.global_run()
        if current is None or current is self.run or vendor.is_finished(current):
            vendor.set_global_run(self.run)

    def _before_end(self, exit_code: int) -> None:  # noqa: ARG002 those with several writers need it
        if self._next_row.waiting:  # in the summary: a row of its own would take a step
            self.run.summary.update(self._next_row.take())

    def end(self, exit_code: int) -> None:
        upload = Upload(Place.of(self.run), self.end_limit(), self.run)
        try:
            if exit_code == TERMINATED and self._is_preempted():
                self.run.mark_preempting()
            self._outbox.keep_end(exit_code)
            vendor.finish_while(upload.lasts, self.run, exit_code, lambda: self._finish_run(exit_code))
            refusal = vendor.refusal_of_rows(outbox.run_directory(self.run))
            with self._late:
                if refusal:
                    self._warn_of_rest(upload, refusal)
                elif not self._is_late:  # by another thread, while the run ended
                    self._outbox.clear()
        except TimeoutError:
            self._warn_of_rest(upload, upload.limit.why)
        except (KeyboardInterrupt, SystemExit):
            self._warn_of_rest(upload, "its end was interrupted")
            raise
        finally:
            self._be_global()

    def _keep(self, action: Callable[[], Any], name: str = "") -> Any:
        """Have a run that has ended, or whose wandb-core has died, keep what the function logs now, for `_end_again`.

        Args:
            action: Logs to the run. What it raises is dropped.
            name: The method that it calls; empty for a row.
        """
        with self._late:
            try:
                if not self._is_late:
                    self._is_late = True
                    text = f"has ended, and its function logs on: this is kept in {outbox.run_directory(self.run)}"
                    self._gate.warn(f"{text}{self._when_sent}")
                with self._outbox.alone(self.run):
                    return action()
            except Exception:
                self._gate.warn(f"has ended. {name or 'A row'} is lost")
                return None

    def _end_again(self, exit_code: int, *, is_last: bool = True) -> None:
        """Have another wandb-core send what W&B lacks, and end the run: when the function has, or if it has died."""
        with self._late:
            if not (self._is_late if is_last else self._has_died):
                return
            if self._ended_with is None:
                self._ended_with = exit_code or self._told_status or 0
            with self._outbox.alone(self.run):
                self._before_end(self._ended_with)
            self._outbox.keep_end(self._ended_with)
            self._outbox.close()
            self._is_late = self._has_died = False
        why = "it is offline" if self.run.offline else close_again(self.run, self._ended_with, self.end_limit())
        self._is_incomplete = bool(why)
        if why:
            text = "W&B: run %s was not sent completely: %s. To send the rest, run: %s"
            logger.warning(text, self.id, why, self._command)

    def _warn_of_rest(self, upload: Upload, why: str) -> None:
        """Say why something was not sent, and whether it is on this disk, and `send` can send it."""
        self._is_incomplete = True
        unkept, kept = self._outbox.unkept_rows, self._outbox.kept_artifacts
        artifacts = [name for name in upload.artifacts if name not in kept]
        lost = [f"{unkept} rows could not be kept: those that W&B has not got are lost"] if unkept else []
        if artifacts:
            lost.append(f"Artifacts that are not kept, and have to be logged again: {listed(artifacts)}")
        logger.warning(
            "W&B: run %s was not sent completely: %s. %s. To send the rest, run: %s",
            self.id,
            why,
            ". ".join(lost) or "Nothing is lost",
            self._command,
        )

    def _finish_run(self, exit_code: int) -> None:
        self._gate.join_enders()  # it may be another thread than `_end`'s
        self.run.finish(exit_code=exit_code)

    def _on_death(self, error: BaseException) -> None:
        """Keep the run's rows for another wandb-core. This one may have been killed for its memory.

        `wandb.teardown` has ended it with a status of its own. A launcher's SIGTERM may reach wandb-core before us.
        """
        was_torn_down = vendor.was_torn_down(self.run, self.request.config.finish_timeout_s / 2)
        logger.warning(
            "%s. What run %s logs is kept in %s from now on%s",
            "wandb.teardown() was called" if was_torn_down else f"wandb-core has died ({type(error).__name__})",
            self.id,
            outbox.run_directory(self.run),
            self._when_sent,
        )
        self._has_died = self._is_late = True
        vendor.set_finished(self.run)
        vendor.drop_unusable_service()  # an artifact asks another one what W&B has
        self._be_global()

    @property
    def _when_sent(self) -> str:
        """When what the journal keeps is sent; empty if the run is offline, which says so at its end."""
        ending = ", and sent when the function ends. If the process is killed before that, run: "
        return "" if self.run.offline else ending + self._command

    @property
    def _command(self) -> str:
        """The command that sends what W&B lacks; if ranks share the run, of all of them on this disk."""
        return how_to_send(outbox.directory_to_send(self.request, self.run))


def guard_values(run: Any) -> None:
    """Route changes of the run's config and summary through its handle, also by those who have kept these objects."""
    is_disabled = getattr(run, "disabled", False)
    for name in ["config"] if is_disabled else _CHANGES:  # the summary of a disabled run is no object of wandb's
        value: Any = getattr(run, name)
        kind: Any = type(value)
        object.__setattr__(value, RUN, run)
        object.__setattr__(value, "__class__", _guarded_value(kind, name))


def _new(kind: Any) -> Any:
    """A run of wandb's own class, for `pickle`."""
    return kind.__new__(kind)


@functools.cache
def _guarded(kind: Any) -> Any:
    """A subclass of `wandb.Run` whose methods call its handle. With a subclass, `log = run.log` is guarded too."""
    public = [name for name in dir(kind) if not name.startswith("_")]
    methods = [name for name in public if inspect.isfunction(inspect.getattr_static(kind, name))]
    members: dict[str, Any] = {name: _guard(getattr(kind, name), "use") for name in methods}
    members["log"] = _guard_log(kind.log)
    members.update({name: _guard(getattr(kind, name), "end_by_user") for name in _ENDING})
    for name in _CHANGING:
        member = getattr(kind, name, None)
        if isinstance(member, property):
            getter, setter = (accessor and _guard(accessor, "use") for accessor in (member.fget, member.fset))
            members[name] = property(getter, setter, doc=member.__doc__)
    members["__reduce_ex__"] = lambda run, _: (_new, (kind,), run.__getstate__())
    return _subclass(kind, members)


@functools.cache
def _guarded_value(kind: Any, name: str) -> Any:
    """A subclass of the class of a run's config or summary whose methods call the run's handle."""
    if hasattr(kind, "__wrapped__"):
        return kind
    methods = [method for method in _CHANGES[name] if hasattr(kind, method)]
    members = {method: _guard(getattr(kind, method), f"change_{name}", _run_of) for method in methods}
    return _subclass(kind, {**members, "__wrapped__": kind})


def _subclass(kind: Any, members: Mapping[str, Any]) -> Any:
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, **members})


def _run_of(value: Any) -> Any:
    return object.__getattribute__(value, RUN)


def _guard(method: Callable[..., Any], route: str, run_of: Callable[[Any], Any] | None = None) -> Any:
    """Have a method of a run, or of a value of it, call this method of the run's handle instead, while it has one."""

    @functools.wraps(method)
    def guarded(target: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(target if run_of is None else run_of(target)).get(HANDLE)
        if handle is None:
            return method(target, *args, **kwargs)
        return getattr(handle, route)(method, *args, **kwargs)

    return guarded


def _guard_log(log: Callable[..., Any]) -> Any:
    """Have rows go through the run's handle, while it has one."""

    @functools.wraps(log)
    def guarded(run: Any, data: Any, step: Any = None, commit: Any = None, **kwargs: Any) -> None:
        handle = vars(run).get(HANDLE)
        if handle is None:
            vars(run).get("log", functools.partial(log, run))(data, step, commit, **kwargs)
        elif os.getpid() != handle.pid:  # W&B's client attaches a forked child to the run by itself
            log(run, handle.prefixed(data), step, commit, **kwargs)
        else:
            handle.log(data, step, commit=commit, **kwargs)

    return guarded


def passed_on(run: Any) -> Mapping[str, Any] | None:
    """Return the values with which another process continues this run; None if the run is disabled."""
    if getattr(run, "disabled", False):
        return None
    place = {"id": run.id, "project": run.project or None, "entity": run.entity or None}
    if run.offline:
        return {**place, "mode": "offline"}
    # JSON has no numbers for NaN and infinities: they become text.
    text = json.dumps(dict(run.config), default=str)
    config = json.loads(text, parse_constant=str) if len(text) <= _MAX_CONFIG else None
    return {**place, HOST: without_credentials(str(run.settings.base_url)), "config": config}
