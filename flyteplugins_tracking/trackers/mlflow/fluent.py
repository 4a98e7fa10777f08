"""Have MLflow's own functions, `mlflow.log_metric` and autologging, log to our run while it is open."""

from __future__ import annotations

import functools
import logging
import os
import posixpath
import re
from collections.abc import Callable
from typing import Any

from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.mlflow import vendor

logger = logging.getLogger(__name__)

Undo = Callable[[], object]

_LONGEST_NAME = 250
# The longest wait for the monitor's last sample, in seconds.
_STOP_S = 2.0
_warn_once = WarnOnce(logger)
# The runs that are open here, each with the stack of active runs that has it. Only the decorator ends them.
_open: list[tuple[Any, list[Any]]] = []


def activate(run: Any, uri: str, experiment_id: str) -> Undo:
    """Make `run` the active run of this thread, with its server and experiment.

    Returns:
        A function that undoes that.
    """
    guard()
    undo = [_use_server(uri), vendor.use_experiment(experiment_id), _hide_variable()]
    stack = vendor.active_runs()
    entry = (run, stack)
    stack.append(run)
    _open.append(entry)

    def deactivate() -> None:
        _open.remove(entry)
        stack[:] = [other for other in stack if other is not run]
        for step in reversed(undo):
            step()

    return deactivate


@functools.lru_cache(maxsize=1)
def guard() -> None:
    """Keep MLflow's client from ending runs that are open here."""
    vendor.leave_end_to_us(_is_open)


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


def _use_server(uri: str) -> Undo:
    import mlflow

    before, variable = vendor.uri_set_by_program(), os.environ.get("MLFLOW_TRACKING_URI")
    if mlflow.get_tracking_uri() == uri:
        return lambda: None
    mlflow.set_tracking_uri(uri)

    def undo() -> None:
        if vendor.uri_set_by_program() == uri:
            mlflow.set_tracking_uri(before)
            _put_back("MLFLOW_TRACKING_URI", variable)

    return undo


def _hide_variable() -> Undo:
    """Hide MLFLOW_RUN_ID while the run is open: `mlflow.start_run(nested=True)` would resume that run."""
    value = os.environ.pop("MLFLOW_RUN_ID", None)
    return lambda: _put_back("MLFLOW_RUN_ID", value) if value is not None else None


def use_credentials(key: str | None) -> Undo:
    """Give the API key, or "user:password", to MLflow. It takes both by variables of this process."""
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


def system_metrics(request: RunRequest, run_id: str, *, is_resumed: bool) -> Undo:
    """Start the monitor of this node, if the user wants it and this rank runs it. Returns what stops it."""
    from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

    info, is_on = request.info, request.config.options.get("log_system_metrics")
    if is_on is None:
        is_on = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
    if not is_on or not request.leads_node:
        return lambda: None
    worker = None if info is None or info.worker_index is None else f"worker-{info.worker_index}"
    try:
        monitor = vendor.start_monitor(run_id, worker, is_resumed=is_resumed)
    except ImportError:
        logger.warning("MLflow: system metrics need psutil: pip install psutil")
        monitor = None
    # In an outage, its last request takes minutes.
    return lambda: None if monitor is None else run_with_timeout(_STOP_S, monitor.finish)


def metric_name(key: str) -> str:
    """Return the name of a metric as MLflow takes it."""
    name = re.sub(r"[^/\w.\- :]", "_", key)
    name = posixpath.normpath(name).lstrip("/").replace("../", "")
    return (name if name not in ("", ".", "..") else "_")[:_LONGEST_NAME]
