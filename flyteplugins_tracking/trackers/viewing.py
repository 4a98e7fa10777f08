"""The runs that a tracker keeps in local files, and the viewer that shows them: what `view` asks a tracker for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a rank without a run does not need it
    from pathlib import Path


class FoundRun(NamedTuple):
    """The files of one run in one place. A run to which several nodes have written may have several.

    Attributes:
        id: The run's id in the plan.
        path: The directory or the file that holds the run.
        started_at: When it was opened, in seconds since the epoch.
        project: The project, as the tracker's viewer takes it; empty if the files do not say.
        note: Why no viewer can show these files, and what to do instead; empty if the tracker's viewer shows them.
    """

    id: str
    path: str
    started_at: float
    project: str = ""
    note: str = ""


class Viewer(NamedTuple):
    """The command that shows runs.

    Attributes:
        command: The program and its arguments. It takes the place of this process.
        env: Variables to set for it.
        note: A sentence to print before; empty for none.
    """

    command: Sequence[str]
    env: Mapping[str, str] = {}
    note: str = ""


def places(directory: str | None, *defaults: str | None) -> Iterator[Path]:
    """Yield the directories in which to look for runs.

    Args:
        directory: The only one, with the directories in it: a node may have its own. None for `defaults`.
        defaults: Where the tracker writes in this environment; None or empty to skip.
    """
    from pathlib import Path

    for root in [Path(path).expanduser() for path in ([directory] if directory is not None else defaults) if path]:
        yield root
        try:
            yield from sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:  # it does not exist, or cannot be read
            continue


def view_command(tracker: str, run_id: str, directory: str | None = None) -> str:
    """Return the command that shows a run, to be typed in this process's working directory.

    Args:
        tracker: The tracker's name.
        run_id: The run's id in the plan.
        directory: Where `view` finds the run; None if it finds it by itself.
    """
    import shlex

    words = ["python", "-m", "flyteplugins_tracking", "view"]
    if directory is not None:
        shown = os.path.relpath(directory)
        is_far = shown.startswith(os.pardir)
        is_found = shown == os.curdir or (os.sep not in shown and not shown.startswith("."))  # see `places`
        words += [] if is_found else [os.path.abspath(directory) if is_far else shown]
    return shlex.join([*words, "--tracker", tracker, "--run", run_id])
