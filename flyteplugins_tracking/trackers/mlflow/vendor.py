"""The undocumented names of MLflow. No other module uses them.

`PARTS` lists each name with its use, and the feature that is lost without it. The functions below it use them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.trackers.vendor_parts import Part, VendorParts

Undo = Callable[[], object]
# Sends one request: credentials, endpoint, method, body, message for the answer.
Send = Callable[[Any, str, str, "Mapping[str, Any] | None", Any], Any]

_FLUENT = "mlflow.tracking.fluent"
_UTILS = "mlflow.tracking._tracking_service.utils"
_REST = "mlflow.utils.rest_utils"
_STORE = "mlflow.store.tracking.rest_store:RestStore"
_AUTOLOGGING = "mlflow.utils.autologging_utils"
_MONITOR = "mlflow.system_metrics.system_metrics_monitor:SystemMetricsMonitor"
_NESTED = "the experiment of runs that the function nests in this one"
_DIRECTORY = "mlflow.store.tracking.file_store:FileStore"
_ASYNC = "rows of MLflow's own asynchronous logging that are not sent when the run ends"
PARTS = VendorParts(
    "MLflow",
    "mlflow-skinny>=3.1,<3.18",
    [
        Part(f"{_UTILS}:_get_store", "gives the store of runs behind a tracking URI"),
        Part(f"{_STORE}._call_endpoint", "sends a request once and in time: MLflow tries for 4 minutes"),
        Part("rest_store.get_host_creds", "gives the credentials for a server"),
        Part(f"{_REST}:extract_api_info_for_service", "gives the paths of MLflow's API"),
        Part(f"{_REST}:http_request", "sends a request with the user's settings"),
        Part(
            _DIRECTORY, "is the store in a directory", "equal points in a directory: a killed process leaves some twice"
        ),
        Part("mlflow.protos.service_pb2:MlflowService", "gives the paths of MLflow's API"),
        Part("mlflow.utils.proto_json_utils:parse_dict", "reads an answer"),
        Part("mlflow.tracking.client:MlflowClient.set_terminated", "is where frameworks would end our run"),
        Part(
            f"{_FLUENT}:_active_run_stack",
            "makes our run the active one",
            "mlflow.active_run() and mlflow.log_metric()",
        ),
        Part(f"{_FLUENT}:_active_experiment_id", "is the experiment of nested runs", _NESTED),
        Part(
            f"{_UTILS}:_tracking_uri",
            "says whether the program has set the server",
            "the program's server in other tasks",
        ),
        Part(
            "data._metric_objs", "gives the last step of a resumed run", "the steps of a resumed run: they begin at 0"
        ),
        Part(
            "mlflow.tracking.context.registry:resolve_tags", "gives tags as mlflow.start_run does", "tags of the source"
        ),
        Part(
            f"{_AUTOLOGGING}:_AUTOLOGGING_GLOBALLY_DISABLED",
            "stops autologging",
            "no autologging on ranks without a run",
        ),
        Part("vendors_store._async_logging_queue", "says whether MLflow still sends", _ASYNC),
        Part("vendors_store.flush_async_logging", "has MLflow send its own rows", _ASYNC),
        Part(_MONITOR, "measures the system", "metrics of the system"),
    ],
)


# The store of runs.


def store_of(uri: str) -> Any:
    """Return MLflow's store of the runs behind a tracking URI, which its own functions use."""
    from mlflow.tracking._tracking_service.utils import _get_store

    return _get_store(uri)


def bounded_store(uri: str, send: Send) -> Any:
    """Return a store like `store_of`. If the runs are on a server, each request is one call of `send`.

    MLflow's own store tries 7 times, in about 4 minutes. Only variables of the whole process change that.
    """
    from mlflow.store.tracking.rest_store import RestStore

    store = store_of(uri)
    if not isinstance(store, RestStore):
        return store
    PARTS.require_of("rest_store", store)

    class Bounded(RestStore):  # type: ignore[misc]
        def _call_endpoint(self, api: Any, json_body: Any = None, *_: Any, **__: Any) -> Any:
            import json

            endpoint, method = _endpoints()[api]
            body = None if json_body is None else json.loads(json_body)
            return send(self.get_host_creds(), endpoint, method, body, api.Response())

    return Bounded(store.get_host_creds)


def keeps_equal_points(store: Any) -> bool:
    """Whether this is a directory, which has a point twice that was sent twice. A database has it once."""
    module = sys.modules.get(_DIRECTORY.partition(":")[0])  # imported if there is such a store
    return module is not None and PARTS.has(_DIRECTORY) and isinstance(store, module.FileStore)


@functools.lru_cache(maxsize=1)
def _endpoints() -> Mapping[Any, tuple[str, str]]:
    """Return the path and method of each request, by its class."""
    from mlflow.protos.service_pb2 import MlflowService
    from mlflow.utils.rest_utils import extract_api_info_for_service

    endpoints: Mapping[Any, tuple[str, str]] = extract_api_info_for_service(MlflowService, "/api/2.0")
    return endpoints


def send_once(credentials: Any, endpoint: str, method: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
    """Send one request. Returns the answer, also for an error of the server."""
    from mlflow.utils.rest_utils import http_request

    how = {"params" if method == "GET" else "json": body}
    return http_request(credentials, endpoint, method, max_retries=0, timeout=timeout_s, raise_on_status=False, **how)


def read_answer(answer: Mapping[str, Any], message: Any) -> None:
    """Fill MLflow's `message` from the JSON of an answer."""
    from mlflow.utils.proto_json_utils import parse_dict

    parse_dict(js_dict=answer, message=message)


def own_rows_are_sent(store: Any) -> bool:
    """Whether MLflow's queue for asynchronous logging is empty."""
    if getattr(store, "_async_logging_queue", None) is None:  # not every store has one
        return True
    return bool(store._async_logging_queue.is_idle()) or not PARTS.has("vendors_store.flush_async_logging", store)


def send_own_rows(store: Any) -> None:
    """Wait until MLflow has sent the rows of its own asynchronous logging."""
    store.flush_async_logging()


def tags_of_start_run(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that `mlflow.start_run` gives a run: `tags`, the user, and where the code is."""
    if not PARTS.has("mlflow.tracking.context.registry:resolve_tags"):
        return dict(tags)
    from mlflow.tracking.context.registry import resolve_tags

    return dict(resolve_tags(dict(tags)))


def last_steps(run: Any) -> list[int]:
    """Return the last step of each metric."""
    if not PARTS.has("data._metric_objs", run.data):
        return []
    return [metric.step for metric in run.data._metric_objs]


# MLflow's own functions in this process.


def uri_set_by_program() -> str | None:
    """Return the URI of `mlflow.set_tracking_uri`; None if the program has not called it."""
    if not PARTS.has(f"{_UTILS}:_tracking_uri"):
        return None
    from mlflow.tracking._tracking_service import utils

    uri: str | None = utils._tracking_uri
    return uri


def active_experiment_id() -> str | None:
    """Return the experiment of `mlflow.set_experiment`; None if the program has not called it."""
    if not PARTS.has(f"{_FLUENT}:_active_experiment_id"):
        return None
    from mlflow.tracking import fluent

    experiment_id: str | None = fluent._active_experiment_id
    return experiment_id


def use_experiment(experiment_id: str) -> Undo:
    """Have the runs that the function nests be in this experiment, not in the default one."""
    if not PARTS.has(f"{_FLUENT}:_active_experiment_id"):
        return lambda: None
    from mlflow.tracking import fluent

    before = fluent._active_experiment_id
    fluent._active_experiment_id = experiment_id

    def undo() -> None:
        if fluent._active_experiment_id == experiment_id:
            fluent._active_experiment_id = before

    return undo


def active_runs() -> list[Any]:
    """Return this thread's stack of active runs; one that nobody reads if MLflow's is not known."""
    if not PARTS.has(f"{_FLUENT}:_active_run_stack"):
        return []
    from mlflow.tracking import fluent

    stack: list[Any] = fluent._active_run_stack.get()
    return stack


def leave_end_to_us(is_ours: Callable[[str], bool]) -> None:
    """Have MLflow's client leave the status of our open runs: frameworks and `mlflow.end_run` set it."""
    from mlflow import MlflowClient

    original = MlflowClient.set_terminated

    @functools.wraps(original)
    def set_terminated(self: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
        return None if is_ours(run_id) else original(self, run_id, *args, **kwargs)

    MlflowClient.set_terminated = set_terminated


# Autologging.


def without_autologging() -> Undo | None:
    """Turn autologging off if MLflow is loaded: without an active run, it would make one on each rank."""
    module: Any = sys.modules.get(_AUTOLOGGING)
    if module is None or not PARTS.has(f"{_AUTOLOGGING}:_AUTOLOGGING_GLOBALLY_DISABLED"):
        return None
    before = module._AUTOLOGGING_GLOBALLY_DISABLED
    module._AUTOLOGGING_GLOBALLY_DISABLED = True
    return lambda: setattr(module, "_AUTOLOGGING_GLOBALLY_DISABLED", before)


# Metrics of the system.


def start_monitor(run_id: str, node_id: str | None, *, is_resumed: bool) -> Any:
    """Start MLflow's monitor of this machine, as `mlflow.start_run` does. Returns None if there is none.

    Raises:
        ImportError: psutil is not installed.
    """
    if not PARTS.has(_MONITOR):
        return None
    import psutil  # noqa: F401
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, resume_logging=is_resumed, node_id=node_id)
    monitor.start()
    return monitor
