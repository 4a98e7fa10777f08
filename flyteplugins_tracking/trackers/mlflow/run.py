"""An open MLflow run: rows are sent in the background, and only the decorator ends the run."""

from __future__ import annotations

import functools
import logging
import os
import posixpath
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import has_credentials, without_credentials
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, prefix_of, refuse_to_pickle
from flyteplugins_tracking.trackers.journal import how_to_send, what_is_kept
from flyteplugins_tracking.trackers.journal.earlier import EarlierAttempts
from flyteplugins_tracking.trackers.journal.lines import encode
from flyteplugins_tracking.trackers.journal.local import RunFile
from flyteplugins_tracking.trackers.mlflow import run_page, vendor
from flyteplugins_tracking.trackers.mlflow.open import Opened, end_run, new_params
from flyteplugins_tracking.trackers.mlflow.sender import Item, Sender, now_ms
from flyteplugins_tracking.trackers.mlflow.vendor import (
    RejectedError,
    Service,
    UnavailableError,
    flush_own_rows,
    next_step,
)
from flyteplugins_tracking.trackers.rows import MetricSanitizer

logger = logging.getLogger(__name__)

# The part of a run's end that is kept for sending the status: seconds, and the largest share of finish_timeout_s.
_STATUS_S, _STATUS_SHARE = 3.0, 0.25
# The server's steps have 64 bits, and the next step needs room.
_LARGEST_STEP = 2**63 - 1
# The longest text that servers of all versions take as a tag: mlflow.utils.validation.MAX_TAG_VAL_LENGTH.
_MAX_TAG = 5000
# The tag of `save_state`.
_STATE_TAG = "flyteplugins_tracking.state"
# The longest name of a metric.
_LONGEST_NAME = 250
# The longest wait for the monitor's last sample, in seconds.
_STOP_S = 2.0
# The methods of the run object by which params and tags are logged.
_METHODS: Mapping[Literal["params", "tags"], str] = {"params": "log_params", "tags": "set_tags"}

_warn_once = WarnOnce(logger)
# The runs that are open here, each with the stack of active runs that has it. Only the decorator ends them.
_open: list[tuple[Any, list[Any]]] = []


class MlflowHandle(ClientHandle):
    """An open MLflow run. `mlflow.active_run()` returns it while the function runs."""

    def __init__(
        self,
        request: RunRequest,
        tracker: Tracker,
        uri: str,
        opened: Opened,
        run_id: str,
        undo: ExitStack,
    ) -> None:
        """Make the run active.

        Args:
            request: The decorator's request for this run.
            tracker: The MLflow tracker.
            uri: The tracking URI.
            opened: The run on the server.
            run_id: Our id of the run.
            undo: Undoes what was done to the process. The handle takes it over, and closes it when the run has ended.
        """
        values = MetricSanitizer(
            tracker.title, prefix_of(request), "not shown in charts: MLflow keeps NaN, and keeps an infinity as 1.8e308"
        )
        super().__init__(request, tracker.title, values)
        self.id, self.uri, self.opened = run_id, uri, opened
        # The run that another rank finds may be an earlier attempt's, or one that the primary has just made.
        is_retry = self._barrier is not None and self._barrier.is_retry and not request.plan.primary
        self.is_resumed = opened.is_resumed or is_retry
        self.run = run_class()(opened.run, self)
        self._tracker = tracker
        self._next_step = next_step(opened.run) if self.is_resumed else 0
        self._names: dict[str, str] = {}  # the names of metrics that MLflow takes, by key
        self._last: dict[str, Any] = {}
        self._sender = Sender(Service(uri, is_known=True), opened.run.info.run_id, self.id, self._on_sent)
        self._kept_in: str | None = None  # the directory of rows that were not sent in time
        self._overflow: RunFile | None = None  # the rows for which memory has no room
        self._earlier = EarlierAttempts.of(request, tracker, run_id)
        self._begin_file()
        self._send_earlier()
        self._undo = undo.pop_all()
        try:
            activate(self.run, uri, opened.run.info.experiment_id, self._undo)
            if request.plan.primary and (params := new_params(request, opened)):
                self.put("params", params)
            self._monitor = start_monitor(request, opened.run.info.run_id, is_resumed=self.is_resumed)
        except BaseException:
            self._undo.close()
            self._send_status(1, time.monotonic() + _STATUS_S)
            raise

    @property
    def url(self) -> str | None:
        """The run's page; None if the address of the UI is not known."""
        url: str | None = self.run.url
        return url

    @property
    def place(self) -> dict[str, str]:
        """The arguments with which another process finds the run."""
        arguments = {"experiment_id": self.opened.run.info.experiment_id}
        return arguments if has_credentials(self.uri) else {**arguments, "tracking_uri": self.uri}

    def summary(self) -> Mapping[str, Any]:
        return dict(self._last)

    def unsent(self) -> Sequence[str]:
        return [] if self._kept_in is None else [self._kept_in]

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory, self.place)

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        tags = {key: str(value)[-_MAX_TAG:] for key, value in {**values, f"{name}/text": text}.items()}
        self._put(Item("tags", tags, 0, now_ms()))

    def save_state(self, text: str) -> None:
        if self._gate.state == "open":
            self._put(Item("tags", {_STATE_TAG: text}, 0, now_ms()))

    def saved_state(self) -> str | None:
        state: str | None = self.opened.run.data.tags.get(_STATE_TAG)
        return state

    def how_to_view(self) -> str:
        return self.url or f"mlflow ui --backend-store-uri {shlex.quote(without_credentials(self.uri))}"

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        self._write_at(row, step, now_ms())

    @property
    def last_step(self) -> Any:
        """The step of the last row."""
        return max(0, self._next_step - 1)

    def replay(self, row: Mapping[str, Any], step: Any, time_s: float) -> None:
        until = time.monotonic() + self.request.config.finish_timeout_s
        if not self._sender.has_room and (unsent := self._sender.flush(until)):
            self._keep(unsent, None)
        self._write_at(row, step, round(time_s * 1000))

    def put(self, kind: Literal["params", "tags"], data: Mapping[str, Any]) -> None:
        """Send params or tags in the background, in order with the rows."""
        if self._gate.refuses():
            return
        self.request.watch.before_row()
        self._put(Item(kind, dict(data), 0, now_ms()))

    def keep_end(self, exit_code: int) -> None:
        self._file.end(exit_code)

    def end(self, exit_code: int) -> None:
        timeout_s = self.request.config.finish_timeout_s
        until = time.monotonic() + timeout_s
        if self._monitor is not None:  # in an outage, its last request takes minutes
            run_with_timeout(_STOP_S, self._monitor.finish)
        status_s = min(_STATUS_S, timeout_s * _STATUS_SHARE)
        if not flush_own_rows(self.uri, until - status_s - time.monotonic()):
            self._warn("has rows of MLflow's own asynchronous logging that were not sent in time")
        unsent = self._sender.flush(until - status_s)
        if not self._send_status(exit_code, until) or unsent or self._overflow is not None:
            self._keep(unsent, exit_code)
        else:
            self._file.remove()
            self._begin_file()

    def finish(self, exit_code: int) -> None:
        try:
            super().finish(exit_code)
            unsent = self._sender.flush(time.monotonic() + _STATUS_S)  # params that were logged after an early end
            if unsent:
                self._keep(unsent, exit_code)
            self._file.remove()
        finally:
            self._undo.close()

    def _write_at(self, row: Mapping[str, Any], step: Any, time_ms: int) -> None:
        at = self._step(step)
        self._next_step = max(self._next_step, at + 1)
        points = {self._name(key): float(value) for key, value in row.items() if self._is_number(key, value)}
        if points:
            self._last.update(points)
            self._put(Item("row", points, at, time_ms))

    def _step(self, step: Any) -> int:
        if step is None:
            return self._next_step
        try:
            number = int(step)
        except (TypeError, ValueError, OverflowError):
            number = _LARGEST_STEP
        if abs(number) < _LARGEST_STEP:
            return number
        self._values.warn_once(
            f"step={step!r}", "MLflow takes integers of 64 bits as steps: the row gets the next step"
        )
        return self._next_step

    def _put(self, item: Item) -> None:
        if self._sender.put(item):
            self._file.journal.add(_line(item))
            return
        if self._overflow is None:
            self._overflow = self._new_file()
            text = "MLflow: run %s: memory has no room for more rows that %s does not take. They go to files in %s"
            logger.warning(text, self.id, without_credentials(self.uri), self._overflow.directory)
        self._overflow.journal.add(_line(item))

    def _new_file(self) -> RunFile:
        return RunFile(to_be_sent(self.request, self.place), self._tracker, self.id)

    def _begin_file(self) -> None:
        """Keep what is logged from now on in a journal of its own, until the server has it."""
        self._file, self._sent_before = self._new_file(), self._sender.taken

    def _send_earlier(self) -> None:
        """Send what earlier attempts on this machine had logged and the server may lack. It keeps one of two points."""
        others = []
        for line in self._earlier.lines:
            item = _item(line)
            if item is None:
                others.append(line)
                continue
            if not self._sender.put(item):
                self._earlier.keep()
                break
            self._earlier.count += 1
            self._next_step = max(self._next_step, item.step + 1 if item.kind == "row" else 0)
        self._sent_before += self._earlier.count
        self._earlier.relog(self, others)
        self._earlier.log(self.id, self._title)

    def _on_sent(self, count: int) -> None:
        """Note, in the sender's thread, how many items the server has."""
        if self._earlier.count and count >= self._earlier.count:
            self._earlier.acknowledged()
        if count > self._sent_before:
            self._file.journal.acknowledged(count - self._sent_before)

    def _is_number(self, key: str, value: Any) -> bool:
        if type(value) is float:
            return True
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            self._values.warn_once(
                key,
                f"a {type(value).__name__} is left out: metrics are numbers. Use log_params, set_tags or "
                "mlflow.log_figure",
            )
            return False
        return not isinstance(value, str)

    def _name(self, key: str) -> str:
        name = self._names.get(key)
        if name is None:
            name = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", key)).lstrip("/").replace("../", "")
            name = self._names[key] = (name if name not in ("", ".", "..") else "_")[:_LONGEST_NAME]
            if name != key:
                self._values.warn_once(key, f"MLflow does not take this name of a metric: it is logged as {name!r}")
        return name

    def _send_status(self, exit_code: int, until: float) -> bool:
        if not self.request.plan.primary:
            return True
        try:
            end_run(Service(self.uri, until, is_known=True), self.opened, exit_code)
        except RejectedError:
            self._warn("keeps its status: the server has rejected the new one")
        except UnavailableError:
            return False
        return True

    def _keep(self, unsent: Sequence[Item], exit_code: int | None) -> None:
        """Leave the journals, with what the server has not taken, to who sends it later."""
        files = [self._file, *([self._overflow] if self._overflow is not None else [])]
        count, lost = _rows(unsent), _rows(unsent[len(unsent) - self._file.journal.lost :])
        if self._overflow is not None:
            count, lost = count + self._overflow.journal.added, lost + self._overflow.journal.lost
        for file in files:
            if exit_code is not None:
                file.end(exit_code)
            file.journal.close()
        self._kept_in, self._overflow = self._file.directory, None
        self._begin_file()
        rest = f"{count} rows. {what_is_kept(count, lost)}" if count else "all params, tags and the status."
        logger.warning(
            "MLflow: run %s: %s has not taken %s Send the rest when MLflow answers: %s",
            self.id,
            without_credentials(self.uri),
            rest,
            how_to_send(self._kept_in, self.place),
        )


def _rows(items: Sequence[Item]) -> int:
    return sum(item.kind == "row" for item in items)


def _line(item: Item) -> bytes:
    """Return an item as a line of the journal."""
    if item.kind == "row":
        return encode({"row": dict(item.data), "step": item.step, "time": item.time_ms / 1000})
    texts = {str(key): str(value) for key, value in item.data.items()}  # the server has only texts
    return encode({"call": _METHODS[item.kind], "args": [texts], "kwargs": {}})


def _item(line: Mapping[str, Any]) -> Item | None:
    """Return the item of a line of the journal; None if the line is an end."""
    if "row" in line:
        return Item("row", line["row"], line["step"], round(line["time"] * 1000))
    for kind, method in _METHODS.items():
        if line.get("call") == method:
            return Item(kind, line["args"][0], 0, 0)
    return None


def to_be_sent(request: RunRequest, place: Mapping[str, Any]) -> RunRequest:
    """Return the request for rows in files, which another process sends later to `place`."""
    config, left_out = request.config, {"log_system_metrics"}  # that process runs on another machine
    if "experiment_id" in place:
        left_out.add("experiment_name")
    options = {name: value for name, value in config.options.items() if name not in left_out}
    return replace(request, config=replace(config, options={**options, **place}))


class Logging:
    """Adds logging in the background to MLflow's active run, and keeps it from being ended."""

    info: Any

    def __init__(self, run: Any, handle: MlflowHandle) -> None:
        super().__init__(run)  # type: ignore[call-arg]
        self._handle = handle

    @property
    def id(self) -> str:
        """The id that the ranks have agreed on: the tag `flyteplugins_tracking.run_id`."""
        return self._handle.id

    @property
    def run_id(self) -> str:
        """The server's id."""
        server_id: str = self.info.run_id
        return server_id

    @property
    def resumed(self) -> bool:
        """Whether the run existed before this attempt of the job."""
        return self._handle.is_resumed

    @property
    def url(self) -> str | None:
        """The run's page; None if the runs are in a database of this machine."""
        return run_page(self._handle.request.config, self._handle.uri, self.info.experiment_id, self.run_id)

    @property
    def client(self) -> Any:
        """An `MlflowClient` of the run's server."""
        from mlflow import MlflowClient

        return MlflowClient(self._handle.uri)

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row of metrics; without a step, at the next one of this process."""
        self._handle.log(data, step)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.log(metrics, step)

    def log_metric(self, key: str, value: Any, step: int | None = None, **_: Any) -> None:
        self.log({key: value}, step)

    def log_params(self, params: Mapping[str, Any], **_: Any) -> None:
        """Log params in the background. A param that has another value already keeps it, with a warning."""
        self._handle.put("params", params)

    def log_param(self, key: str, value: Any, **_: Any) -> None:
        self.log_params({key: value})

    def set_tags(self, tags: Mapping[str, Any], **_: Any) -> None:
        """Set tags in the background."""
        self._handle.put("tags", tags)

    def set_tag(self, key: str, value: Any, **_: Any) -> None:
        self.set_tags({key: value})

    def finish(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __exit__(self, *_: object) -> None:
        """Do nothing, as `finish`."""

    def __reduce__(self) -> Any:
        refuse_to_pickle()


@functools.lru_cache(maxsize=1)
def run_class() -> Any:
    """Return the class of the runs that `get_run` returns. It is made late, since its base is MLflow's."""
    import mlflow

    return type("MlflowRun", (Logging, mlflow.ActiveRun), {})


# MLflow's own functions in this process: `mlflow.log_metric`, autologging and the monitor.


def activate(run: Any, uri: str, experiment_id: str, undo: ExitStack) -> None:
    """Make `run` the active run of this thread, with its server and experiment. `undo` gets what undoes that."""
    vendor.leave_end_to_us(_is_open)
    _use_server(uri, undo)
    undo.callback(vendor.use_experiment(experiment_id))
    undo.callback(_set_variables({"MLFLOW_RUN_ID": None}))  # mlflow.start_run(nested=True) would resume that run
    stack = vendor.active_runs()
    entry = (run, stack)
    stack.append(run)
    _open.append(entry)

    def deactivate() -> None:
        _open.remove(entry)
        stack[:] = [other for other in stack if other is not run]

    undo.callback(deactivate)


def _is_open(run_id: str) -> bool:
    """Whether the run is open here. `mlflow.end_run()` has just taken such a run off its stack: put it back."""
    is_open = False
    for run, stack in tuple(_open):
        if run.info.run_id == run_id:
            is_open = True
            if run not in stack:
                stack.append(run)
                _warn_once(
                    run_id,
                    "MLflow: run %s: mlflow.end_run() does not end it, and it stays the active run until the decorated "
                    "function ends. So a loop that calls mlflow.end_run() while there is an active run never ends",
                    run.id,
                )
    return is_open


def _use_server(uri: str, undo: ExitStack) -> None:
    import mlflow

    before, variable = vendor.uri_set_by_program(), os.environ.get("MLFLOW_TRACKING_URI")
    if mlflow.get_tracking_uri() == uri:
        return
    mlflow.set_tracking_uri(uri)

    def put_back() -> None:
        if vendor.uri_set_by_program() == uri:
            mlflow.set_tracking_uri(before)
            _set_variables({"MLFLOW_TRACKING_URI": variable})

    undo.callback(put_back)


def use_credentials(key: str | None) -> Callable[[], object]:
    """Give the API key, or "user:password", to MLflow, by variables of this process. Returns what undoes that."""
    if not key:
        return lambda: None
    user, colon, password = key.strip().partition(":")
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    values = (user, password, None) if colon else (None, None, user)
    return _set_variables(dict(zip(names, values, strict=True)))


def _set_variables(values: Mapping[str, str | None]) -> Callable[[], object]:
    """Set variables of this process; None removes one. Returns what puts back those that this has changed."""
    before = {name: os.environ.get(name) for name, value in values.items() if os.environ.get(name) != value}
    for name in before:
        value = values[name]
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return lambda: _set_variables(before)


def start_monitor(request: RunRequest, run_id: str, *, is_resumed: bool) -> Any:
    """Start the monitor of this node, if the user wants it and this rank runs it. Returns None if not."""
    from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

    info, is_on = request.info, request.config.options.get("log_system_metrics")
    if is_on is None:
        is_on = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
    if not is_on or not request.leads_node:
        return None
    worker = None if info is None or info.worker_index is None else f"worker-{info.worker_index}"
    try:
        return vendor.start_monitor(run_id, worker, is_resumed=is_resumed)
    except ImportError:
        logger.warning("MLflow: system metrics need psutil: pip install psutil")
        return None
