"""MLflow's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, NotReachedError

# https://mlflow.org/docs/latest/ml/tracking/backend-stores; since 3.0, it is not a directory anymore.
_DEFAULT = "sqlite:///mlflow.db"
# https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/store/db_types/__init__.py
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_DATABRICKS = ("databricks", "databricks-uc")
_CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    variable = os.environ.get("MLFLOW_TRACKING_URI")
    uri = variable or _DEFAULT
    is_server = uri.lower().startswith(("https://", "http://"))
    place, credentials = without_credentials(uri), _credentials(uri)
    return Diagnosis(
        place=place,
        credentials=credentials,
        is_chosen=bool(variable or credentials),
        reach=functools.partial(_reach, place, credentials is not None) if is_server else None,
        diagnostics=() if is_server else tuple(_of_files(uri, place, is_given=variable is not None)),
    )


def _credentials(uri: str) -> str | None:
    for name in _CREDENTIALS:
        if os.environ.get(name):
            return diagnostics.found_key(name, os.environ[name])
    if without_credentials(uri) != uri.rstrip("/") and "@" in uri:
        return "MLFLOW_TRACKING_URI"
    path = os.path.expanduser("~/.mlflow/credentials")
    password = diagnostics.settings_of(path, "mlflow").get("mlflow_tracking_password")
    return diagnostics.found_key(path, password) if password else None


def _of_files(uri: str, place: str, *, is_given: bool) -> Iterator[Diagnostic]:
    scheme = urlsplit(uri).scheme
    serve = "mlflow server --host 0.0.0.0, then export MLFLOW_TRACKING_URI=http://HOST:5000"
    setting = f"MLFLOW_TRACKING_URI={place}" if is_given else f"MLFLOW_TRACKING_URI is not set, and runs go to {place}"
    if scheme.partition("+")[0] in _DATABASES and find_spec("sqlalchemy") is None:
        yield Diagnostic(
            "error", f"MLflow: {setting}, which mlflow-skinny alone cannot open", f"pip install mlflow; or {serve}"
        )
    elif (scheme or uri) in _DATABRICKS:
        return
    elif scheme in ("", "file"):
        yield Diagnostic(
            "warning",
            f"MLflow: {setting}: MLflow does not develop runs in files any further, and new versions refuse them",
            serve,
        )
    elif scheme == "sqlite":
        folder = os.path.dirname(place.removeprefix("sqlite:///")) or os.curdir
        why = diagnostics.why_unwritable(folder)
        if why is not None:
            yield Diagnostic("error", f"MLflow: {setting}: {why}", serve)
    elif scheme.partition("+")[0] not in _DATABASES:
        text = f"MLflow: {setting}: MLflow itself does not support addresses that begin with {scheme}:"
        yield Diagnostic(
            "warning", text, "export MLFLOW_TRACKING_URI=http://HOST:PORT, unless a plugin of MLflow's does"
        )


def _reach(address: str, has_credentials: bool, timeout_s: float) -> None:
    """Ask for the server's version.

    https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/server/__init__.py
    """
    answer = diagnostics.ask(f"{address}/version", timeout_s)
    if answer.status in (401, 403):
        if not has_credentials:
            raise NotReachedError(
                f"it wants credentials (HTTP {answer.status}): set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
    elif answer.status != 200 or not re.fullmatch(r"\d+\.\d+\S*", answer.text.strip()):
        raise NotReachedError(f"it answers HTTP {answer.status}, and not as an MLflow server does")
