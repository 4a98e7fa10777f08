"""MLflow's client: its undocumented names, which no other module uses, and the runs behind a tracking URI."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from flyteplugins_tracking._util.text import first_line, without_credentials
from flyteplugins_tracking._util.threads import call_within, run_while
from flyteplugins_tracking.trackers import outbox
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

# https://mlflow.org/docs/latest/rest-api.html
_API = "/api/2.0/mlflow"
# How many values one request may have: https://mlflow.org/docs/latest/rest-api.html#request-limits
MOST_METRICS, MOST_PARAMS = 1000, 100
# The longest time for a request for which nobody waits, in seconds. The end of a run waits longer for its rows.
_CALL_S = 20.0
_SHORTEST_S = 0.5
# MLflow's error codes for credentials, and those that no other try can change.
_UNAUTHORIZED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_FINAL = (
    *("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "MALFORMED_REQUEST", "RESOURCE_ALREADY_EXISTS"),
    *("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "ENDPOINT_NOT_FOUND"),
)


class UnavailableError(outbox.AwayError):
    """The server cannot be used now. It may answer later."""

    fix = "Check tracking_uri= or MLFLOW_TRACKING_URI, and the network."


class UnauthorizedError(UnavailableError):
    """The server does not take the credentials. A token may be renewed."""

    fix = (
        "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; or pass secret= to "
        "tracking_init."
    )
    patience = 0.0  # no other key will come
    is_outage = False


class RejectedError(outbox.RejectedError):
    """The server rejects a request, and would reject it again.

    Attributes:
        code: MLflow's error code.
    """

    fix = "Check tracking_uri=, experiment_id= and the MLFLOW_* variables."

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class Point(NamedTuple):
    """A value of a metric. Of two equal ones, MLflow keeps one."""

    key: str
    value: float
    timestamp: int
    step: int


class Service:
    """The runs behind one tracking URI: on a server, or in a database or directory of this machine.

    A run is found and created with MLflow's client, and logged to with the REST API of the server, if there is one: the
    client would try for minutes.

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
        self._opened: tuple[Any, Callable[[], Any] | None] | None = None
        self._present: dict[str, set[Any]] = {}  # the points that a directory has, by their keys

    def ask(self, function: Callable[[Any], T]) -> T:
        """Return what a function does with MLflow's client, in time.

        Raises:
            UnavailableError: The call may succeed later.
            RejectedError: The call will never succeed.
        """
        try:
            # Not in this thread: the client tries again for minutes if the server goes away now.
            return call_within(self.timeout_s(), lambda: function(self._open()[0]))
        except Exception as error:
            raise self._translated(error) from None

    def persist(self, function: Callable[[Any], T]) -> T:
        """As `ask`, again until it succeeds, at most until the deadline."""
        (result,) = self.until(lambda: (self.ask(function),))
        return result

    def until(self, action: Callable[[], T]) -> T:
        """As `outbox.until` with this deadline; once if there is none."""
        return outbox.until(self.deadline or 0.0, action)

    def await_server(self) -> None:
        """Wait until the server answers, if there is one. The client would not say in time why it does not."""

        def answers() -> bool:
            try:
                self._change("GET", "experiments/get", experiment_id="0")
            except RejectedError as error:
                if not error.code:  # not of MLflow
                    raise
            return True

        self.until(answers)

    def log(self, run_id: str, points: Sequence[Point] = (), **values: Mapping[str, str]) -> None:
        """Log points, `params` and `tags`, once.

        Raises:
            UnavailableError: The call may succeed later.
            RejectedError: The call will never succeed.
        """
        pairs = {kind: [{"key": key, "value": value} for key, value in of.items()] for kind, of in values.items()}
        metrics = [{**point._asdict(), "value": _number(point.value)} for point in points]
        if not self._change("POST", "runs/log-batch", run_id=run_id, metrics=metrics, **pairs):
            self.ask(lambda client: self._log_to_files(client, run_id, points, values))

    def set_status(self, run_id: str, status: str) -> None:
        """End a run now, again until that succeeds, at most until the deadline.

        Raises:
            UnavailableError: It has not succeeded before the deadline.
            RejectedError: It will never succeed.
        """
        end_ms = time.time_ns() // 1_000_000

        def once() -> bool:
            if not self._change("POST", "runs/update", run_id=run_id, status=status, end_time=end_ms):
                self.ask(lambda client: _set_terminated(client)(client, run_id, status, end_ms))
            return True

        self.until(once)

    def timeout_s(self) -> float:
        """Return the longest time for the next call."""
        longest_s = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _CALL_S)
        return (
            longest_s if self.deadline is None else max(_SHORTEST_S, min(longest_s, self.deadline - time.monotonic()))
        )

    def _open(self) -> tuple[Any, Callable[[], Any] | None]:
        """Return MLflow's client, and what gives the credentials for the server; None without a server."""
        from mlflow import MlflowClient
        from mlflow.tracking._tracking_service.utils import _get_store

        if self._opened is None:
            with alone_with(self.uri, self.deadline):
                self._opened = MlflowClient(self.uri), getattr(_get_store(self.uri), "get_host_creds", None)
        return self._opened

    def _change(self, method: str, path: str, **values: Any) -> bool:
        """Send a request to the server, once. Returns False if there is none."""
        from mlflow.exceptions import InvalidUrlException, MlflowException
        from mlflow.utils.rest_utils import http_request

        try:
            json.dumps(values, ensure_ascii=False).encode()  # a server may answer HTTP 500 to half of a surrogate
            _, host_creds = self._open()
            if host_creds is None:
                return False
            how: dict[str, Any] = {"params" if method == "GET" else "json": values, "timeout": self.timeout_s()}
            response = http_request(host_creds(), f"{_API}/{path}", method, max_retries=0, raise_on_status=False, **how)
        except InvalidUrlException:
            text = f"{self.host} is not an address of a server: it must begin with https:// or http://"
            raise RejectedError(text) from None
        except MlflowException as error:  # its text has the address, and perhaps a password
            cause = type(error.__cause__ or error.__context__ or error).__name__
            # If nothing takes connections, the address is probably wrong: half of the time is enough.
            raise UnavailableError(
                f"{self.host} does not answer ({cause})", 0.5 if cause == "ConnectionError" else 1.0
            ) from None
        except Exception as error:
            raise self._translated(error) from None
        self._check(response)
        return True

    def _check(self, response: Any) -> None:
        status = response.status_code
        if status in (401, 403):
            raise UnauthorizedError(f"{self.host} does not take the credentials (HTTP {status})")
        if outbox.may_pass(status):
            raise UnavailableError(f"{self.host} answers with HTTP {status}")
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping) or (status != 200 and "error_code" not in answer):
            kind = UnavailableError if self.is_known else RejectedError
            raise kind(f"{self.host} answers with HTTP {status}, but not as an MLflow server does: check the address")
        if status != 200:
            raise RejectedError(_first_line(str(answer.get("message"))), str(answer.get("error_code")))

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
                return UnauthorizedError(text)
            return RejectedError(text, code) if code in _FINAL else UnavailableError(text)
        text = f"{type(error).__name__}: {_first_line(str(error))}"
        # Values that cannot be put into a request; or a database that is locked, or whose tables are being created.
        return RejectedError(text) if isinstance(error, ValueError) else UnavailableError(text)

    def _log_to_files(
        self, client: Any, run_id: str, points: Sequence[Point], values: Mapping[str, Mapping[str, str]]
    ) -> None:
        from mlflow.entities import Metric, Param

        try:
            client.log_batch(
                run_id,
                [Metric(*point) for point in self._missing(client, run_id, points)],
                [Param(*param) for param in values.get("params", {}).items()],
                run_tags(values.get("tags", {})),
                synchronous=True,
            )
        except Exception:
            self._present.clear()  # a part may have been written
            raise

    def _missing(self, client: Any, run_id: str, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points that are not there yet. A directory would keep both of two equal ones.

        A process that was killed while it sent them may have written a part. A database keeps one of two equal points.
        """
        if urlsplit(self.uri).scheme not in ("", "file"):
            return points
        for key in {point.key for point in points}.difference(self._present):
            self._present[key] = set(map(_comparable, client.get_metric_history(run_id, key)))
        return [point for point in points if _comparable(point) not in self._present[point.key]]


def run_tags(tags: Mapping[str, str]) -> list[Any]:
    """Return tags as MLflow's client takes them."""
    from mlflow.entities import RunTag

    return [RunTag(*tag) for tag in tags.items()]


def last_step(run: Any, prefix: str = "") -> int:
    """Return the run's last step in metrics with a prefix; -1 if it has none."""
    with PARTS.optional("the steps of a resumed run begin at 0"):
        metrics = run.data._metric_objs
        return max((metric.step for metric in metrics if metric.key.startswith(prefix)), default=-1)
    return -1


def _number(value: float) -> float | str:
    """Return a number as JSON has it: https://protobuf.dev/programming-guides/json."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _comparable(point: Any) -> tuple[int, int, str]:
    """Return what makes two points of a metric equal. NaN is equal to NaN here."""
    return point.step, point.timestamp, repr(float(point.value))


def _first_line(text: str) -> str:
    return first_line(text.strip() or "no reason given")[:500]


def flush_own_rows(lasts: Callable[[], bool]) -> bool:
    """Have MLflow send the rows of its own asynchronous logging. Returns whether it did so while `lasts` held."""
    from mlflow import flush_async_logging

    def flush() -> None:
        with suppress(Exception):  # of a version that flushes active queues only
            flush_async_logging()

    return run_while(lasts, flush)


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


def _set_terminated(client: Any) -> Any:
    """Return the client's own method, in spite of `leave_end_to_us`."""
    method = type(client).set_terminated
    return getattr(method, "__wrapped__", method)


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
        taken = accepted(run_id, {param.key: param.value for param in params}) if params else {}
        params = [type(param)(param.key, taken[param.key]) for param in params]
        return log_batch(self, run_id, metrics, params, *args, **kwargs)

    MlflowClient.log_param, MlflowClient.log_batch = one, batch


# Autologging.


def without_autologging() -> Undo | None:
    """Turn autologging off if MLflow is loaded: without an active run, it would make one on each rank."""
    module: Any = sys.modules.get("mlflow.utils.autologging_utils")
    if module is None:
        return None
    with PARTS.optional("autologging is not turned off on ranks without a run"):
        before = module._AUTOLOGGING_GLOBALLY_DISABLED
        module._AUTOLOGGING_GLOBALLY_DISABLED = True
        return lambda: setattr(module, "_AUTOLOGGING_GLOBALLY_DISABLED", before)
    return None


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
