"""MLflow's client: its undocumented names, which no other module uses, and the runs behind a tracking URI."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import quote

from flyteplugins_tracking._util.modules import replace_function, when_loaded
from flyteplugins_tracking._util.text import first_line, without_credentials
from flyteplugins_tracking._util.threads import call_within, wait_until
from flyteplugins_tracking.trackers import outbox
from flyteplugins_tracking.trackers.idle import IDLE, tell_row, undo_later
from flyteplugins_tracking.trackers.vendor_parts import VendorParts

T = TypeVar("T")
Undo = Callable[[], object]

PARTS = VendorParts("MLflow", "mlflow", "mlflow==3.17.2")


def require() -> None:
    """Look up the names without which no run can be opened.

    Raises:
        TrackerNotInstalledError: The installed version lacks one of them.
    """
    PARTS.require("mlflow.tracking._tracking_service.utils", "_get_store")
    PARTS.require("mlflow.utils.rest_utils", "http_request")


# The runs behind a tracking URI.

# https://mlflow.org/docs/latest/rest-api.html. The client's other requests, such as for the server's version, may fail.
_API = "/api/2.0/mlflow/"
# The longest time for a call for which nobody waits, in seconds. The end of a run waits longer for its rows.
_CALL_S = 20.0
_SHORTEST_S = 0.5
# MLflow's error codes for credentials, and those that no other try can change. What exists already, another rank has
# just created.
_UNAUTHORIZED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_FINAL = (
    *("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "MALFORMED_REQUEST"),
    *("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "ENDPOINT_NOT_FOUND"),
)


class UnavailableError(outbox.AwayError):
    """The server cannot be used now. It may answer later, or take another key."""

    fix = (
        "Check tracking_uri= or MLFLOW_TRACKING_URI, the network, and the key: secret= of tracking_init, "
        "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
    )


class RejectedError(outbox.RejectedError):
    """The server rejects a request, and would reject it again."""

    fix = "Check tracking_uri=, experiment_id= and the MLFLOW_* variables."


class Service:
    """The runs behind one tracking URI: on a server, or in a database or directory of this machine.

    All calls go through MLflow's client, in a thread, with a time limit. By itself the client tries each request for
    minutes; and a request that nobody waits for any more could then change a tag back that has a newer value by now.
    So it tries those of this class once.

    Attributes:
        uri: The tracking URI.
        host: The tracking URI in messages.
        deadline: When calls must have ended, in seconds of `time.monotonic`; None if each call has its own limit.
        is_known: Whether an MLflow server has answered there before. A strange answer is then a proxy's, and passes.
        creates: Whether it was asked to create a run.
    """

    def __init__(self, uri: str, deadline: float | None = None, *, is_known: bool = False) -> None:
        self.uri, self.host = uri, without_credentials(uri)
        self.is_known = is_known
        self.creates = False
        self.deadline = deadline
        self._client: Any = None

    def ask(self, function: Callable[[Any], T]) -> T:
        """Return what a function does with MLflow's client, in time.

        Raises:
            UnavailableError: The call may succeed later.
            RejectedError: The call will never succeed.
        """

        def call() -> T:
            _asking.set(self)  # in the context of its thread
            return function(self._open())

        try:
            return call_within(self.timeout_s(), call)
        except Exception as error:
            raise self._translated(error) from None

    def persist(self, function: Callable[[Any], T]) -> T:
        """As `ask`, again until it succeeds, at most until the deadline."""
        (result,) = self.until(lambda: (self.ask(function),))
        return result

    def until(self, action: Callable[[], T]) -> T:
        """As `outbox.until` with this deadline; once if there is none."""
        return outbox.until(self.deadline or 0.0, action)

    def set_status(self, run_id: str, status: str) -> None:
        """End a run now, again until that succeeds, at most until the deadline.

        Raises:
            UnavailableError: It has not succeeded before the deadline.
            RejectedError: It will never succeed.
        """
        from mlflow.entities import RunStatus
        from mlflow.tracking._tracking_service.utils import _get_store

        values = (RunStatus.from_string(status), time.time_ns() // 1_000_000, None)
        # Not by the client's own `set_terminated`, which first asks for the run and prints its address.
        self.persist(lambda _: _get_store(self.uri).update_run_info(run_id, *values))

    def timeout_s(self) -> float:
        """Return the longest time for the next call."""
        longest_s = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _CALL_S)
        return (
            longest_s if self.deadline is None else max(_SHORTEST_S, min(longest_s, self.deadline - time.monotonic()))
        )

    def _open(self) -> Any:
        from mlflow import MlflowClient

        if self._client is None:
            _try_once()
            with alone_with(self.uri, self.deadline):
                self._client = MlflowClient(self.uri)
        return self._client

    def request(self, send: Callable[[], Any]) -> Any:
        """Send a request of the client's. Returns the answer, if it is one of an MLflow server."""
        from mlflow.exceptions import MlflowException

        try:
            response = send()
        except MlflowException as error:  # its text has the address, and perhaps a password
            cause = type(error.__cause__ or error.__context__ or error).__name__
            raise UnavailableError(f"{self.host} does not answer ({cause})") from None
        status = response.status_code
        if status in (401, 403):
            raise UnavailableError(f"{self.host} does not take the credentials (HTTP {status})", is_outage=False)
        if outbox.may_pass(status):
            raise UnavailableError(f"{self.host} answers with HTTP {status}")
        try:
            is_mlflows = isinstance(answer := response.json(), dict) and (status == 200 or "error_code" in answer)
        except ValueError:
            is_mlflows = False
        if not is_mlflows:
            kind = UnavailableError if self.is_known else RejectedError
            raise kind(f"{self.host} answers with HTTP {status}, but not as an MLflow server does: check the address")
        return response

    def _translated(self, error: Exception) -> Exception:
        """Return what to raise for an error of MLflow's client."""
        from mlflow.exceptions import MlflowException

        if isinstance(error, (outbox.AwayError, outbox.RejectedError, AttributeError, TypeError)):
            return error
        if isinstance(error, TimeoutError):
            return UnavailableError(f"{self.host} does not answer")
        if isinstance(error, MlflowException):
            code, text = error.error_code, _first_line(error.message)
            if code in _UNAUTHORIZED:
                return UnavailableError(text, is_outage=False)
            return RejectedError(text) if code in _FINAL else UnavailableError(text)
        text = f"{type(error).__name__}: {_first_line(str(error))}"
        # Values that cannot be put into a request; or a database that is locked, or whose tables are being created.
        return RejectedError(text) if isinstance(error, ValueError) else UnavailableError(text)


# The service whose call this is; None for calls of the function's and of frameworks.
_asking: ContextVar[Service | None] = ContextVar("flyteplugins_tracking.mlflow", default=None)


@functools.lru_cache(maxsize=1)
def _try_once() -> None:
    """Have MLflow's client send each request of a `Service` once, within its time."""
    from mlflow.utils import rest_utils

    original = rest_utils.http_request

    @functools.wraps(original)
    def http_request(*args: Any, **kwargs: Any) -> Any:
        service = _asking.get()
        if service is None or not str(kwargs.get("endpoint")).startswith(_API):
            return original(*args, **kwargs)
        once = {**kwargs, "max_retries": 0, "raise_on_status": False, "timeout": service.timeout_s()}
        return service.request(lambda: original(*args, **once))

    replace_function(original, http_request)


def run_tags(tags: Mapping[str, str]) -> list[Any]:
    """Return tags as MLflow's client takes them."""
    from mlflow.entities import RunTag

    return [RunTag(*tag) for tag in tags.items()]


def last_step(run: Any) -> int:
    """Return the run's last step; -1 if it has none."""
    with PARTS.optional("the steps of a resumed run begin at 0"):
        metrics = run.data._metric_objs
        return max((metric.step for metric in metrics), default=-1)
    return -1


def last_at(run: Any) -> float:
    """Return when the run's last row was logged, in seconds since the epoch; 0 if it has none."""
    with PARTS.optional("an earlier attempt that is sent later gives the run its own end"):
        return max((metric.timestamp / 1000 for metric in run.data._metric_objs), default=0.0)
    return 0.0


def _first_line(text: str) -> str:
    return first_line(text.strip() or "no reason given")[:500]


def flush_own_rows() -> None:
    """Have MLflow send the rows of its own asynchronous logging."""
    from mlflow import flush_async_logging

    with suppress(Exception):  # of a version that flushes active queues only
        flush_async_logging()


def tags_of_start_run(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that `mlflow.start_run` gives a run: `tags`, the user, and where the code is."""
    with PARTS.optional("runs have no tags of their source"):
        from mlflow.tracking.context.registry import resolve_tags

        return dict(resolve_tags(dict(tags)))
    return dict(tags)


# Stores that are a SQLite file. The first client creates the tables; two clients at the same time break them.

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
    if uri.startswith(_SCHEME):
        wait_until(lambda: _has_runs(_path(uri)), timeout_s, _LOCK_PAUSE_S)


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
    with PARTS.optional("tasks in other processes do not get the server of mlflow.set_tracking_uri"):
        from mlflow.tracking._tracking_service.utils import _tracking_uri

        uri: str | None = _tracking_uri
        return uri
    return None


def active_experiment_id() -> str | None:
    """Return the experiment of `mlflow.set_experiment`; None if the program has not called it."""
    with PARTS.optional("the experiment of mlflow.set_experiment is not used"):
        from mlflow.tracking.fluent import _active_experiment_id

        experiment_id: str | None = _active_experiment_id
        return experiment_id
    return None


def use_experiment(experiment_id: str) -> Undo:
    """Have the runs that the function nests be in this experiment, not in the default one."""
    from mlflow.tracking import fluent

    before = active_experiment_id()
    fluent._active_experiment_id = experiment_id

    def undo() -> None:
        if fluent._active_experiment_id == experiment_id:
            fluent._active_experiment_id = before

    return undo


def active_runs() -> list[Any]:
    """Return this thread's stack of active runs; one that nobody reads if MLflow's is not known."""
    with PARTS.optional("mlflow.active_run() and mlflow.log_metric() do not use the run"):
        from mlflow.tracking.fluent import _active_run_stack as stack

        runs: list[Any] = stack if isinstance(stack, list) else stack.get()  # before 2.18, one for all threads
        return runs
    return []


def set_last_active_run(run_id: str) -> None:
    """Have `mlflow.last_active_run()` of this thread return this run, which has ended."""
    with PARTS.optional("mlflow.last_active_run() does not return the run when its function has ended"):
        from mlflow.tracking import fluent

        if hasattr(fluent._last_active_run_id, "set"):
            fluent._last_active_run_id.set(run_id)
        else:  # of old versions, one for all threads
            fluent._last_active_run_id = run_id


@functools.lru_cache(maxsize=1)
def leave_end_to_us(is_ours: Callable[[str, str], bool]) -> None:
    """Have MLflow's client leave the status of the library's open runs: frameworks and `mlflow.end_run` set it."""
    from mlflow import MlflowClient

    original = MlflowClient.set_terminated

    @functools.wraps(original)
    def set_terminated(self: Any, run_id: str, status: Any = None, *args: Any, **kwargs: Any) -> Any:
        return None if is_ours(run_id, str(status)) else original(self, run_id, status, *args, **kwargs)

    MlflowClient.set_terminated = set_terminated


@functools.lru_cache(maxsize=1)
def replace_params(accepted: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Have MLflow's client log the params of a run that are `accepted`: `mlflow.log_params` calls it too."""
    from mlflow import MlflowClient

    log_param, log_batch = MlflowClient.log_param, MlflowClient.log_batch

    @functools.wraps(log_param)
    def one(self: Any, run_id: str, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        taken = accepted(run_id, {key: value})[key]
        result = log_param(self, run_id, key, taken, *args, **kwargs)
        return value if result is taken else result

    @functools.wraps(log_batch)
    def batch(self: Any, run_id: str, metrics: Any = (), params: Any = (), *args: Any, **kwargs: Any) -> Any:
        if params and _asking.get() is None:
            taken = accepted(run_id, {param.key: param.value for param in params})
            params = [type(param)(param.key, taken[param.key]) for param in params]
        return log_batch(self, run_id, metrics, params, *args, **kwargs)

    MlflowClient.log_param, MlflowClient.log_batch = one, batch


@functools.lru_cache(maxsize=1)
def _idle_run() -> Any:
    """Return the run that does nothing, and have the client leave out the calls for it."""
    from mlflow import ActiveRun, MlflowClient
    from mlflow.entities import Run, RunData, RunInfo

    of_info = {"experiment_id": "0", "user_id": "", "status": "RUNNING", "start_time": 0, "end_time": None}
    run = ActiveRun(Run(RunInfo(IDLE, **of_info, lifecycle_stage="active", run_name=IDLE), RunData()))

    def without_idle(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if IDLE not in (*args[:1], kwargs.get("run_id")):
                return method(self, *args, **kwargs)
            if method.__name__.startswith("log_"):
                tell_row("mlflow", "MLflow")
            is_list = method.__name__.startswith(("list_", "get_metric_history"))
            return run if method.__name__ == "get_run" else [] if is_list else None

        return call

    for name, method in inspect.getmembers(MlflowClient, inspect.isfunction):
        if list(inspect.signature(method).parameters)[1:2] == ["run_id"]:
            setattr(MlflowClient, name, without_idle(method))
    return run


def start_idle_run() -> Any:
    """Make the run that does nothing the active one, as `mlflow.start_run` does, and return it."""
    active_runs().append(_idle_run())
    undo_later("mlflow", _remove_idle_runs)
    return _idle_run()


def _remove_idle_runs() -> None:
    active_runs()[:] = [run for run in active_runs() if run.info.run_id != IDLE]


# Autologging.

_AUTOLOGGING = "mlflow.utils.autologging_utils"


def without_autologging() -> Undo:
    """Keep autologging off, also if MLflow is loaded later: without an active run, it would make one on each rank."""
    before: list[tuple[Any, bool]] = []

    def turn_off() -> None:
        with PARTS.optional("autologging is not turned off on ranks without a run"):
            module: Any = sys.modules[_AUTOLOGGING]
            before.append((module, module._AUTOLOGGING_GLOBALLY_DISABLED))
            module._AUTOLOGGING_GLOBALLY_DISABLED = True

    forget = when_loaded(_AUTOLOGGING, turn_off)

    def undo() -> None:
        forget()
        for module, value in reversed(before):
            module._AUTOLOGGING_GLOBALLY_DISABLED = value

    return undo


# Metrics of the system.


def start_monitor(run_id: str, node_id: str | None, *, is_resumed: bool) -> Any:
    """Start MLflow's monitor of this machine, as `mlflow.start_run` does. Returns None if there is none."""
    with PARTS.optional("there are no metrics of the system, which also need psutil (pip install psutil)"):
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        of_node = {"node_id": node_id} if node_id is not None else {}
        if of_node and "node_id" not in inspect.signature(SystemMetricsMonitor).parameters:  # before 2.11
            PARTS.lose("metrics of the system do not say which node they are of", "no node_id")
            of_node = {}
        monitor = SystemMetricsMonitor(run_id, resume_logging=is_resumed, **of_node)
        monitor.start()
        return monitor
    return None
