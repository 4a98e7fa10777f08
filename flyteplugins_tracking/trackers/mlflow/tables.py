"""The tables of a SQLite file with MLflow runs. The first client creates them; two clients at once break them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

_SCHEME = "sqlite:///"
_PAUSE_S = 0.1
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
            time.sleep(_PAUSE_S)
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
    uri = _uri(options)
    until = time.monotonic() + timeout_s
    while uri.startswith(_SCHEME) and not _has_runs(_path(uri)) and time.monotonic() < until:
        time.sleep(_PAUSE_S)


def _uri(options: Mapping[str, Any]) -> str:
    argument = options.get("tracking_uri")
    mlflow = sys.modules.get("mlflow")
    return str(argument or (mlflow.get_tracking_uri() if mlflow else os.environ.get("MLFLOW_TRACKING_URI", "")))


def _path(uri: str) -> str:
    return uri.removeprefix(_SCHEME).partition("?")[0]


def _has_runs(path: str) -> bool:
    import sqlite3  # a rank without a run on a server does not need it

    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=_PAUSE_S)) as store:
            return store.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is not None
    except sqlite3.Error:  # no file, no table, or another process writes
        return False
