"""`python -m flyteplugins_tracking.send DIRECTORY...`: send what local directories have and their services have not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.journal import replay
from flyteplugins_tracking.trackers.wandb import send as wandb_files


def main(directories: list[str]) -> int:
    """Send the run of each directory, and return the exit status of the process. It can be repeated."""
    if not directories:
        sys.stderr.write("usage: python -m flyteplugins_tracking.send DIRECTORY...\n")
        return 2
    paths = [Path(directory) for directory in directories]
    try:
        for text in _send(paths):
            sys.stdout.write(f"{text}\n")
    except (TrackingError, ValueError) as error:
        sys.stderr.write(f"cannot send: {error}\n")
        return 1
    return 0


def _send(paths: list[Path]) -> Iterator[str]:
    of_wandb = [path for path in paths if wandb_files.is_run_directory(path)]
    if of_wandb:
        yield from wandb_files.send(of_wandb)
    for path in paths:
        if path not in of_wandb:
            run_id = replay.send(path)
            yield f"{path} has nothing that is not sent yet" if run_id is None else f"sent {path} as run {run_id}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
