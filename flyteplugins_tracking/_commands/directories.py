"""The directories of runs in and below those that `send` is given."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flyteplugins_tracking._runs.opening import require
from flyteplugins_tracking._util.files import is_own_directory, is_own_file
from flyteplugins_tracking._util.lock import RunLock, holder_of
from flyteplugins_tracking._util.text import listed
from flyteplugins_tracking.errors import TrackerNotInstalledError, TrackerUnavailableError
from flyteplugins_tracking.trackers.journal import files_in
from flyteplugins_tracking.trackers.registry import find_tracker
from flyteplugins_tracking.trackers.wandb import attempts as wandb_files

# The file that says of an empty directory that its run was sent.
SENT = "flyteplugins-tracking-sent"
# W&B's own directory may have the first name. Others that begin with a dot have environments, caches and repositories.
_HIDDEN = (".wandb",)
_SHOWN = 5
# The file that the one watcher of a directory holds the lock of. It says which.
_LOCK = ".flyteplugins-tracking-watch"


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, of any tracker.

    Raises:
        TrackerNotInstalledError: It is one of W&B, whose client is missing.
    """
    if wandb_files.is_run_directory(directory):
        _require_wandb()
        return True
    return is_own_file(directory / SENT) or bool(files_in(directory))


@functools.cache
def _require_wandb() -> None:
    """Asked once: it looks up the installed versions, and a watcher looks at each directory every few seconds."""
    require(find_tracker("wandb"))


def has_unsent(directory: Path) -> bool:
    """Whether the directory of a run has what was not sent yet."""
    return bool(files_in(directory)) or wandb_files.is_unsent(directory)


def require_unwatched(directory: Path, own: Collection[Path] = ()) -> None:
    """Refuse a directory that another process watches, or one above it.

    Args:
        directory: The directory.
        own: Those that this process watches.

    Raises:
        TrackerUnavailableError: It does.
    """
    resolved = directory.resolve()
    for watched in (resolved, *resolved.parents):
        if watched not in own and (watched / _LOCK).exists():
            with suppress(OSError):  # another user's
                hold(watched).release()


def hold(directory: Path) -> RunLock:
    """Lock a directory for its one watcher.

    Raises:
        TrackerUnavailableError: Another process holds the lock.
        OSError: The directory cannot be used.
    """
    path = directory / _LOCK
    lock = RunLock.of_any_file(path)
    if lock is None:
        raise TrackerUnavailableError(f"{directory} is watched already: {holder_of(path)} sends what its runs log")
    return lock


@contextmanager
def noting(away: dict[Path, str], path: Path) -> Iterator[None]:
    """Note why a path cannot be looked at now, such as that its disk does not answer. It does not keep others from it.

    One that was removed just now is not noted.
    """
    try:
        yield
    except FileNotFoundError:
        pass
    except TrackerNotInstalledError:  # it would be said of each run
        raise
    except Exception as error:
        away[path] = f"{path} cannot be looked at now: {type(error).__name__}: {error}"


class Found:
    """The directories of runs in and below those that were given.

    Attributes:
        runs: Those to send, by where they are.
        texts: What is to be said of the directories that have none.
        away: What could not be looked at, or is not sent now, with the reason.
    """

    def __init__(self, paths: Sequence[Path], *, is_watched: bool = False) -> None:
        """Look for them. Below a given directory, those count that have something to send.

        Args:
            paths: The directories.
            is_watched: Whether those count too to which a process may still log.
        """
        self._is_watched = is_watched
        self.runs: dict[Path, Path] = {}
        self.texts: list[str] = []
        self.away: dict[Path, str] = {}
        self._of_others: list[Path] = []  # another user's, or not to be read
        for path in paths:
            with noting(self.away, path):
                if is_own := is_run(path) or not path.is_dir():  # a file that looks like a run's hides none below
                    self.runs.setdefault(path.resolve(), path)
                if path.is_dir():
                    self._look_below(path, is_own)
        if self._of_others:
            names = listed([str(path) for path in self._of_others], _SHOWN)
            self.texts.append(f"left out, as another user's or not to be read: {names}")

    def _look_below(self, path: Path, is_own: bool) -> None:
        runs = list(self._runs_below(path, {path.resolve()}))
        wanted = [run for run in runs if has_unsent(run)]
        for run in wanted:
            if not self._is_watched and wandb_files.Attempt.at(run).may_be_written():
                text = "has no end, and was written to just now: send it later, or name it if its process was killed"
                self.away[run] = f"{run} {text}"
            else:
                self.runs.setdefault(run.resolve(), run)
        if runs and not (wanted or is_own or self._is_watched):
            self.texts.append(f"{path} has nothing that is not sent yet: looked at the {len(runs)} runs below it")
        elif not (runs or is_own):
            text = "has no rows, and nothing to send. The local databases of MLflow and Trackio are not sent"
            self.texts.append(f"{path} {text}")

    def _runs_below(self, path: Path, known: set[Path]) -> Iterator[Path]:
        """Yield the runs below a directory. Links of this user are followed to directories of this user."""
        for child in self._directories_in(path):
            with noting(self.away, child):
                resolved = child.resolve()
                if resolved in known:
                    continue
                known.add(resolved)
                if not (is_own_directory(resolved) and child.lstat().st_uid == os.geteuid()):
                    self._of_others.append(child)
                    continue
                child = resolved if child.is_symlink() else child
                if is_run(child):
                    yield child
                else:
                    yield from self._runs_below(child, known)

    def _directories_in(self, path: Path) -> list[Path]:
        try:
            with os.scandir(path) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir())
        except PermissionError:
            self._of_others.append(path)
            return []
        return [path / name for name in names if name in _HIDDEN or not name.startswith(".")]
