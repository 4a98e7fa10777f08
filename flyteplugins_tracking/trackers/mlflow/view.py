"""The runs in MLflow's local stores, and its web pages: `mlflow ui`."""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers.mlflow.links import ID_TAG
from flyteplugins_tracking.trackers.viewing import FoundRun, Viewer, places, view_command

_SUFFIXES = (".db", ".sqlite", ".sqlite3")
# A directory with runs as files: https://mlflow.org/docs/latest/ml/tracking/backend-stores
_FOLDER = "mlruns"
_QUERY = """
    SELECT COALESCE(tags.value, runs.run_uuid), runs.start_time, experiments.name
    FROM runs JOIN experiments USING (experiment_id)
    LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = ?
    WHERE runs.lifecycle_stage = 'active'
"""


def find_runs(directory: str | None) -> Iterator[FoundRun]:
    """Yield the runs of the databases and the directories `mlruns` in these directories."""
    seen: set[Path] = set()
    for store in _stores(directory):
        if store.resolve() not in seen:
            seen.add(store.resolve())
            yield from _runs_in_folder(store) if store.is_dir() else _runs_in_file(store)


def _stores(directory: str | None) -> Iterator[Path]:
    chosen = _path_of(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if directory is None and chosen is not None:
        yield chosen
    for place in places(directory):
        yield from sorted(path for path in place.glob("*") if path.suffix in _SUFFIXES and path.is_file())
        if place.name == _FOLDER or (place / _FOLDER).is_dir():
            yield place if place.name == _FOLDER else place / _FOLDER


def _path_of(uri: str) -> Path | None:
    """Return the local store behind a tracking URI; None if it is a server."""
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        return Path(uri.removeprefix("sqlite:///").partition("?")[0])
    return Path(unquote(parts.path)) if uri and parts.scheme in ("", "file") else None


def _runs_in_file(file: Path) -> Iterator[FoundRun]:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
        for run_id, started_ms, experiment in database.execute(_QUERY, (ID_TAG,)):
            yield FoundRun(run_id, str(file), (started_ms or 0) / 1000, experiment)


def _runs_in_folder(folder: Path) -> Iterator[FoundRun]:
    for meta in sorted(folder.glob("*/*/meta.yaml")):
        with suppress(OSError):
            tag, started = meta.parent / "tags" / ID_TAG, re.search(r"^start_time: (\d+)", meta.read_text(), re.M)
            run_id = tag.read_text() if tag.is_file() else meta.parent.name
            yield FoundRun(run_id, str(folder), int(started[1]) / 1000 if started else 0)


def viewer(runs: Sequence[FoundRun]) -> Viewer | None:
    """Return the command of the web pages; None if the runs are in several stores, of which it shows one."""
    stores = {os.path.realpath(run.path) for run in runs}
    if len(stores) > 1:
        return None
    store = stores.pop()
    uri = store if os.path.isdir(store) else f"sqlite:///{store}"
    return Viewer([sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri])


def how_to_view(uri: str, run_id: str) -> str:
    """Return the command that shows a run without a server."""
    import shlex

    store = _path_of(uri)
    if store is not None and (store.suffix in _SUFFIXES or store.name == _FOLDER):
        return view_command("mlflow", run_id, str(store.absolute().parent))
    return f"mlflow ui --backend-store-uri {shlex.quote(without_credentials(uri))}"
