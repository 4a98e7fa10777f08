"""The runs in Trackio's local files, and its dashboard: `trackio show`."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from flyteplugins_tracking.trackers.trackio.options import default_directory
from flyteplugins_tracking.trackers.viewing import FoundRun, Viewer, places


def find_runs(directory: str | None) -> Iterator[FoundRun]:
    """Yield the runs of the projects in these directories, or in the directory of all projects."""
    seen: set[Path] = set()
    for place in places(directory, default_directory()):
        for file in sorted(place.glob("*.db")):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield from _runs_in(file)


def _runs_in(file: Path) -> Iterator[FoundRun]:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
        for run_id, created_at in database.execute("SELECT run_id, created_at FROM configs"):
            yield FoundRun(run_id, str(file), datetime.fromisoformat(created_at).timestamp(), file.stem)


def viewer(runs: Sequence[FoundRun]) -> Viewer | None:
    """Return the command of the dashboard; None if the runs are in several directories, of which it shows one."""
    directories = {os.path.dirname(os.path.realpath(run.path)) for run in runs}
    if len(directories) > 1:
        return None
    projects = {run.project for run in runs}
    chosen = ["--project", projects.pop()] if len(projects) == 1 else []
    return Viewer([sys.executable, "-m", "trackio.cli", "show", *chosen], {"TRACKIO_DIR": directories.pop()})


def place_of_store() -> str | None:
    """Return the directory that `view` must be told of; None if it finds the store without."""
    is_chosen = any(name in os.environ for name in ("TRACKIO_DIR", "HF_HOME", "XDG_CACHE_HOME"))
    return default_directory() if is_chosen else None
