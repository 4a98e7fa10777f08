"""`flyteplugins-tracking send DIRECTORY...`: send what local directories have and their services have not.

With `--tracker NAME`, the runs are sent to another tracker, whose own variables say where that is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.journal import replay
from flyteplugins_tracking.trackers.pluto import queues
from flyteplugins_tracking.trackers.registry import names_of_trackers
from flyteplugins_tracking.trackers.wandb import send as wandb_files


def main(arguments: list[str]) -> int:
    """Send the run of each directory, and return the exit status of the process. It can be repeated."""
    parser = argparse.ArgumentParser("flyteplugins-tracking send", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="a server that may get your key")
    parser.add_argument("--tracker", choices=names_of_trackers(), help="send the runs to this tracker")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    try:
        is_replay = given.tracker is not None
        for text in (_replay if is_replay else _send)(given.directories, given.tracker if is_replay else given.server):
            sys.stdout.write(f"{text}\n")
    except (TrackingError, ValueError, OSError) as error:
        sys.stderr.write(f"cannot send: {error}\n")
        return 1
    return 0


def _send(paths: Sequence[Path], servers: Sequence[str]) -> Iterator[str]:
    of_wandb = [path for path in paths if wandb_files.is_run_directory(path)]
    for path in paths:
        if path not in of_wandb and replay.is_empty(path):
            yield f"{path} has no rows: nothing was logged there"
        elif path not in of_wandb:
            run_id = replay.send(path, servers)
            yield f"{path} has nothing that is not sent yet" if run_id is None else f"sent {path} as run {run_id}"
    yield from wandb_files.send(of_wandb, servers)


def _replay(paths: Sequence[Path], tracker: str) -> Iterator[str]:
    for path in paths:
        runs = [wandb_files.as_lines(path)] if wandb_files.is_run_directory(path) else _kept_runs(path)
        for number, lines in enumerate(runs):
            rows, replayed = sum("row" in line for line in lines), _replayed(path, tracker)
            first = replayed.get(str(number), -1)
            if rows == first:
                yield f"{tracker} has all {rows} rows of {path}"
                continue
            if tracker == "wandb":
                wandb_files.replay(lines)
            else:
                replay.replay(lines, tracker, max(first, 0))
            replace_whole(_marker(path, tracker), json.dumps({**replayed, str(number): rows}))
            yield f"sent {rows - max(first, 0)} rows of {path} to {tracker}, as run {lines[0]['id']}"


def _kept_runs(path: Path) -> list[list[Any]]:
    runs = replay.runs_of(path)
    return [queues.as_lines(path, lines) if any("queue" in line for line in lines) else lines for lines in runs]


def _replayed(path: Path, tracker: str) -> dict[str, Any]:
    """Return how many rows of each journal of a directory this tracker has."""
    try:
        replayed: dict[str, Any] = json.loads(_marker(path, tracker).read_text())
    except (OSError, ValueError):
        return {}
    return replayed


def _marker(path: Path, tracker: str) -> Path:
    return path / f"replayed-to-{tracker}.json"
