"""MLflow's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flyteplugins_tracking._util.text import has_credentials, without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.mlflow import SERVERS, kind_of

# https://mlflow.org/docs/latest/ml/tracking/backend-stores; since 3.0, it is not a directory anymore.
_DEFAULT = "sqlite:///mlflow.db"
# https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/store/db_types/__init__.py
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SERVE = "mlflow server --host 0.0.0.0, then export MLFLOW_TRACKING_URI=http://HOST:5000"
# https://github.com/mlflow/mlflow/blob/v3.17.0/mlflow/server/__init__.py
_VERSION, _REFUSAL = r"200 \s*\d+\.\d+\S*\s*$", r"40[13] "


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    variable = os.environ.get("MLFLOW_TRACKING_URI")
    uri = variable or _DEFAULT
    place, file = without_credentials(uri), os.path.expanduser("~/.mlflow/credentials")
    elsewhere = {
        "MLFLOW_TRACKING_URI": has_credentials(uri),
        file: diagnostics.settings_of(file, "mlflow").get("mlflow_tracking_password"),
    }
    key = diagnostics.find_key("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", elsewhere=elsewhere)
    setting = f"MLFLOW_TRACKING_URI={place}" if variable else f"MLFLOW_TRACKING_URI is not set, and runs go to {place}"
    answer = f"{_REFUSAL}|{_VERSION}" if key else _VERSION  # the question has no key
    is_http = uri.lower().startswith(("https://", "http://"))
    return Diagnosis(
        place=place,
        credentials=key,
        is_chosen=bool(variable or key),
        reach=diagnostics.server("an MLflow", f"{place}/version", answer) if is_http else None,
        diagnostics=tuple(_of_place(uri, place, f"MLflow: {setting}")),
    )


def _of_place(uri: str, place: str, setting: str) -> Iterator[Diagnostic]:
    """Yield what is wrong with an address."""
    kind = kind_of(uri)
    if kind == "sqlite":
        folder = os.path.dirname(place.partition(":///")[2]) or os.curdir
        yield from diagnostics.check_directory(folder, "error", setting, _SERVE)
    elif kind == "file":
        text = "MLflow does not develop runs in files any further, and new versions refuse them"
        yield Diagnostic("warning", f"{setting}: {text}", _SERVE)
    elif kind not in (*_DATABASES, *SERVERS):
        text = f"MLflow itself does not support addresses that begin with {kind}:"
        fix = "export MLFLOW_TRACKING_URI=http://HOST:PORT, unless a plugin of MLflow's does"
        yield Diagnostic("warning", f"{setting}: {text}", fix)
