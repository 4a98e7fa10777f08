"""`python -m flyteplugins_tracking view`: finds the runs in local files, and starts their tracker's own viewer.

It shows nothing of a run itself: W&B's, Trackio's and MLflow's viewers do.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flyteplugins_tracking._util.columns import aligned
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.journal.local import kept_runs
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers
from flyteplugins_tracking.trackers.viewing import FoundRun, Viewer

_HEAD = ("run", "tracker", "project", "started", "files")
# The most lines of the list. The newest runs come first.
_MOST_LINES = 20


class LocalRun(NamedTuple):
    """A run of one tracker, with all its local files: those of several nodes, or of several attempts."""

    tracker: str
    id: str
    files: Sequence[FoundRun]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the viewer of the chosen runs, or list them. Returns 1 if there is none. Wrong arguments exit with 2."""
    options = _options(arguments)
    runs, chosen = _search(options)
    if not chosen:
        sys.stderr.write(_nothing(options, runs))
        return 1
    if len(chosen) == 1 or (options.tracker is not None and len({run.tracker for run in chosen}) == 1):
        status = _view(chosen)
        if status is not None:
            return status
    sys.stdout.write(_list(chosen, options.directory))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.directory is not None and not os.path.isdir(options.directory):
        parser.error(f"{options.directory} is not a directory: pass the directory in which the job ran")
    return options


def _search(options: argparse.Namespace) -> tuple[list[LocalRun], list[LocalRun]]:
    """Return the runs that were found, and those of them that are chosen."""
    runs = find(options.directory or os.curdir)
    chosen = _chosen(runs, options)
    if chosen or options.directory is not None:
        return runs, chosen
    elsewhere = find(None)
    return runs + elsewhere, _chosen(elsewhere, options)


def find(directory: str | None) -> list[LocalRun]:
    """Return the runs of all trackers, the newest first.

    Args:
        directory: Where to look, with the directories in it. None for the places where the trackers write in this
            environment.
    """
    files: dict[tuple[str, str], list[FoundRun]] = {}
    for tracker, run in _local_runs(directory):
        files.setdefault((tracker, run.id), []).append(run)
    runs = [LocalRun(tracker, run_id, found) for (tracker, run_id), found in files.items()]
    return sorted(runs, key=_started_at, reverse=True)


def _chosen(runs: Sequence[LocalRun], options: argparse.Namespace) -> list[LocalRun]:
    return [run for run in runs if options.run in (None, run.id) and options.tracker in (None, run.tracker)]


def _local_runs(directory: str | None) -> Iterator[tuple[str, FoundRun]]:
    for name in names_of_trackers():
        try:
            tracker = find_tracker(name)
        except ConfigError as error:  # another package's, which the user may not need
            sys.stderr.write(f"{error}\n")
            continue
        for run in tracker.find_runs(directory):
            yield name, run
    yield from kept_runs(directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flyteplugins_tracking view",
        description="Find the runs in local files, of all trackers and all nodes whose files are there, and start the "
        "tracker's own viewer: `wandb leet`, `trackio show` or `mlflow ui`. If there are several runs, it lists them.",
        epilog="The exit status is 1 if there is no such run, and 2 for wrong arguments; otherwise it is the viewer's.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="DIR",
        help="where to look, with the directories in it. By default, the working directory; if no such run is there, "
        "WANDB_DIR, PLUTO_DIR, MLFLOW_TRACKING_URI, and TRACKIO_DIR or Trackio's default",
    )
    parser.add_argument("--run", metavar="ID", help="show this run")
    parser.add_argument("--tracker", metavar="NAME", help="show the runs of this tracker, all in one viewer")
    return parser


def _nothing(options: argparse.Namespace, runs: Sequence[LocalRun]) -> str:
    """Return what to say if no run is chosen."""
    place = options.directory or "the working directory, nor where the trackers write by default"
    if not runs:
        return f"There are no runs in {place}. Runs on a server are on its pages.\n"
    named = [f"{name} {value}" for name, value in (("--run", options.run), ("--tracker", options.tracker)) if value]
    return f"No run for {' '.join(named)}. There are these:\n{_list(runs, options.directory)}"


def _list(runs: Sequence[LocalRun], directory: str | None) -> str:
    """Return the list of runs, and how to choose one."""
    lines = aligned(_HEAD, [_cells(run) for run in runs[:_MOST_LINES]])
    if len(runs) > _MOST_LINES:
        lines.append(f"... and {len(runs) - _MOST_LINES} older runs")
    command = ["python", "-m", "flyteplugins_tracking", "view", *([directory] if directory is not None else [])]
    newest = runs[0]
    is_ambiguous = len({run.tracker for run in runs if run.id == newest.id}) > 1
    one = [*command, "--run", newest.id, *(["--tracker", newest.tracker] if is_ambiguous else [])]
    lines += ["", "Look at one run, or at all runs of a tracker:", f"  {shlex.join(one)}"]
    lines += [f"  {shlex.join([*command, '--tracker', tracker])}" for tracker in _viewable_trackers(runs)]
    return "".join(f"{line}\n" for line in lines)


def _viewable_trackers(runs: Sequence[LocalRun]) -> list[str]:
    return list(dict.fromkeys(run.tracker for run in runs if any(not files.note for files in run.files)))


def _cells(run: LocalRun) -> tuple[str, ...]:
    latest = max(run.files, key=lambda files: files.started_at)
    started = time.strftime("%F %H:%M", time.localtime(_started_at(run)))
    path = os.path.relpath(latest.path)
    shown = os.path.abspath(latest.path) if path.startswith(os.pardir) else path
    more = f" and {len(run.files) - 1} more" if len(run.files) > 1 else ""
    return run.id, run.tracker, latest.project, started, f"{shown}{more}"


def _started_at(run: LocalRun) -> float:
    return max(files.started_at for files in run.files)


def _view(runs: Sequence[LocalRun]) -> int | None:
    """Become the viewer of these runs, of one tracker.

    Returns:
        The exit status, if there is nothing to start; None if the viewer shows only a part of them at once.
    """
    files = [each for run in runs for each in run.files]
    for note in dict.fromkeys(each.note for each in files if each.note):
        sys.stderr.write(f"{note}\n")
    shown = [each for each in files if not each.note]
    if not shown:
        return 0
    tracker = find_tracker(runs[0].tracker)
    viewer = tracker.viewer(shown)
    if viewer is None:
        return None
    return _become(viewer, tracker.title)


def _become(viewer: Viewer, title: str) -> int:
    """Let the viewer take the place of this process: it has the terminal, and Ctrl-C."""
    if viewer.note:
        sys.stderr.write(f"{viewer.note}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(viewer.command[0], list(viewer.command), {**os.environ, **viewer.env})  # noqa: S606 a tracker's own
    except OSError as error:
        sys.stderr.write(f"{title}: {shlex.join(viewer.command)} cannot be started: {error}\n")
    return 1
