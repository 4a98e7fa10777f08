"""An open W&B run. The decorated function's end ends it, or SIGTERM: what is logged after that is kept, and sent."""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import listed, without_credentials
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT, run_config, warn_of_changes
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.gate import NOT_OPEN, Gate
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.rows import RowPath
from flyteplugins_tracking.trackers.vendor_parts import client_version, numbers
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.attempts import Place
from flyteplugins_tracking.trackers.wandb.ending import SweepAgent, Upload
from flyteplugins_tracking.trackers.wandb.late import LateRows
from flyteplugins_tracking.trackers.wandb.names import HOST
from flyteplugins_tracking.trackers.wandb.sender import close_again

logger = logging.getLogger(__name__)

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
_NOT_SET = object()
# The first client with the viewer `wandb leet`.
_FIRST_VIEWER = [0, 28]
# How long W&B may take to say which files it has when the run is opened once more, in seconds.
_ASK_S = 2.0
# How often a wait for W&B looks whether the run has ended.
_POLL_S = 0.01
# The run's attribute that holds its handle; and that of its config and summary which holds the run.
HANDLE, RUN = "_flyteplugins_tracking_handle", "_flyteplugins_tracking_run"
# The most characters of a config's JSON that are passed to each task that a task calls.
_MAX_CONFIG = 16_384


class WandbHandle(Handle):
    """An open W&B run. `wandb.run` is this run while the function runs.

    Attributes:
        is_shared: Whether other ranks log into the run too.
        prefix: Goes before the function's keys.
        warn_once: Warns once about each subject.
        is_described: Whether a `wandb.init` of the function has joined the run.
    """

    is_shared = False
    is_described = False
    prefix = ""

    def __init__(self, run: Any, before: Any, request: RunRequest) -> None:
        """Take over the run, and make it `wandb.run`.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
        """
        self.run, self.id = run, run.id
        self._request = request
        self._before = None if before is run else before
        self._pid = os.getpid()
        # `wandb.init` may return a run that another function has open. That function ends it.
        self._is_ours = HANDLE not in vars(run)
        self._gate = Gate(
            "W&B",
            run.id,
            deaths=lambda: vendor.service_gone(run, sys.exc_info()[1]),
            on_death=self._on_death,
        )
        self.warn_once = WarnOnce(logger)
        self._timed_out = False  # whether W&B may lack rows after the run's end
        # What the function logs after the run's end, or the death of wandb-core: see `_keep`.
        self._late_lock = threading.RLock()
        self._late: Any = None  # a copy of the run, which logs into the journal only
        self._has_died = False  # whether wandb-core has, and nobody has ended the run since
        self._has_left = False  # whether W&B is to get more
        self._ended_with: int | None = None
        self._told_status: int | None = None  # that of the function's own first `finish()`, which ends nothing
        # What the function has said about the run: a wandb-core that dies may not have sent it.
        self._definitions: list[Callable[[Any], Any]] = []
        self._drawn: dict[str, Callable[[Any], Any]] = {}  # definitions too, by their keys
        self._said: dict[str, dict[str, Any]] = {"config": {}, "summary": {}, "run": {}, "files": {}}
        roles = None if self.prefix else request.config.roles
        self._path = RowPath("W&B", self._gate, request.sigterm.before_row, self._make_row, roles)
        # The keys of the config that this attempt has not set yet, and an earlier one has.
        self._of_earlier = set(dict(run.config)) - set(run_config(request)) if getattr(run, "resumed", False) else set()
        self._of_earlier -= set(vendor.locked_keys(run))
        self._rollback = Rollback(self, request)
        self._agent = SweepAgent()
        # Between a row's step and W&B's taking it, no other thread's row comes. Reentrant: a signal handler may log.
        self._placing = threading.RLock()
        if self._is_ours:
            self._take_over()

    @property
    def request(self) -> RunRequest:
        """The decorator's request for this run."""
        return self._request

    @property
    def is_parents(self) -> bool:
        """Whether the process that has opened the run is a parent of this one."""
        return os.getpid() != self._pid

    @property
    def was_told_to_end(self) -> bool:
        """Whether the function has called `finish()`, which ends nothing."""
        return self._told_status is not None

    @property
    def files(self) -> str | None:
        return None if self.is_disabled else str(self.run.dir)

    @property
    def is_disabled(self) -> bool:
        return bool(getattr(self.run, "disabled", False))

    def unsent(self) -> Sequence[str]:
        is_behind = self._timed_out or self._has_left or bool(self.run.offline)
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

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        self._path.next_row.add(values)

    def how_to_view(self) -> str:
        # W&B itself prints the page of a run that it has sent.
        if not self.run.offline or self.run.settings.silent or self.files is None:
            return ""
        path = str(outbox.run_directory(self.run))
        # The viewer of the directory above shows the run's other ranks too, the newest run first.
        info = self._request.info
        has_nodes = self.is_shared and info is not None and info.num_workers != 1
        where = ", with the directories of all nodes" if has_nodes else ""
        # A client before that has no viewer: its files are looked at where they are sent to.
        has_viewer = numbers(client_version("wandb")) >= _FIRST_VIEWER
        view = f"wandb leet {shlex.quote(os.path.dirname(path))}; to " if has_viewer else ""
        return f"{view}send it{where}: {self._command}"

    def finish(self, exit_code: int) -> None:
        try:
            if self._is_ours:
                self._gate.end(lambda: self._end(exit_code), lambda: self._send_left(exit_code), is_last=True)
        finally:
            self._let_go()

    def mark_preempting(self, timeout_s: float) -> None:
        # The function may have ended meanwhile: a handler that it has installed does not wait for this.
        if self.run.offline or self._gate.state != "open" or not self._is_preempted():
            return
        kind: Any = type(self.run).__mro__[1]
        self._gate.call(lambda: kind.mark_preempting(self.run))
        # wandb-core sends this immediately, with the rows that it has, but does not tell when W&B has them. If this
        # process exits before that, so does wandb-core.
        deadline = time.monotonic() + timeout_s
        while self._gate.state == "open" and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_preempted(self) -> bool:
        """Whether a SIGTERM is to be shown as a preemption here."""
        return self._request.plan.ends_run and not self._agent.has_stopped_trial()

    def end_early(self, exit_code: int) -> None:
        if self._is_ours:
            self._gate.end(lambda: self._end(exit_code), lambda: self._send_left(exit_code, is_last=False))

    def end_by_user(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the run's methods that end it, if this handle does.

        Frameworks call them while the function runs, Accelerate's `end_training()` for one. These calls do nothing: a
        crash after such an end would be shown as a success. A failure that the first of them tells is the run's, if the
        function returns.
        """
        if self._gate.is_ender:
            return method(self.run, *args, **kwargs)
        if self._told_status is None:
            self._told_status = vendor.status_of_end(method.__name__, *args, **kwargs)
        return None

    def log(self, method: Callable[..., Any], data: Any, step: Any = None, commit: Any = None, **kwargs: Any) -> None:
        """Log a row. If the run has ended, keep it."""
        if os.getpid() != self._pid:  # W&B's client attaches a forked child to the run by itself
            method(self.run, data, step, commit, **kwargs)
            return

        def write(row: Any, run: Any = self.run) -> None:
            with self._placing:
                outbox.log_kept(method, run, *self._rollback.place(row, step), commit, **kwargs)

        self._path.log(data, write, lambda row: self._keep(lambda run: write(row, run)))

    def _make_row(self, data: Any) -> Any:
        if not isinstance(data, dict):  # W&B refuses it
            return data
        for key in self._said["summary"].keys() & data.keys():
            del self._said["summary"][key]  # the row's value comes later
        return dict(data)

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another one of the run's methods. If the run has ended, keep what can be kept."""
        if os.getpid() != self._pid:
            return method(self.run, *args, **kwargs)
        self._request.sigterm.before_row()
        if method.__name__ == "define_metric":
            self._definitions.append(lambda run: method(run, *args, **kwargs))
        result: Any = self._gate.call(
            lambda: method(self.run, *args, **kwargs),
            lambda: self._keep(lambda run: method(run, *args, **kwargs), f"{method.__name__}()"),
        )
        if method.__name__ == "save" and isinstance(result, list):
            self._said["files"].update({os.path.relpath(path, self.run.dir): path for path in result})
        return result

    def change(
        self, accessor: Callable[..., Any], *args: Any, late: Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Use a property or callback that can change the run. If the run has ended, use `late`, or a copy of the run.

        The run is changed then when what is kept is sent.
        """
        if os.getpid() != self._pid:
            return accessor(self.run, *args, **kwargs)
        if accessor.__name__ in _CHANGING and args:
            self._said["run"][accessor.__name__] = args[0]
        return self._gate.call(
            lambda: accessor(self.run, *args, **kwargs),
            lambda: self._keep(lambda run: (late or accessor)(run, *args, **kwargs), "A change"),
        )

    def change_config(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the config that changes it."""

        def change(run: Any, *given: Any, **named: Any) -> Any:
            if self._of_earlier and method.__name__ in _SETTING and named.get("allow_val_change") is not False:
                self._change_of_earlier(run, vendor.config_changes(method.__name__, *given, **named))
            before = dict(run.config)
            try:
                return method(run.config, *given, **named)
            finally:  # wandb-core may have died
                now = dict(run.config)
                self._said["config"].update({key: now[key] for key in now if before.get(key, _NOT_SET) is not now[key]})

        return self.change(change, *args, **kwargs)

    def _change_of_earlier(self, run: Any, changes_now: Mapping[str, Any]) -> None:
        """Change what earlier attempts have set, which W&B refuses as it refuses two values of one attempt."""
        keys = [key for key in changes_now if key in self._of_earlier]
        before = {key: run.config[key] for key in keys}
        self._of_earlier.difference_update(keys)
        if keys:
            vendor.update_config(run, {key: changes_now[key] for key in keys})
            warn_of_changes("W&B", self.id, before, {key: run.config[key] for key in keys})

    def change_summary(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the summary."""
        if method.__name__ in _SETTING:
            self._said["summary"].update(vendor.config_changes(method.__name__, *args, **kwargs))
        elif method.__name__ in ("__delitem__", "__delattr__"):
            self._said["summary"].pop(args[0], None)
        is_change = method.__name__ in (*_SETTING, "__delitem__", "__delattr__")
        result = self.change(
            lambda run, *given, **named: method(run.summary, *given, **named),
            *args,
            late=None if is_change else lambda _, key=None, default=None: self._said["summary"].get(key, default),
            **kwargs,
        )
        return tuple(self._said["summary"]) if result is None and method.__name__ == "keys" else result

    @property
    def _outbox(self) -> outbox.WandbOutbox:
        return outbox.of(self.run)

    def _take_over(self) -> None:
        vars(self.run)[HANDLE] = self
        guard(self.run, self.is_shared)
        vendor.set_global_run(self.run)
        if self.files is not None and self.run.offline:
            vendor.replace_sync_command(self.run, lambda: self._command)

    def _let_go(self) -> None:
        if self._is_ours:
            del vars(self.run)[HANDLE]
            self.run.__class__ = type(self.run).__mro__[1]
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

    def _end(self, exit_code: int) -> None:
        limit = self._end_limit()
        upload = Upload(self.run, limit)
        exit_code = self._ended_with = exit_code or self._told_status or 0
        try:
            if self._path.next_row.waiting:  # in the summary: a row of its own would take a step
                vendor.update_summary(self.run, self._path.next_row.take())
            if exit_code == TERMINATED and self._is_preempted():
                self.run.mark_preempting()
            self._outbox.keep_end(exit_code)
            vendor.finish_while(upload.lasts, self.run, lambda: self._finish_run(exit_code))
            refusal = vendor.refusal_of_rows(outbox.run_directory(self.run))
            with self._late_lock:
                if refusal:
                    self._warn_of_rest(upload, refusal)
                elif not self._has_left:  # by another thread, while the run ended
                    self._outbox.clear()
        except TimeoutError:
            self._warn_of_rest(upload, limit.why)
        except (KeyboardInterrupt, SystemExit):
            self._warn_of_rest(upload, "its end was interrupted")
            raise
        finally:
            self._be_global()

    def _keep(self, action: Callable[[Any], Any], name: str = "") -> Any:
        """Have a run that has ended, or whose wandb-core has died, keep what the function logs now, for `_send_left`.

        Args:
            action: Logs to the run that it is given, which has no wandb-core. What it raises is dropped.
            name: The method that it calls; empty for a row.
        """
        with self._late_lock:
            try:
                if not self._has_left:
                    self._has_left = True
                    text = f"has ended, and its function logs on: this is kept in {outbox.run_directory(self.run)}"
                    self._gate.warn(f"{text}{self._when_sent}")
                self._late = self._late or self._outbox.without_service()
                return action(self._late)
            except Exception:
                self._gate.warn(f"has ended. {name or 'A row'} is lost")
                return None

    def _send_left(self, exit_code: int, is_last: bool = True) -> None:
        """Have another wandb-core send what W&B lacks, and end the run: when the function has, or if it has died."""
        with self._late_lock:
            if not (self._has_left if is_last else self._has_died):
                return
            if self._ended_with is None:
                self._ended_with = exit_code or self._told_status or 0
            self._late = self._late or self._outbox.without_service()
            self._before_send(self._ended_with)
            self._outbox.keep_end(self._ended_with)
            self._outbox.close()
            self._has_left = self._has_died = False
        self._timed_out = self.run.offline or not close_again(self.run, self._end_limit(), self._say_again)
        if self._timed_out:
            logger.warning(
                "W&B: run %s: what was set in its config and summary after its end is lost. To send what W&B lacks of "
                "the rest, run: %s",
                self.id,
                self._command,
            )

    def _before_send(self, exit_code: int) -> None:
        """Keep what is told at the end of a run."""

    def _end_limit(self) -> EndLimit:
        return EndLimit("W&B", self.id, self._request.config, self._request.sigterm)

    def _warn_of_rest(self, upload: Upload, why: str) -> None:
        """Say why something was not sent, and whether it is on this disk, and `send` can send it."""
        self._timed_out = True
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
        was_torn_down = vendor.was_torn_down(self.run, self._request.config.finish_timeout_s / 2)
        logger.warning(
            "%s. What run %s logs is kept in %s from now on%s",
            "wandb.teardown() was called" if was_torn_down else f"wandb-core has died ({type(error).__name__})",
            self.id,
            outbox.run_directory(self.run),
            self._when_sent,
        )
        self._has_died = self._has_left = True
        vendor.set_finished(self.run)
        self._be_global()

    def _say_again(self, run: Any) -> None:
        """Have a run, opened once more, have what the function has said about it, and the files that it has saved."""
        said, kind = self._said, type(run)
        if self._path.next_row.waiting:
            said["summary"].update(self._path.next_row.take())
        try:
            for define in (*self._definitions, *self._drawn.values()):
                define(run)
            for name, value in said["run"].items():
                setattr(run, name, value)
            if said["config"]:
                vendor.update_config(run, said["config"])
            if said["summary"]:
                vendor.update_summary(run, said["summary"])
            if said["files"]:
                found = vendor.stored_run(Place.of(run), _ASK_S)
                paths = {name: Path(path) for name, path in said["files"].items()}
                here = {name: path if path.is_file() else None for name, path in paths.items()}
                for name in paths if found is None else found.lacks(here):
                    path = paths[name]
                    folder = str(path.parents[len(Path(name).parts) - 1])
                    kind.save(run, glob.escape(str(path)), base_path=folder, policy="now")
        except Exception:
            text = "W&B: run %s may lack config, summary or files that were set or saved before"
            logger.warning(text, self.id, exc_info=True)

    @property
    def _when_sent(self) -> str:
        """When what the journal keeps is sent; empty if the run is offline, which says so at its end."""
        ending = ", and sent when the function ends. If the process is killed before that, run: "
        return "" if self.run.offline else ending + self._command

    @property
    def _command(self) -> str:
        """The command that sends what W&B lacks; if ranks share the run, of all of them on this disk."""
        if outbox.label_of(self._request) is not None:
            return how_to_send(outbox.directory_to_send(self._request, self.run))
        return how_to_send(self.unsent() or [str(outbox.run_directory(self.run))])

    @property
    def has_definitions(self) -> bool:
        """Whether the function, or a rollback, has defined how the run's columns are drawn."""
        return bool(self._definitions)

    def draw_over(self, key: str, column: str) -> None:
        """Have W&B draw a key over a column. Rows without a value of the column get none."""
        kind: Any = type(self.run).__mro__[1]
        if key not in self._drawn and "*" not in key:
            self._drawn[key] = lambda run: kind.define_metric(run, key, step_metric=column, step_sync=False)
            self._drawn[key](self._late or self.run)

    def known_step(self) -> int | None:
        """The step of the run's current row; None if other processes log into the run too."""
        return self._outbox.next_step

    def first_step(self) -> int:
        """The first step of this attempt: the run has those below it from earlier ones."""
        known = self._outbox.first_step
        return int(self.run.starting_step) if known is None else known

    def next_step(self) -> int:
        """The step of the next row."""
        known = self._outbox.next_step
        # W&B says 0 until a row was logged.
        return max(int(self.run.step), int(self.run.starting_step)) if known is None else known


class Rollback:
    """Keeps the rows of a job that goes back to its checkpoint, and logs steps that the run has already.

    W&B drops a row whose step is below the run's last one. Here such a row lands at the run's next step instead, with
    the step in a column of its own, and with the number of the restart, which tells the attempts apart.
    """

    def __init__(self, handle: WandbHandle, request: RunRequest) -> None:
        self._handle = handle
        self._column = request.config.step_metric
        self._restart_count = request.restart_count
        self._distance = 0  # the same for all rows: calls of one step stay one row
        self._late = LateRows(handle, self._column)

    def place(self, data: Any, step: Any) -> tuple[Any, Any]:
        """Return the row and the step with which W&B keeps them; the step is None if the user gives none."""
        # A run without an earlier attempt has no step below 0 to go back to: W&B drops such a row.
        if step is not None and not self._distance and max(step, 0) < self._handle.first_step():
            self._go_back(step)
        if not isinstance(data, Mapping) or (step is None and not self._distance):  # for another type, wandb says why
            return data, step
        if not self._distance:
            return self._late.place(data, step, step)
        columns = {} if step is None else {self._column: step}
        row = {**columns, RESTART_COUNT: self._restart_count, **data}
        return row, None if step is None else self._late.place(row, step, step + self._distance)[1]

    def _go_back(self, step: int) -> None:
        next_step = self._handle.next_step()
        if next_step <= step:
            return
        self._distance = next_step - step
        self._handle.run.define_metric("*", step_metric=self._column)
        logger.warning(
            "W&B: the job continues at step %s, and its run has the steps up to %d already. All rows are kept: those "
            "of this attempt are at the run's next steps, with their own steps in %r and %s=%d",
            step,
            next_step - 1,
            self._column,
            RESTART_COUNT,
            self._restart_count,
        )


def guard(run: Any, is_shared: bool) -> None:
    """Route the calls of the run's methods through its handle, `vars(run)[HANDLE]`."""
    kind: Any = type(run)
    run.__class__ = _guarded(kind, is_shared)
    guard_values(run)


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
def _guarded(kind: Any, is_shared: bool) -> Any:
    """A subclass of `wandb.Run` whose methods call its handle. With a subclass, `log = run.log` is guarded too."""
    row_method = vendor.row_method(kind) if is_shared else None
    members: dict[str, Any] = {name: _guard(getattr(kind, name), "use") for name in _methods(kind)}
    members["log"] = _guard(kind.log, "log")
    members.update({name: _guard(getattr(kind, name), "end_by_user") for name in vendor.ENDINGS})
    for name in _CHANGING:
        member = getattr(kind, name, None)
        if isinstance(member, property):
            getter, setter = (accessor and _guard(accessor, "change") for accessor in (member.fget, member.fset))
            members[name] = property(getter, setter, doc=member.__doc__)
    if row_method is not None:
        members[row_method.__name__] = _guard(row_method, "log_part")
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


def _methods(kind: type) -> list[str]:
    public = [name for name in dir(kind) if not name.startswith("_")]
    return [name for name in public if inspect.isfunction(inspect.getattr_static(kind, name))]


def _guard(method: Callable[..., Any], route: str, run_of: Callable[[Any], Any] | None = None) -> Any:
    """Have a method of a run, or of a value of it, call this method of the run's handle instead, while it has one."""

    @functools.wraps(method)
    def guarded(target: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(target if run_of is None else run_of(target)).get(HANDLE)
        if handle is None:
            return vars(target).get(method.__name__, functools.partial(method, target))(*args, **kwargs)
        return getattr(handle, route)(method, *args, **kwargs)

    return guarded


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
