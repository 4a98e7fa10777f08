"""An open MLflow run: rows are sent in the background, and only the decorator ends the run."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import posixpath
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from flyteplugins_tracking._util.proc import TERMINATED, set_variables
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import has_credentials, listed, without_credentials
from flyteplugins_tracking._util.threads import run_while, run_with_timeout
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import Run, join_calls, left_of_opening, prefix_of
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.idle import IDLE, is_idle
from flyteplugins_tracking.trackers.journal import Line, event_values
from flyteplugins_tracking.trackers.kept import OutboxHandle
from flyteplugins_tracking.trackers.mlflow import run_page, vendor
from flyteplugins_tracking.trackers.mlflow.open import (
    LONGEST_PARAM,
    LONGEST_TAG,
    PARAMS_TAG,
    RUN_ID_VARIABLE,
    Opened,
    end_run,
    params,
)
from flyteplugins_tracking.trackers.mlflow.vendor import RejectedError, Service
from flyteplugins_tracking.trackers.registry import waiting
from flyteplugins_tracking.trackers.rows import MetricSanitizer, Steps

logger = logging.getLogger(__name__)

# How many points are sent in one call, which has the time limit of one request.
_MOST_POINTS = 1000
# The longest name of a metric.
_LONGEST_NAME = 250
# The longest wait for the monitor's last sample, in seconds.
_STOP_S = 2.0
# The tags of a run's name and description: https://mlflow.org/docs/latest/ml/tracking/#system_tags
_NAME_TAG, _NOTE_TAG = "mlflow.runName", "mlflow.note.content"
# The exit codes that MLflow's names of ends stand for.
_EXIT_CODES = {"FAILED": 1, "KILLED": TERMINATED}
# The arguments of `mlflow.start_run` that a script's own opening of its run has.
_OPENING = {"run_name": "name", "experiment_id": "experiment_id"}
# The calls of the run object that a run takes, by what they set.
_SETTERS = {"log_params": "params", "log_param": "params", "set_tags": "tags", "set_tag": "tags"}

_warn_once = WarnOnce(logger)
# The runs that are open here, each with the stack of active runs that has it. Only the decorator ends them.
_open: list[tuple[Any, list[Any]]] = []


class MlflowHandle(OutboxHandle):
    """An open MLflow run. `mlflow.active_run()` returns it while the function runs."""

    def __init__(self, request: RunRequest, tracker: Tracker, uri: str, opened: Opened, undo: ExitStack) -> None:
        """Make the run active.

        Args:
            request: The decorator's request for this run, with its id.
            tracker: The MLflow tracker.
            uri: The tracking URI.
            opened: The run on the server.
            undo: Undoes what was done to the process. The handle takes it over, and closes it when the run has ended.
                If it cannot be made, that is left to the caller.
        """
        values = MlflowSanitizer(tracker.title, prefix_of(request))
        self.uri, self.opened = uri, opened
        run_id, steps = opened.run.info.run_id, Steps(values)
        self._first_params: Mapping[str, str] = opened.run.data.params if opened.is_resumed else {}
        self._other_params: dict[str, str] = {}
        self._own_params: dict[str, Any] = {}  # of this attempt
        sink = MlflowSink(Service(uri, is_known=True), run_id, str(request.plan.run_id), values, steps)
        super().__init__(request, tracker, sink, values, steps)
        self.run = run_class()(opened.run, self)
        activate(self.run, uri, opened.run.info.experiment_id, undo)
        if request.plan.primary:
            self.set_params(params(request.config.config or {}))
        self._monitor = self._start_monitor(request.config.options.get("log_system_metrics"))
        self.undo = undo.pop_all()

    @property
    def is_resumed(self) -> bool:
        """Whether the run existed before this attempt of the job."""
        # The run that another rank finds may be an earlier attempt's, or one that the primary has just made.
        is_retry = self._barrier is not None and self._barrier.is_retry and not self.request.plan.primary
        return self.opened.is_resumed or is_retry

    def stored_step(self) -> int:
        return vendor.last_step(self.opened.run) if self.is_resumed else -1

    def exit_code_after(self, time_s: float) -> int | None:
        run = self.opened.run
        ended_with = {"FINISHED": 0, **_EXIT_CODES}.get(run.info.status) if self.opened.is_resumed else None
        return ended_with if vendor.last_at(run) > time_s else None

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments with which another process finds the run."""
        arguments = {"experiment_id": self.opened.run.info.experiment_id}
        return arguments if has_credentials(self.uri) else {**arguments, "tracking_uri": self.uri}

    def sendable(self) -> RunRequest:
        return to_be_sent(self.request, self.arguments)

    def how_to_view(self) -> str:
        return self.url or f"mlflow ui --backend-store-uri {shlex.quote(without_credentials(self.uri))}"

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        at = self.steps.take(step)
        if row:
            self.put_row(row, at)

    def set_values(self, method: str, values: Mapping[str, Any]) -> None:
        """Send params or tags in the background, in order with the rows."""
        if self._gate.refuses():
            return
        self.request.sigterm.before_row()
        texts = {str(key): str(value) for key, value in values.items()}  # the server has only strings
        self.put({"call": method, "args": [texts], "kwargs": {}})

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Send params in the background, those that the run does not have yet."""
        accepted = self.accepted_params(values)
        new = {key: value for key, value in accepted.items() if key not in self._first_params}
        if new:
            self.set_values("log_params", new)

    def accepted_params(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return these params as the run takes them.

        MLflow keeps the first value of a param, and raises for another one. So what an earlier attempt has set stays,
        and the value of this attempt becomes a tag.
        """
        texts = {str(key): str(value)[:LONGEST_PARAM] for key, value in values.items()}
        first = {key: self._first_params[key] for key in texts if key in self._first_params}
        known = {**first, **self._other_params}
        others = {key: texts[key] for key in first if texts[key] != known[key]}
        self._own_params.update({key: texts[key] for key in texts if key not in first})
        if others:
            # A loop may open a run for each of its turns: then it is said once.
            subject = ", ".join(others) if self._told_status is None else "params"
            text = "%s: run %s: params keep their first values, and the tags %s* have those of this attempt: %s"
            self.warn_once(subject, text, self._title, self.id, PARAMS_TAG, listed([*others]))
            self._other_params.update(others)
            self.set_values("set_tags", {PARAMS_TAG + key: value[:LONGEST_TAG] for key, value in others.items()})
        return {**values, **first}

    def tell_end(self, exit_code: Any = None) -> None:
        """Take the params until now as those of an earlier attempt: MLflow alone would open the next run."""
        self._first_params = {**self._own_params, **self._first_params}
        super().tell_end(exit_code)

    def join(self, given: Mapping[str, Any]) -> None:
        """Add what a `mlflow.start_run` of the function says, and the decorator does not."""
        config, plan, info = self.request.config, self.request.plan, self.opened.run.info
        placed, tags = {"run_id": self.id, "experiment_id": info.experiment_id}, dict(given.get("tags") or {})
        if given.get("run_id") == info.run_id:
            given = {**given, "run_id": self.id}
        for name, own, tag in (("run_name", config.name, _NAME_TAG), ("description", config.notes, _NOTE_TAG)):
            if own is not None:
                placed[name] = own
            elif given.get(name):
                tags[tag] = given[name]
        self.describe("mlflow.start_run", given, placed)
        if not plan.primary:
            return
        if tags:
            self.run.set_tags(tags)
        if self._monitor is None and config.options.get("log_system_metrics") is None:
            self._monitor = self._start_monitor(bool(given.get("log_system_metrics")))

    def _start_monitor(self, is_on: bool | None) -> Any:
        """Start the monitor of this node, if `is_on` and this rank runs it. Returns None if not."""
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

        info = self.request.info
        if is_on is None:
            is_on = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
        if not is_on or not self.request.measures_node:
            return None
        worker = None if info is None or info.worker_index is None else f"worker-{info.worker_index}"
        return vendor.start_monitor(self.run.run_id, worker, is_resumed=self.is_resumed)

    def end(self, exit_code: int) -> None:
        limit = self.end_limit()
        if self._monitor is not None:  # in an outage, its last request takes minutes
            run_with_timeout(_STOP_S, self._monitor.finish)
        half_s = limit.left_s / 2
        if not run_while(lambda: limit.left_s > half_s, vendor.flush_own_rows):
            self._gate.warn("has rows of MLflow's own asynchronous logging that it sends when the process ends")
        self.close_outbox(exit_code, limit)

    def end_run(self, exit_code: int, timeout_s: float) -> None:
        end_run(self.request, self.uri, self.opened, exit_code, timeout_s)


class MlflowSanitizer(MetricSanitizer):
    """Makes rows of what a rank logs: numbers by the names that MLflow takes."""

    def __init__(self, title: str, prefix: str = "") -> None:
        super().__init__(title, prefix)
        self._names: dict[str, str] = {}  # the names that MLflow takes, by key

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return self.metrics_of(super().clean(data))

    def metrics_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a row, which another process may have kept."""
        return {self._name(key): float(value) for key, value in row.items() if self._is_number(key, value)}

    def _is_number(self, key: str, value: Any) -> bool:
        if type(value) is float:
            return True
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            self.warn_once(
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
                self.warn_once(key, f"MLflow does not take this name of a metric: it is logged as {name!r}")
        return name


class MlflowSink:
    """Sends lines to a run. They can be sent twice: of two equal points, MLflow's databases keep one."""

    def __init__(self, service: Service, run_id: str, planned_id: str, values: MlflowSanitizer, steps: Steps) -> None:
        """`run_id` is MLflow's id of the run, and `planned_id` the one of its plan, for messages."""
        self._service, self._run_id, self._planned_id = service, run_id, planned_id
        self._values, self._steps = values, steps

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        self._service.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        points = [point for line in lines if "row" in line for point in self._points_of(line)]
        for first in range(0, len(points), _MOST_POINTS):
            self._log_points(points[first : first + _MOST_POINTS])
        for line in lines:
            if "event" in line:
                self._change_tags(event_values(line))
            elif line.get("call") in _SETTERS:
                self._set(_SETTERS[line["call"]], _values_of(line))

    def _points_of(self, line: Line) -> list[Any]:
        from mlflow.entities import Metric

        step, time_ms = self._steps.take(line["step"]), round(line["time"] * 1000)
        return [Metric(key, value, time_ms, step) for key, value in self._values.metrics_of(line["row"]).items()]

    def _log_points(self, points: Sequence[Any]) -> None:
        self._service.ask(lambda client: client.log_batch(self._run_id, points, synchronous=True))

    def _change_tags(self, values: Mapping[str, Any]) -> None:
        if new := {key: str(value)[-LONGEST_TAG:] for key, value in values.items() if value is not None}:
            self._set("tags", new)
            return

        def remove(client: Any) -> None:
            for key in client.get_run(self._run_id).data.tags.keys() & values.keys():
                client.delete_tag(self._run_id, key)

        self._service.ask(remove)

    def _set(self, kind: str, values: Mapping[str, str]) -> None:
        """Set params or tags. If the server rejects some, it gets them one by one: it takes all of them or none."""
        from mlflow.entities import Param, RunTag

        pairs = [(Param if kind == "params" else RunTag)(*pair) for pair in values.items()]
        try:
            self._service.ask(lambda client: client.log_batch(self._run_id, synchronous=True, **{kind: pairs}))
        except RejectedError as error:
            if len(pairs) > 1:
                for key, value in values.items():
                    self._set(kind, {key: value})
            else:
                text = "MLflow: run %s: the server rejects the %s %r: %s"
                _warn_once((self._planned_id, kind, *values), text, self._planned_id, kind[:-1], *values, error)


def _values_of(line: Line) -> dict[str, str]:
    """Return what a kept call sets: `log_params({...})`, or `log_param(key, value)`."""
    args = [*line["args"], *line["kwargs"].values()]
    given = args[0] if len(args) == 1 and isinstance(args[0], dict) else dict([args[:2]])
    return {str(key): str(value) for key, value in given.items()}


def to_be_sent(request: RunRequest, place: Mapping[str, Any]) -> RunRequest:
    """Return the request for rows in files, which another process sends later to `place`."""
    config = request.config
    return replace(request, config=replace(config, options={**config.options, **place}))


class Logging(Run):
    """Adds logging in the background to MLflow's active run, and keeps it from being ended.

    Attributes:
        id: The id that the ranks have agreed on: the tag `flyteplugins_tracking.run_id`.
    """

    info: Any
    _handle: MlflowHandle

    def __init__(self, run: Any, handle: MlflowHandle) -> None:
        super(Run, self).__init__(run)  # type: ignore[call-arg]
        Run.__init__(self, handle)

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

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.log(metrics, step)

    def log_metric(self, key: str, value: Any, step: int | None = None, **_: Any) -> None:
        self.log({key: value}, step)

    def log_params(self, params: Mapping[str, Any], **_: Any) -> None:
        """Log params in the background. A param of an earlier attempt keeps its value, with a warning."""
        self._handle.set_params(params)

    def log_param(self, key: str, value: Any, **_: Any) -> None:
        self.log_params({key: value})

    def set_tags(self, tags: Mapping[str, Any], **_: Any) -> None:
        """Set tags in the background."""
        self._handle.set_values("set_tags", tags)

    def set_tag(self, key: str, value: Any, **_: Any) -> None:
        self.set_tags({key: value})

    def __exit__(self, kind: object = None, *_: object) -> None:
        """End nothing, as `finish`."""
        self.finish(int(kind is not None))


@functools.lru_cache(maxsize=1)
def run_class() -> Any:
    """Return the class of the runs that `get_run` returns. It is made late, since its base is MLflow's."""
    import mlflow

    return type("MlflowRun", (Logging, mlflow.ActiveRun), {})


# MLflow's own functions in this process: `mlflow.log_metric`, autologging and the monitor.


def activate(run: Any, uri: str, experiment_id: str, undo: ExitStack) -> None:
    """Make `run` the active run of this thread, with its server and experiment. `undo` gets what undoes that."""
    import mlflow

    vendor.leave_end_to_us(_is_open)
    vendor.replace_params(_accepted_params)
    join_clients_calls()
    if mlflow.get_tracking_uri() == uri:  # else it would be looked for at another server
        undo.callback(vendor.set_last_active_run, run.run_id)
    _use_server(uri, undo)
    undo.callback(vendor.use_experiment(experiment_id))
    undo.callback(set_variables({"MLFLOW_RUN_ID": None}))  # mlflow.start_run(nested=True) would resume that run
    stack = vendor.active_runs()
    entry = (run, stack)
    stack.append(run)
    _open.append(entry)

    def deactivate() -> None:
        _open.remove(entry)
        stack[:] = [other for other in stack if other is not run]

    undo.callback(deactivate)


def join_clients_calls(config: TrackingConfig | None = None) -> None:
    """Have MLflow's functions that choose a run join the open one from now on."""
    import mlflow

    if config is not None and (uri := config.options.get("tracking_uri")):
        mlflow.set_tracking_uri(uri)  # a script's `set_experiment` comes before its run
    join_calls(mlflow.start_run, _join)
    join_calls(mlflow.set_experiment, _keep_experiment)
    join_calls(mlflow.set_tracking_uri, _keep_server)
    join_calls(mlflow.get_artifact_uri, _idle_address)


def _join(given: Mapping[str, Any]) -> Any:
    """Return the run of the decorated function for a `mlflow.start_run`, if it is active: MLflow raises then.

    On a rank without a run, return one that does nothing. A call there with `run_id=` is MLflow's own.
    """
    if not given.get("nested") and not vendor.active_runs():
        if "mlflow" in waiting.openers and given.get("run_id"):  # the script goes on in its run
            os.environ.setdefault(RUN_ID_VARIABLE, given["run_id"])
        given = left_of_opening("mlflow", given, _OPENING)
    run = next(reversed(vendor.active_runs()), None)
    if isinstance(run, Logging) and not given.get("nested"):
        run._handle.join(given)
        return run
    does_nothing = is_idle("mlflow") and not isinstance(run, Logging) and not given.get("run_id")
    return vendor.start_idle_run() if does_nothing else None


def _idle_address(_: Mapping[str, Any]) -> str | None:
    """Return an empty address for a run that does nothing: MLflow would ask the server for it."""
    runs = vendor.active_runs()
    return "" if runs and runs[-1].info.run_id == IDLE else None


def _keep_experiment(given: Mapping[str, Any]) -> Any:
    """Return the run's experiment for a `mlflow.set_experiment` while a run is open: its nested runs are in it."""
    if not _open:
        return None
    from mlflow import MlflowClient

    run = _open[-1][0]
    experiment = MlflowClient(run._handle.uri).get_experiment(run.info.experiment_id)
    known = {"experiment_name": experiment.name, "experiment_id": experiment.experiment_id}
    for name in known:
        if given.get(name) not in (None, known[name]):
            _warn_of_place(run, f"set_experiment({given[name]!r})", name)
    return experiment


def _keep_server(given: Mapping[str, Any]) -> Any:
    """Answer a `mlflow.set_tracking_uri` while a run is open, which has no effect: another server lacks the run."""
    if not _open:
        return None
    run, uri = _open[-1][0], str(given.get("uri"))
    if uri != run._handle.uri:
        _warn_of_place(run, f"set_tracking_uri({without_credentials(uri)!r})", "tracking_uri")
    return run._handle.uri


def _warn_of_place(run: Any, call: str, argument: str) -> None:
    text = (
        "MLflow: mlflow.%s has no effect while run %s is open: its rows and nested runs stay with it. Pass %s to "
        "tracking_init, or as an option of the command `run`"
    )
    _warn_once((run.run_id, argument), text, call, run.id, argument)


def _is_open(run_id: str, status: str) -> bool:
    """Whether the run is open here. `mlflow.end_run(status)` has just taken such a run off its stack: put it back."""
    is_open = False
    for run, stack in tuple(_open):
        if run.info.run_id == run_id:
            is_open = True
            run.finish(_EXIT_CODES.get(status))
            if run not in stack:
                stack.append(run)
                _warn_once(
                    run_id,
                    "MLflow: run %s: mlflow.end_run() does not end it, and it stays the active run until the decorated "
                    "function ends. So a loop that calls mlflow.end_run() while there is an active run never ends",
                    run.id,
                )
    return is_open


def _accepted_params(run_id: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return these params as the run takes them."""
    handle = next((run._handle for run, _ in tuple(_open) if run.info.run_id == run_id), None)
    return values if handle is None else handle.accepted_params(values)


def _use_server(uri: str, undo: ExitStack) -> None:
    import mlflow

    set_tracking_uri = inspect.unwrap(mlflow.set_tracking_uri)  # MLflow's own
    before, variable = vendor.uri_set_by_program(), os.environ.get("MLFLOW_TRACKING_URI")
    set_tracking_uri(uri)  # even if it is that of the variable, which the function may change

    def put_back() -> None:
        if vendor.uri_set_by_program() == uri:
            set_tracking_uri(before)
            set_variables({"MLFLOW_TRACKING_URI": variable})

    undo.callback(put_back)


def use_credentials(key: str | None) -> Callable[[], object]:
    """Give the API key, or "user:password", to MLflow, by variables of this process. Returns what undoes that."""
    if not key:
        return lambda: None
    user, colon, password = key.strip().partition(":")
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    values = (user, password, None) if colon else (None, None, user)
    return set_variables(dict(zip(names, values, strict=True)))
