"""The directories of runs in and below those that `send` is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flyteplugins_tracking._util.files import is_own_directory, is_own_file
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking.trackers.journal import files_in
from flyteplugins_tracking.trackers.wandb import send as wandb_files

# The file that says of an empty directory that its run was sent.
SENT = "sent"
# How deep below a directory runs are looked for, and in how many directories. Hydra's are 6 deep.
_DEEPEST, _MOST = 8, 20_000
# W&B's own directory may have the first name. Others that begin with a dot have environments, caches and repositories.
_HIDDEN = (".wandb",)
_SHOWN = 5


@dataclass
class Search:
    """What was found in and below a directory.

    Attributes:
        runs: The directories of runs that are wanted.
        others: How many other runs were found.
        looked_at: How many directories were looked at.
        of_others: The directories that were not looked at, since they are another user's or cannot be read.
        beyond: Those that are too deep, or too many.
    """

    runs: list[Path] = field(default_factory=list)
    others: int = 0
    looked_at: int = 0
    of_others: list[Path] = field(default_factory=list)
    beyond: list[Path] = field(default_factory=list)


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, of any tracker."""
    return wandb_files.is_run_directory(directory) or is_own_file(directory / SENT) or bool(files_in(directory))


def has_unsent(directory: Path) -> bool:
    """Whether the directory of a run has what was not sent yet."""
    return bool(files_in(directory)) or wandb_files.is_unsent(directory)


def search(directory: Path, is_wanted: Callable[[Path], bool]) -> Search:
    """Look for the runs below a directory. Links of this user are followed to directories of this user."""
    found, known, waiting = Search(), {directory.resolve()}, [(directory, 0)]
    while waiting:
        path, depth = waiting.pop()
        found.looked_at += 1
        for child in _directories_in(path, found):
            resolved = child.resolve()
            if resolved in known:
                continue
            known.add(resolved)
            if not (is_own_directory(resolved) and child.lstat().st_uid == os.geteuid()):
                found.of_others.append(child)
                continue
            child = resolved if child.is_symlink() else child
            if is_run(child):
                is_sought = is_wanted(child)
                found.runs += [child] if is_sought else []
                found.others += not is_sought
            elif depth == _DEEPEST or len(known) > _MOST:
                found.beyond.append(child)
            else:
                waiting.append((child, depth + 1))
    return found


def _directories_in(path: Path, found: Search) -> Iterator[Path]:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        found.of_others.append(path)
        return
    yield from (path / name for name in names if name in _HIDDEN or not name.startswith("."))


def named(paths: list[Path]) -> str:
    """Return the first ones of some paths in words."""
    shown = ", ".join(printable(str(path)) for path in paths[:_SHOWN])
    return f"{shown} and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else shown
