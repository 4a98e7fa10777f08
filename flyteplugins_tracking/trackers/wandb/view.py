"""The runs in W&B's local directories, and its viewer for the terminal: `wandb leet`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking.trackers.viewing import FoundRun, Viewer, places
from flyteplugins_tracking.trackers.wandb import datastore

# A run's directory: https://docs.wandb.ai/models/track/environment-variables, WANDB_DIR. Its name ends with the id, and
# that of a shared run's other node with the node too. The name of the file in it has the id alone.
_DIRECTORY = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
_FILE = re.compile(r"run-(.+)\.wandb")
_TIME = "%Y%m%d_%H%M%S"
_FOLDERS = ("", "wandb", ".wandb")


def find_runs(directory: str | None) -> Iterator[FoundRun]:
    """Yield the runs that W&B's client has written, each directory once."""
    seen: set[Path] = set()
    for path in _run_directories(directory):
        file, resolved = datastore.file_in(path), path.resolve()
        begun, named = _DIRECTORY.fullmatch(path.name), _FILE.fullmatch(file.name if file is not None else "")
        if begun is None or named is None or resolved in seen:
            continue
        seen.add(resolved)
        with suppress(ValueError):
            yield FoundRun(named[1], str(path), time.mktime(time.strptime(begun[1], _TIME)))


def _run_directories(directory: str | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory)
    for place in places(directory, os.environ.get("WANDB_DIR")):
        for folder in _FOLDERS:
            yield from sorted((place / folder).glob("*run-*"))


def viewer(runs: Sequence[FoundRun]) -> Viewer:
    """Return the command of the viewer, for one directory or several."""
    path = datastore.file_in(Path(runs[0].path)) if len(runs) == 1 else _linked(runs)
    return Viewer([sys.executable, "-m", "wandb", "leet", str(path)])


def _linked(runs: Sequence[FoundRun]) -> Path:
    """Return a new directory with a link to each run's file: the viewer lists one directory.

    It shows the names of the directories, so these get the node's. It finds the file by that name.
    """
    folder = Path(tempfile.mkdtemp(prefix="flyteplugins-tracking-view-"))
    paths = [Path(run.path).resolve() for run in runs]
    nodes = [path.parent.parent.name for path in paths]
    for run, path, node in zip(runs, paths, nodes, strict=True):
        label = f"{run.id}-{node}" if len(set(nodes)) > 1 else path.name.partition("run-")[2].partition("-")[2]
        name = re.sub(r"[^\w.-]", "-", label)
        while (link := folder / f"run-{time.strftime(_TIME, time.localtime(run.started_at))}-{name}").exists():
            name += "-"
        link.mkdir()
        file = datastore.file_in(path)
        if file is not None:
            (link / f"run-{name}.wandb").symlink_to(file)
    return folder
