"""`python -m flyteplugins_tracking.send DIRECTORY...`: send runs that were logged to files."""

from __future__ import annotations

import sys
from pathlib import Path

from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.journal.replay import send


def main(directories: list[str]) -> int:
    """Send the run of each directory, and return the exit status of the process."""
    if not directories:
        sys.stderr.write("usage: python -m flyteplugins_tracking.send DIRECTORY...\n")
        return 2
    for directory in directories:
        try:
            run_id = send(Path(directory))
        except (TrackingError, ValueError) as error:
            sys.stderr.write(f"cannot send {directory}: {error}\n")
            return 1
        sys.stdout.write(f"sent {directory} as run {run_id}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
