"""The runs that Pluto's client is writing here. Pluto has no local viewer: its pages are on its server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking.trackers.viewing import FoundRun, places

# The directory of a rank's run, which is removed when the service has all of it.
_FOLDER = ".pluto"
_DIRECTORY = re.compile(r"(.+)-rank-\d+-attempt-\d+-[0-9a-f]{6}")
# The file in it that holds the address of the run's page.
_PAGE = "page.txt"


def keep_page(directory: str, page: str | None) -> None:
    """Write down where the run's page is, for `find_runs`."""
    with suppress(OSError):  # a full disk must not end a training for an address
        Path(directory, _PAGE).write_text(page or "")


def find_runs(directory: str | None) -> Iterator[FoundRun]:
    """Yield the runs that are open, or that the service has not received completely."""
    variable = os.environ.get("PLUTO_DIR") or os.environ.get("MLOP_DIR")
    for place in places(directory, variable):
        for path in sorted((place / _FOLDER).glob("*")):
            match = _DIRECTORY.fullmatch(path.name)
            if match is not None:
                yield FoundRun(match[1], str(path), path.stat().st_mtime, note=_note(path))


def _note(path: Path) -> str:
    page = ""
    with suppress(OSError):
        page = (path / _PAGE).read_text()
    return f"Pluto has no local viewer. {f'The run is at {page}' if page else 'Its pages are on its server.'}"
