"""MLflow's own functions, `mlflow.log_metric` and autologging, made to log to a run of ours while it is open."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import posixpath
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import RunRequest

logger = logging.getLogger(__name__)

Undo = Callable[[], object]

_LONGEST_NAME = 250
# What is a loop of `mlflow.end_run()`: so many, each so soon after the one before.
_ENDS_OF_A_LOOP, _AT_ONCE_S = 10, 0.1
# What a last sample may take, in seconds.
_STOP_S = 2.0
# The server's ids of the runs that are open here, and how often. They are ours to end.
_open: dict[str, int] = {}
# Several may be opened and ended at once, by threads.
_lock = threading.Lock()


def activate(run: Any, uri: str, experiment_id: str) -> Undo:
    """Make `run` what `mlflow.active_run()` returns in this thread, with its server and experiment.

    Returns:
        What undoes it.
    """
    from mlflow.tracking import fluent

    guard()
    server_id = run.info.run_id
    stack = fluent._active_run_stack.get()
    if not isinstance(stack, Stack):
        stack = Stack(stack)
        fluent._active_run_stack.set(stack)
    undo = [_use_server(uri), _use_experiment(experiment_id), _hide_variable()]
    with _lock:
        _open[server_id] = _open.get(server_id, 0) + 1
    stack.append(run)

    def deactivate() -> None:
        with _lock:
            _open[server_id] -= 1
            if not _open[server_id]:
                del _open[server_id]
        stack[:] = [other for other in stack if other is not run]
        for step in reversed(undo):
            step()

    return deactivate


class Stack(list[Any]):
    """The stack of active runs. `mlflow.end_run` ends the topmost one: it takes none of ours from it.

    `while mlflow.active_run(): mlflow.end_run()` is to end all the same: after some ends at once it is empty, once.
    """

    _ends = 0
    _last_end = 0.0
    _seems_empty = False

    def __len__(self) -> int:
        seems_empty, self._seems_empty = self._seems_empty, False
        return 0 if seems_empty else super().__len__()

    def pop(self, *index: Any) -> Any:
        """The topmost one."""
        if not self or index or not hasattr(self[-1], "is_tracked"):
            return super().pop(*index)
        now = time.monotonic()
        self._ends = self._ends + 1 if now - self._last_end < _AT_ONCE_S else 1
        self._last_end = now
        if self._ends >= _ENDS_OF_A_LOOP:
            self._ends, self._seems_empty = 0, True
        return self[-1]


@functools.lru_cache(maxsize=1)
def guard() -> None:
    """Have MLflow's client leave the status of our open runs to us: frameworks and `mlflow.end_run` set it by that."""
    from mlflow import MlflowClient

    original = MlflowClient.set_terminated

    @functools.wraps(original)
    def set_terminated(self: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
        return None if run_id in _open else original(self, run_id, *args, **kwargs)

    MlflowClient.set_terminated = set_terminated


def _use_server(uri: str) -> Undo:
    import mlflow
    from mlflow.tracking._tracking_service import utils

    before, variable = utils._tracking_uri, os.environ.get("MLFLOW_TRACKING_URI")
    if mlflow.get_tracking_uri() == uri:
        return lambda: None
    mlflow.set_tracking_uri(uri)

    def undo() -> None:
        if utils._tracking_uri == uri:
            mlflow.set_tracking_uri(before)
            _put_back("MLFLOW_TRACKING_URI", variable)

    return undo


def _use_experiment(experiment_id: str) -> Undo:
    """For the nested runs that the function starts: they would be in the default experiment."""
    from mlflow.tracking import fluent

    before = fluent._active_experiment_id
    fluent._active_experiment_id = experiment_id

    def undo() -> None:
        if fluent._active_experiment_id == experiment_id:
            fluent._active_experiment_id = before

    return undo


def _hide_variable() -> Undo:
    """While the run is open: `mlflow.start_run(nested=True)` would take it for its own, and remove the variable."""
    value = os.environ.pop("MLFLOW_RUN_ID", None)
    return lambda: _put_back("MLFLOW_RUN_ID", value) if value is not None else None


def use_credentials(key: str | None) -> Undo:
    """Give the API key to MLflow, as it takes one: by variables of this process. "user:password" is one too."""
    if not key:
        return lambda: None
    user, colon, password = key.strip().partition(":")
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    values = (user, password, None) if colon else (None, None, user)
    before = {name: os.environ.get(name) for name in names}
    for name, value in zip(names, values, strict=True):
        _put_back(name, value)

    def undo() -> None:
        for name, value in before.items():
            _put_back(name, value)

    return undo


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def autolog(options: Mapping[str, Any]) -> list[Undo]:
    """Turn on the autologging that was asked for. Gives what turns it off, where it was off."""
    if not options.get("autolog"):
        return []
    import mlflow
    from mlflow.utils.autologging_utils import autologging_is_disabled

    framework = options.get("framework")
    module = mlflow if framework is None else _framework(framework)
    given = {name: options[name] for name in ("log_models", "log_datasets") if options.get(name) is not None}
    was_off = autologging_is_disabled(framework or "mlflow")
    module.autolog(**given, **(options.get("autolog_kwargs") or {}))
    return [lambda: module.autolog(disable=True)] if was_off else []


def _framework(name: str) -> Any:
    module = importlib.import_module(f"mlflow.{name}")
    if not hasattr(module, "autolog"):
        raise ConfigError(f"framework={name!r}: mlflow.{name} has no autologging")
    return module


def without_autologging() -> Undo | None:
    """Turn autologging off where MLflow is loaded: without an active run, it would make one on each rank."""
    module: Any = sys.modules.get("mlflow.utils.autologging_utils")
    if module is None:
        return None
    before = module._AUTOLOGGING_GLOBALLY_DISABLED
    module._AUTOLOGGING_GLOBALLY_DISABLED = True
    return lambda: setattr(module, "_AUTOLOGGING_GLOBALLY_DISABLED", before)


def system_metrics(request: RunRequest, run_id: str, put: Callable[[Mapping[str, Any], int], None]) -> Any:
    """Start the monitor of this node, if it was asked for and this is the rank for it."""
    from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

    info, wanted = request.info, request.config.options.get("log_system_metrics")
    if wanted is None:
        wanted = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
    if not wanted or (info is not None and info.local_rank not in (0, None)):
        return None
    worker = None if info is None or info.worker_index is None else f"worker-{info.worker_index}"
    try:
        import psutil  # noqa: F401

        monitor = _monitor_class()(run_id, put, worker)
    except ImportError:
        logger.warning("MLflow: system metrics need psutil: pip install psutil")
        return None
    monitor.start()
    return monitor


def stop(monitor: Any) -> None:
    """Stop a monitor, without a wait for what it still does."""
    monitor._shutdown_event.set()
    if monitor._process is not None:
        monitor._process.join(_STOP_S)


@functools.lru_cache(maxsize=1)
def _monitor_class() -> Any:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    class Monitor(SystemMetricsMonitor):  # type: ignore[misc]
        """MLflow's monitor, which an outage does not end: its metrics go the way of all others."""

        def __init__(self, run_id: str, put: Callable[[Mapping[str, Any], int], None], node_id: str | None) -> None:
            super().__init__(run_id, node_id=node_id)
            self._put = put

        def monitor(self) -> None:
            sampled = 0
            self.collect_metrics()
            while not self._shutdown_event.wait(self.sampling_interval):
                self.collect_metrics()
                sampled += 1
                if sampled % self.samples_before_logging == 0:
                    self.publish_metrics(self.aggregate_metrics())

        def publish_metrics(self, metrics: Mapping[str, Any]) -> None:
            prefix = f"{self._metrics_prefix}{self.node_id}/" if self.node_id else self._metrics_prefix
            self._put({prefix + key: value for key, value in metrics.items()}, self._logging_step)
            self._logging_step += 1
            for monitor in self.monitors:
                monitor.clear_metrics()

    return Monitor


def metric_name(key: str) -> str:
    """The name of a metric as MLflow takes it."""
    name = re.sub(r"[^/\w.\- :]", "_", key)
    name = posixpath.normpath(name).lstrip("/").replace("../", "")
    return (name if name not in ("", ".", "..") else "_")[:_LONGEST_NAME]
