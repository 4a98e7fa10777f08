"""An MLflow server's runs, by calls that neither try again nor outlast the time they are given."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyteplugins_tracking.trackers.mlflow.tables import alone_with

# What a call may take where nobody waits for it, in seconds: less than the end of a run waits for its rows.
_CALL_S = 20.0
_SHORTEST_S = 0.5
# What the server is asked again after, in seconds.
_PAUSE_S = 0.25
# The answers of HTTP that another try may change.
_PASSING = frozenset({408, 425, 429})
# The error codes of MLflow that no other try changes.
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
    """The server does not answer, or not now."""


class NoConnectionError(UnavailableError):
    """Nothing is there that takes a connection. It may just be starting."""


class UnauthorizedError(UnavailableError):
    """The server wants other credentials. They may come: a token is renewed."""


class RejectedError(Exception):
    """The server does not take what was asked of it.

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
        deadline: When calls must have ended, in seconds of `time.monotonic`; None for a time of their own each.
        is_known: Whether an MLflow server has answered there: another's answers are then a proxy's, and pass.
    """

    def __init__(self, uri: str, deadline: float | None = None, *, is_known: bool = False) -> None:
        self.uri = uri
        self.is_known = is_known
        self.deadline = deadline
        # A server that is not there is mostly an address that is wrong: it is waited for half of the time.
        self._absent_until = None if deadline is None else (time.monotonic() + deadline) / 2
        self._store: Any = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of MLflow's store of runs, once.

        Raises:
            UnavailableError: Another time it may work.
            RejectedError: It will not.
        """
        from mlflow.exceptions import MlflowException

        try:
            return getattr(self._opened(), method)(*args, **kwargs)
        except MlflowException as error:
            if error.error_code in _FINAL:
                raise RejectedError(_first_line(error.message), error.error_code) from None
            raise UnavailableError(_first_line(error.message)) from None
        except (UnavailableError, RejectedError, AttributeError, TypeError):
            raise
        except ValueError as error:  # it cannot be put into a request: nothing that changes
            raise RejectedError(f"{type(error).__name__}: {_first_line(str(error))}") from None
        except Exception as error:  # of a database: it is locked, or another process is just making its tables
            raise UnavailableError(f"{type(error).__name__}: {_first_line(str(error))}") from None

    def persist(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call again until it works or the deadline has come.

        Raises:
            UnavailableError: It has.
            RejectedError: It never will.
        """
        return self.until(lambda: (self.call(method, *args, **kwargs),))[0]

    def until(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` gives as soon as that is something, or None when the deadline has come.

        Raises:
            UnavailableError: The deadline has come, and the last attempt could not be made.
            UnauthorizedError: At once: nobody else's key comes along.
        """
        while True:
            try:
                found = attempt()
                if found or self._is_over():
                    return found
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
        """What the next call may take."""
        own = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _CALL_S)
        return own if self.deadline is None else max(_SHORTEST_S, min(own, self.deadline - time.monotonic()))

    def _is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() + _PAUSE_S > self.deadline

    def _opened(self) -> Any:
        if self._store is None:
            from mlflow.tracking._tracking_service.utils import _get_store

            with alone_with(self.uri, self.deadline):
                self._store = _bounded(_get_store(self.uri), self)
        return self._store

    @property
    def vendors_store(self) -> Any:
        """The store that MLflow's own functions use, with its queue of what is logged asynchronously."""
        from mlflow.tracking._tracking_service.utils import _get_store

        return _get_store(self.uri)


def _bounded(store: Any, service: Service) -> Any:
    """The same store, whose requests are made once and in time.

    MLflow's own tries 7 times, in about 4 minutes, and knows no other way to say that for one call than variables of
    the whole process.
    """
    from mlflow.store.tracking.rest_store import RestStore

    if not isinstance(store, RestStore):
        return store

    class Bounded(RestStore):  # type: ignore[misc]
        def _call_endpoint(self, api: Any, json_body: Any = None, *_: Any, **__: Any) -> Any:
            endpoint, method = _endpoints()[api]
            body = None if json_body is None else json.loads(json_body)
            return _request(self.get_host_creds(), endpoint, method, body, api.Response(), service)

    return Bounded(store.get_host_creds)


@functools.lru_cache(maxsize=1)
def _endpoints() -> Mapping[Any, tuple[str, str]]:
    """The path and method of each request, by its class."""
    from mlflow.protos.service_pb2 import MlflowService
    from mlflow.utils.rest_utils import extract_api_info_for_service

    found: Mapping[Any, tuple[str, str]] = extract_api_info_for_service(MlflowService, "/api/2.0")
    return found


def _request(
    credentials: Any, endpoint: str, method: str, body: Mapping[str, Any] | None, answer: Any, service: Service
) -> Any:
    from mlflow.exceptions import InvalidUrlException, MlflowException
    from mlflow.utils.proto_json_utils import parse_dict
    from mlflow.utils.rest_utils import http_request

    how = {"params" if method == "GET" else "json": body}
    timeout_s = service.timeout_s()
    try:
        response = http_request(
            credentials, endpoint, method, max_retries=0, timeout=timeout_s, raise_on_status=False, **how
        )
    except InvalidUrlException:
        raise RejectedError(f"{shown(service.uri)} is no address of a server") from None
    except MlflowException as error:  # its text has the address, maybe with a password in it
        cause = type(error.__cause__ or error.__context__ or error).__name__
        kind = NoConnectionError if cause == "ConnectionError" else UnavailableError
        raise kind(f"{shown(service.uri)} does not answer ({cause})") from None
    _check(response, service)
    try:
        parse_dict(js_dict=response.json(), message=answer)
    except ValueError:
        raise _strange(service)(f"{shown(service.uri)} is no MLflow server: what it answers is no JSON") from None
    return answer


def _check(response: Any, service: Service) -> None:
    from mlflow.exceptions import RestException

    status = response.status_code
    if status == 200:
        return
    host = shown(service.uri)
    if status in (401, 403):
        raise UnauthorizedError(f"{host} does not take the credentials (HTTP {status})")
    if status >= 500 or status in _PASSING:
        raise UnavailableError(f"{host} answers with HTTP {status}")
    told = _told(response)
    if not told:
        raise _strange(service)(f"{host} answers with HTTP {status}: is it an MLflow server?")
    text, code = _first_line(str(told.get("message"))), str(told.get("error_code"))
    if code == "RESOURCE_DOES_NOT_EXIST":
        raise RestException({"error_code": code, "message": text})  # which MLflow's store expects, where that may be
    raise RejectedError(text, code)


def _strange(service: Service) -> type[Exception]:
    """What an answer that is none of MLflow's comes to."""
    return UnavailableError if service.is_known else RejectedError


def _told(response: Any) -> Mapping[str, Any]:
    try:
        told = response.json()
    except ValueError:
        return {}
    return told if isinstance(told, Mapping) else {}


def shown(uri: str) -> str:
    """A tracking URI as it may be shown: without a password."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def has_password(uri: str) -> bool:
    """Whether an address has credentials in it."""
    return "@" in uri.partition("://")[2].partition("/")[0]


def entities(kind: str, values: Mapping[str, Any]) -> Sequence[Any]:
    """MLflow's `Param`s or `RunTag`s."""
    from mlflow import entities as vendors

    return [getattr(vendors, kind)(key, str(value)) for key, value in values.items()]


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0].rstrip(".")[:500]
