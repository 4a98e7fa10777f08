"""The runs of an MLflow server. A call is made once, and ends within the time that it has."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers.mlflow import vendor
from flyteplugins_tracking.trackers.mlflow.tables import alone_with

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
        if not self._use(vendor.keeps_equal_points):
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
                self._store = vendor.bounded_store(self.uri, functools.partial(_request, self))
        return self._store

    @property
    def vendors_store(self) -> Any:
        """The store that MLflow's own functions use, with its queue for asynchronous logging."""
        return vendor.store_of(self.uri)


def _value_of(point: Any) -> tuple[int, int, str]:
    """Return what makes two points of a metric equal. NaN is equal to NaN here."""
    return point.step, point.timestamp, repr(float(point.value))


def _request(
    service: Service, credentials: Any, endpoint: str, method: str, body: Mapping[str, Any] | None, message: Any
) -> Any:
    from mlflow.exceptions import InvalidUrlException, MlflowException

    host = without_credentials(service.uri)
    try:
        response = vendor.send_once(credentials, endpoint, method, body, service.timeout_s())
    except InvalidUrlException:
        raise RejectedError(f"{host} is not an address of a server: it must begin with https:// or http://") from None
    except MlflowException as error:  # its text has the address, and perhaps a password
        cause = type(error.__cause__ or error.__context__ or error).__name__
        kind = NoConnectionError if cause == "ConnectionError" else UnavailableError
        raise kind(f"{host} does not answer ({cause})") from None
    _check(response, service)
    try:
        vendor.read_answer(response.json(), message)
    except ValueError:
        raise _strange(service)(f"{host} is not an MLflow server: its answer is not JSON") from None
    return message


def _check(response: Any, service: Service) -> None:
    from mlflow.exceptions import RestException

    status = response.status_code
    if status == 200:
        return
    host = without_credentials(service.uri)
    if status in (401, 403):
        raise UnauthorizedError(f"{host} does not take the credentials (HTTP {status})")
    if status >= 500 or status in _PASSING:
        raise UnavailableError(f"{host} answers with HTTP {status}")
    error = _error_of(response)
    if not error:
        raise _strange(service)(f"{host} answers with HTTP {status}: is it an MLflow server?")
    text, code = _first_line(str(error.get("message"))), str(error.get("error_code"))
    if code == "RESOURCE_DOES_NOT_EXIST":
        raise RestException({"error_code": code, "message": text})  # MLflow's store handles it where it may happen
    raise RejectedError(text, code)


def _strange(service: Service) -> type[Exception]:
    """Return the error for an answer that is not MLflow's."""
    return UnavailableError if service.is_known else RejectedError


def _error_of(response: Any) -> Mapping[str, Any]:
    try:
        error = response.json()
    except ValueError:
        return {}
    return error if isinstance(error, Mapping) else {}


def entities(kind: str, values: Mapping[str, Any]) -> Sequence[Any]:
    """Return MLflow's objects for params ("Param") or tags ("RunTag")."""
    from mlflow import entities as vendors

    return [getattr(vendors, kind)(key, str(value)) for key, value in values.items()]


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0].rstrip(".")[:500]
