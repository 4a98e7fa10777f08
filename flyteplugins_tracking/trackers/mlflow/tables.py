"""The tables of a store of MLflow's that is a SQLite file. Its first client makes them, and two at once break them."""

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


@contextmanager
def alone_with(uri: str, deadline: float | None) -> Iterator[None]:
    """Have no other rank on this machine open the same file in the block: it then finds the tables that this one made.

    Args:
        uri: The tracking URI; where it is no file, others may.
        deadline: When it is opened beside another rank all the same, in seconds of `time.monotonic`; None for never.
    """
    from flyteplugins_tracking._util.lock import Claim

    claim = None
    while uri.startswith(_SCHEME) and claim is None and (deadline is None or time.monotonic() < deadline):
        claim = Claim.take(f"mlflow-tables/{os.path.abspath(_path(uri))}")
        if claim is None:
            time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        if claim is not None:
            claim.release()


def await_first_run(options: Mapping[str, Any], timeout_s: float) -> None:
    """Wait until the rank that has a run has made it, where it makes the tables too; a server has its tables.

    It is for a rank without a run, whose function may make a client at once, as Lightning's logger does. It loads no
    MLflow for that.
    """
    uri = _uri(options)
    until = time.monotonic() + timeout_s
    while uri.startswith(_SCHEME) and not _has_runs(_path(uri)) and time.monotonic() < until:
        time.sleep(_PAUSE_S)


def _uri(options: Mapping[str, Any]) -> str:
    given = options.get("tracking_uri")
    mlflow = sys.modules.get("mlflow")
    return str(given or (mlflow.get_tracking_uri() if mlflow else os.environ.get("MLFLOW_TRACKING_URI", "")))


def _path(uri: str) -> str:
    return uri.removeprefix(_SCHEME).partition("?")[0]


def _has_runs(path: str) -> bool:
    import sqlite3  # which a rank without a run does not need

    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=_PAUSE_S)) as store:
            return store.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is not None
    except sqlite3.Error:  # no file, no table, or it is being written
        return False
