"""MLflow's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from urllib.parse import urlsplit

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic

# https://mlflow.org/docs/latest/ml/tracking/backend-stores; since 3.0, it is not a directory anymore.
_DEFAULT = "sqlite:///mlflow.db"
# https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/store/db_types/__init__.py
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_DATABRICKS = ("databricks", "databricks-uc")
_SERVE = "mlflow server --host 0.0.0.0, then export MLFLOW_TRACKING_URI=http://HOST:5000"


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    variable = os.environ.get("MLFLOW_TRACKING_URI")
    uri = variable or _DEFAULT
    place, credentials = without_credentials(uri), _credentials(uri)
    is_server = uri.lower().startswith(("https://", "http://"))
    setting = f"MLFLOW_TRACKING_URI={place}" if variable else f"MLFLOW_TRACKING_URI is not set, and runs go to {place}"

    def is_mlflow(status: int, text: str) -> bool:
        """https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/server/__init__.py."""
        if status in (401, 403) and credentials is None:
            names = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            raise ConnectionError(f"it wants credentials (HTTP {status}): set {names}")
        return status in (401, 403) or (status == 200 and bool(re.fullmatch(r"\d+\.\d+\S*", text.strip())))

    return Diagnosis(
        place=place,
        credentials=credentials,
        is_chosen=bool(variable or credentials),
        reach=diagnostics.server("an MLflow", f"{place}/version", is_mlflow) if is_server else None,
        diagnostics=() if is_server else _of_files(uri, place, f"MLflow: {setting}"),
    )


def _credentials(uri: str) -> str | None:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        if os.environ.get(name):
            return diagnostics.found_key(name, os.environ[name])
    if without_credentials(uri) != uri.rstrip("/") and "@" in uri:
        return "MLFLOW_TRACKING_URI"
    path = os.path.expanduser("~/.mlflow/credentials")
    return diagnostics.found_key(path, diagnostics.settings_of(path, "mlflow").get("mlflow_tracking_password"))


def _of_files(uri: str, place: str, setting: str) -> tuple[Diagnostic, ...]:
    """Return what is wrong with an address that is no server's: a database, a directory or Databricks."""
    scheme = urlsplit(uri).scheme
    database = scheme.partition("+")[0]
    if database in _DATABASES and find_spec("sqlalchemy") is None:
        text, fix = "which mlflow-skinny alone cannot open", f"pip install mlflow; or {_SERVE}"
        return (Diagnostic("error", f"{setting}, {text}", fix),)
    if scheme == "sqlite":
        folder = os.path.dirname(place.removeprefix("sqlite:///")) or os.curdir
        return diagnostics.check_directory(folder, "error", setting, _SERVE)
    if scheme in ("", "file") and uri not in _DATABRICKS:
        text = "MLflow does not develop runs in files any further, and new versions refuse them"
        return (Diagnostic("warning", f"{setting}: {text}", _SERVE),)
    if database in _DATABASES or (scheme or uri) in _DATABRICKS:
        return ()
    text = f"MLflow itself does not support addresses that begin with {scheme}:"
    fix = "export MLFLOW_TRACKING_URI=http://HOST:PORT, unless a plugin of MLflow's does"
    return (Diagnostic("warning", f"{setting}: {text}", fix),)
