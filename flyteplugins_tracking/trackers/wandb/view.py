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

# A run's directory: https://docs.wandb.ai/models/track/environment-variables, WANDB_DIR.
_DIRECTORY = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
_FOLDERS = ("", "wandb", ".wandb")


def find_runs(directory: str | None) -> Iterator[FoundRun]:
    """Yield the runs that W&B's client has written, each directory once."""
    seen: set[Path] = set()
    for path in _run_directories(directory):
        match, resolved = _DIRECTORY.fullmatch(path.name), path.resolve()
        if match is None or resolved in seen or datastore.file_in(path) is None:
            continue
        seen.add(resolved)
        with suppress(ValueError):
            yield FoundRun(match[2], str(path), time.mktime(time.strptime(match[1], "%Y%m%d_%H%M%S")))


def _run_directories(directory: str | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory)
    for place in places(directory, os.environ.get("WANDB_DIR")):
        for folder in _FOLDERS:
            yield from sorted((place / folder).glob("*run-*"))


def viewer(runs: Sequence[FoundRun]) -> Viewer:
    """Return the command of the viewer, for one directory or several."""
    path = runs[0].path if len(runs) == 1 else _linked(runs)
    return Viewer([sys.executable, "-m", "wandb", "leet", path])


def _linked(runs: Sequence[FoundRun]) -> str:
    """Return a new directory with a link to each run's file: the viewer lists one directory.

    It shows the names of the directories, so these get the node's. It finds the file by that name.
    """
    folder = Path(tempfile.mkdtemp(prefix="flyteplugins-tracking-view-"))
    nodes = [Path(run.path).resolve().parent.parent for run in runs]
    for run, node in zip(runs, nodes, strict=True):
        started_at = time.strftime("%Y%m%d_%H%M%S", time.localtime(run.started_at))
        name = re.sub(r"[^\w.-]", "-", f"{run.id}-{node.name}" if len(set(nodes)) > 1 else run.id)
        while (link := folder / f"run-{started_at}-{name}").exists():
            name += "-"
        link.mkdir()
        file = datastore.file_in(Path(run.path))
        if file is not None:
            (link / f"run-{name}.wandb").symlink_to(file.resolve())
    return str(folder)
