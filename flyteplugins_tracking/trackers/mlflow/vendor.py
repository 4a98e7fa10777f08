"""MLflow's client: its undocumented names, which no other module uses, and its store of runs.

`PARTS` lists each name with its use, and the feature that is lost without it. A `Service` is the store behind a
tracking URI: each of its calls is made once, and ends within the time that it has.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import quote

from flyteplugins_tracking._util.text import first_line, without_credentials
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.trackers.vendor_parts import Part, VendorParts

Undo = Callable[[], object]

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
    "mlflow==3.17.2",
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

# The longest time for a call for which nobody waits, in seconds. The end of a run waits longer for its rows.
_CALL_S = 20.0
_SHORTEST_S = 0.5
# The pause between two tries, in seconds.
_PAUSE_S = 0.25
# The HTTP status codes that another try may change.
_PASSING = frozenset({408, 425, 429})
# The error codes of MLflow that no other try can change.
_FINAL = frozenset(
    {
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
        "NOT_FOUND",
        "ENDPOINT_NOT_FOUND",
    }
)


class UnavailableError(Exception):
    """The server cannot be used now. It may answer later."""


class NoConnectionError(UnavailableError):
    """No server takes a connection. It may be starting."""


class UnauthorizedError(UnavailableError):
    """The server does not take the credentials. A token may be renewed."""


class RejectedError(Exception):
    """The server rejects a request, and would reject it again.

    Attributes:
        code: MLflow's error code.
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class Service:
    """The runs behind one tracking URI.

    Attributes:
        uri: The tracking URI.
        deadline: When calls must have ended, in seconds of `time.monotonic`; None if each call has its own limit.
        is_known: Whether an MLflow server has answered there before. A strange answer is then a proxy's, and passes.
    """

    def __init__(self, uri: str, deadline: float | None = None, *, is_known: bool = False) -> None:
        self.uri = uri
        self.is_known = is_known
        self.deadline = deadline
        # If nothing takes connections, the address is probably wrong: half of the time is enough.
        self._absent_until = None if deadline is None else (time.monotonic() + deadline) / 2
        self._store: Any = None
        self._present: dict[str, set[Any]] = {}  # the points that a directory has had, by their keys

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of MLflow's store of runs, once.

        Raises:
            UnavailableError: The call may succeed later.
            RejectedError: The call will never succeed.
        """
        return self._use(lambda store: getattr(store, method)(*args, **kwargs))

    def _use(self, action: Callable[[Any], Any]) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return action(self._opened())
        except MlflowException as error:
            if error.error_code in _FINAL:
                raise RejectedError(_first_line(error.message), error.error_code) from None
            self._present.clear()  # a part may have been written
            raise UnavailableError(_first_line(error.message)) from None
        except (UnavailableError, RejectedError, AttributeError, TypeError):
            raise
        except ValueError as error:  # the values cannot be put into a request
            raise RejectedError(f"{type(error).__name__}: {_first_line(str(error))}") from None
        except Exception as error:  # of a database that is locked, or whose tables another process is creating
            self._present.clear()
            raise UnavailableError(f"{type(error).__name__}: {_first_line(str(error))}") from None

    def missing(self, run_id: str, points: Sequence[Any]) -> Sequence[Any]:
        """Return the points that the store lacks, if it is a directory: it would keep both of two equal points.

        A process that was killed while it sent them may have written a part. A database keeps one of two equal points.

        Raises:
            UnavailableError: The call may succeed later.
            RejectedError: The call will never succeed.
        """
        if not self._use(keeps_equal_points):
            return points
        for key in {point.key for point in points}.difference(self._present):
            self._present[key] = {_value_of(point) for point in self.call("get_metric_history", run_id, key)}
        return [point for point in points if _value_of(point) not in self._present[point.key]]

    def persist(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the store again until it succeeds.

        Raises:
            UnavailableError: It has not succeeded before the deadline.
            RejectedError: It will never succeed.
        """
        return self.until(lambda: (self.call(method, *args, **kwargs),))[0]

    def until(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it returns a true value. Returns its last value at the deadline.

        Raises:
            UnavailableError: The deadline has passed, and the last attempt failed.
            UnauthorizedError: Immediately: no other key will come.
        """
        while True:
            try:
                result = attempt()
                if result or self._is_over():
                    return result
            except UnauthorizedError:
                raise
            except NoConnectionError:
                if self._is_over() or time.monotonic() > (self._absent_until or 0.0):
                    raise
            except UnavailableError:
                if self._is_over():
                    raise
            time.sleep(_PAUSE_S)

    def timeout_s(self) -> float:
        """Return the longest time for the next call."""
        configured_s = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _CALL_S)
        return (
            configured_s
            if self.deadline is None
            else max(_SHORTEST_S, min(configured_s, self.deadline - time.monotonic()))
        )

    def _is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() + _PAUSE_S > self.deadline

    def _opened(self) -> Any:
        if self._store is None:
            with alone_with(self.uri, self.deadline):
                self._store = _bounded_store(self)
        return self._store


def store_of(uri: str) -> Any:
    """Return MLflow's store of the runs behind a tracking URI, which its own functions use."""
    from mlflow.tracking._tracking_service.utils import _get_store

    return _get_store(uri)


def _bounded_store(service: Service) -> Any:
    """Return the service's store. If the runs are on a server, each call of it is one request.

    MLflow's own store tries 7 times, in about 4 minutes. Only variables of the whole process change that.
    """
    from mlflow.store.tracking.rest_store import RestStore

    store = store_of(service.uri)
    if not isinstance(store, RestStore):
        return store
    PARTS.require_of("rest_store", store)

    class Bounded(RestStore):  # type: ignore[misc]
        def _call_endpoint(self, api: Any, json_body: Any = None, *_: Any, **__: Any) -> Any:
            import json

            endpoint, method = _endpoints()[api]
            how = {"params" if method == "GET" else "json": None if json_body is None else json.loads(json_body)}
            return _request(service, api.Response(), self.get_host_creds(), endpoint, method, **how)

    return Bounded(store.get_host_creds)


@functools.lru_cache(maxsize=1)
def _endpoints() -> Mapping[Any, tuple[str, str]]:
    """Return the path and method of each request, by its class."""
    from mlflow.protos.service_pb2 import MlflowService
    from mlflow.utils.rest_utils import extract_api_info_for_service

    endpoints: Mapping[Any, tuple[str, str]] = extract_api_info_for_service(MlflowService, "/api/2.0")
    return endpoints


def _request(service: Service, message: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a request with these arguments, once. Returns MLflow's `message` with the answer."""
    from mlflow.exceptions import InvalidUrlException, MlflowException
    from mlflow.utils.rest_utils import http_request

    host = without_credentials(service.uri)
    try:
        response = http_request(*args, max_retries=0, timeout=service.timeout_s(), raise_on_status=False, **kwargs)
    except InvalidUrlException:
        raise RejectedError(f"{host} is not an address of a server: it must begin with https:// or http://") from None
    except MlflowException as error:  # its text has the address, and perhaps a password
        cause = type(error.__cause__ or error.__context__ or error).__name__
        kind = NoConnectionError if cause == "ConnectionError" else UnavailableError
        raise kind(f"{host} does not answer ({cause})") from None
    return _read(response, service, message)


def _read(response: Any, service: Service, message: Any) -> Any:
    from mlflow.exceptions import RestException
    from mlflow.utils.proto_json_utils import parse_dict

    host, status = without_credentials(service.uri), response.status_code
    if status in (401, 403):
        raise UnauthorizedError(f"{host} does not take the credentials (HTTP {status})")
    if status >= 500 or status in _PASSING:
        raise UnavailableError(f"{host} answers with HTTP {status}")
    try:
        answer = response.json()
        if status == 200:
            parse_dict(js_dict=answer, message=message)
            return message
    except ValueError:
        answer = None
    if not answer or not isinstance(answer, Mapping):
        kind = UnavailableError if service.is_known else RejectedError
        raise kind(f"{host} answers with HTTP {status}, but not as an MLflow server does: check the address")
    text, code = _first_line(str(answer.get("message"))), str(answer.get("error_code"))
    if code == "RESOURCE_DOES_NOT_EXIST":
        raise RestException({"error_code": code, "message": text})  # MLflow's store handles it where it may happen
    raise RejectedError(text, code)


def keeps_equal_points(store: Any) -> bool:
    """Whether this is a directory, which has a point twice that was sent twice. A database has it once."""
    module = sys.modules.get(_DIRECTORY.partition(":")[0])  # imported if there is such a store
    return module is not None and PARTS.has(_DIRECTORY) and isinstance(store, module.FileStore)


def _value_of(point: Any) -> tuple[int, int, str]:
    """Return what makes two points of a metric equal. NaN is equal to NaN here."""
    return point.step, point.timestamp, repr(float(point.value))


def _first_line(text: str) -> str:
    return first_line(text.strip() or "no reason given")[:500]


def entities(kind: str, values: Mapping[str, Any]) -> Sequence[Any]:
    """Return MLflow's objects for params ("Param") or tags ("RunTag")."""
    from mlflow import entities as vendors

    return [getattr(vendors, kind)(key, str(value)) for key, value in values.items()]


def flush_own_rows(uri: str, timeout_s: float) -> bool:
    """Have MLflow send the rows of its own asynchronous logging. Returns whether it did so in time."""
    store = store_of(uri)
    queue = getattr(store, "_async_logging_queue", None)
    is_idle = getattr(queue, "is_idle", lambda: False)  # from 2.13 on
    if queue is None or is_idle():  # not every store has one
        return True
    if not PARTS.has("vendors_store.flush_async_logging", store):
        return True

    def flush() -> None:
        with suppress(Exception):
            store.flush_async_logging()

    return run_with_timeout(timeout_s, flush)


def next_step(run: Any) -> int:
    """Return the step after the run's last one."""
    steps = [metric.step for metric in run.data._metric_objs] if PARTS.has("data._metric_objs", run.data) else []
    return max(steps, default=-1) + 1


def tags_of_start_run(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that `mlflow.start_run` gives a run: `tags`, the user, and where the code is."""
    if not PARTS.has("mlflow.tracking.context.registry:resolve_tags"):
        return dict(tags)
    from mlflow.tracking.context.registry import resolve_tags

    return dict(resolve_tags(dict(tags)))


# Stores that are a SQLite file. The first client creates the tables; two clients at once break them.

_SCHEME = "sqlite:///"
_LOCK_PAUSE_S = 0.1
# How long another process is waited for that makes the tables: it may be stopped.
_LONGEST_S = 60.0


@contextmanager
def alone_with(uri: str, deadline: float | None) -> Iterator[None]:
    """Keep other ranks of this machine from opening the same file in the block. They find the tables after it.

    Args:
        uri: The tracking URI. For anything but a SQLite file, there is no lock.
        deadline: When the block runs without the lock, in seconds of `time.monotonic`; None for a minute from now.
    """
    from flyteplugins_tracking._util.lock import RunLock

    claim, until = None, time.monotonic() + _LONGEST_S if deadline is None else deadline
    while uri.startswith(_SCHEME) and claim is None and time.monotonic() < until:
        claim = RunLock.acquire(f"mlflow-tables/{os.path.abspath(_path(uri))}")
        if claim is None:
            time.sleep(_LOCK_PAUSE_S)
    try:
        yield
    finally:
        if claim is not None:
            claim.release()


def await_first_run(options: Mapping[str, Any], timeout_s: float) -> None:
    """Wait until the rank with a run has created it, and with it the tables of a SQLite file.

    A rank without a run calls this: its function may use MLflow immediately, as Lightning's logger does. MLflow is not
    imported here.
    """
    mlflow = sys.modules.get("mlflow")
    uri = str(
        options.get("tracking_uri")
        or (mlflow.get_tracking_uri() if mlflow else os.environ.get("MLFLOW_TRACKING_URI", ""))
    )
    until = time.monotonic() + timeout_s
    while uri.startswith(_SCHEME) and not _has_runs(_path(uri)) and time.monotonic() < until:
        time.sleep(_LOCK_PAUSE_S)


def _path(uri: str) -> str:
    return uri.removeprefix(_SCHEME).partition("?")[0]


def _has_runs(path: str) -> bool:
    import sqlite3  # a rank without a run on a server does not need it

    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=_LOCK_PAUSE_S)) as store:
            return store.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is not None
    except sqlite3.Error:  # no file, no table, or another process writes
        return False


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

    stack: Any = fluent._active_run_stack
    runs: list[Any] = stack if isinstance(stack, list) else stack.get()  # before 2.18, one for all threads
    return runs


@functools.lru_cache(maxsize=1)
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
