"""`flyteplugins-tracking send --watch DIRECTORY...`: send what runs log, while they log it.

A compute node without a network writes what it always writes: W&B's own file. This process sees the same disk, and
W&B. It looks again and again. A run whose writer lives is open at W&B, and gets what is new (`trackers.wandb.sender`).
One that has ended, and was never open here, is sent as `send` does. What is sent, `send` and the job's next attempt
know too: this process may be killed at any time. Runs of other trackers are named, and left to `send`.

A writer lives while it holds the lock of its journal, or while its files change. By this process's own clock: that of
another node may differ.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from flyteplugins_tracking._commands.directories import Found, has_unsent, hold, noting, require_unwatched
from flyteplugins_tracking._util.text import causes, first_line, printable, without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.journal import SUFFIX, StoredJournal
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.wandb import attempts as wandb_files
from flyteplugins_tracking.trackers.wandb import datastore, sender, vendor

# How many runs are sent at once that have ended, and how many are open at the most: each may wait for its service.
_ENDED, _OPEN = 4, 256
# After how long a run is opened again whose rows W&B has refused, in seconds.
_AGAIN_S = 300.0
# The errors of a directory that cannot be used, or of another user's file: they do not pass by themselves.
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)
# What is said of a directory that has rows of another tracker.
_OF_OTHERS = (
    "runs of MLflow, Pluto and Trackio are not watched. Send them when the attempt has ended, for instance from cron"
)


class WatchedRun:
    """A W&B run that is looked at again and again: found, open at W&B, ended.

    Attributes:
        directories: What is not sent of it, in the order of `in_order`: other ranks behind the primary.
        opened: The run at W&B; None if it is not open there.
        error: What keeps it from being sent; empty for nothing.
        is_refused: Whether that does not pass.
        is_written: Whether its writer may live.
    """

    opened: sender.Sender | None = None
    doing: Future[None] | None = None
    error, is_refused, is_written = "", False, True

    def __init__(self, name: str, watched: Collection[Path]) -> None:
        """`watched` are the directories that this process watches."""
        self.name, self.directories, self._watched = name, list[Path](), watched
        self._again_at = 0.0  # when it is opened again, since W&B has not taken its rows
        self._seen: object = None
        self._sign_at = 0.0

    def look(self, directories: list[Path], killed_s: float) -> None:
        """See whether its writer lives. It is killed so many seconds after its last sign of life."""
        self.directories = directories
        files = [path for one in self.directories for glob in ("*.wandb", f"*{SUFFIX}") for path in one.glob(glob)]
        seen = [(path, (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
        is_held = any(StoredJournal({}, path).is_open() for path in files if path.name.endswith(SUFFIX))
        has_changed = seen != self._seen
        is_sign = is_held or (has_changed and self._seen is not None)
        if is_held or has_changed:
            self._seen, self._sign_at = seen, time.monotonic()
        # To look for its end, a whole file is read: not of a run that was written since.
        self.is_written = is_sign or not (time.monotonic() > self._sign_at + killed_s or self._has_end())

    def act(self) -> None:
        """Send what is new, and the end of a run that has ended."""
        if self.is_written and time.monotonic() < self._again_at:
            return
        try:
            was_open = self.opened is not None
            if not was_open:
                self.require_usable()
            text = self._send()
            if text or (self.opened is not None and not was_open):
                _print(f"{self.name}: {text or 'is open: what it logs is sent'}")
            self.error, self.is_refused = "", False
        except Exception as error:  # the others go on
            if isinstance(error, FileNotFoundError) and str(error.filename).startswith(str(self.directories[0])):
                return  # its job, or its next attempt, takes it away just now
            kind = "" if isinstance(error, (TrackingError, ValueError)) else f"{type(error).__name__}: "
            text = f"not sent: {kind}{first_line(error)}"
            if text != self.error:
                _print(f"{self.name}: {text}")
            is_of_disk = any(getattr(one, "errno", None) in _LASTING for one in causes(error))
            self.error = text
            may_pass = not isinstance(error, ValueError) and vendor.is_outage(error)
            self.is_refused = is_of_disk or not getattr(error, "is_outage", may_pass)

    def require_usable(self) -> None:
        """Refuse what cannot be opened here.

        Raises:
            TrackerUnavailableError: Another process watches it, or there is no key.
        """
        require_unwatched(self.directories[0], self._watched)
        # Settings that another thread loads just now still name W&B's own server, which would get the key.
        with vendor.opening.lock:
            server = vendor.session().settings.base_url
        if not vendor.has_credentials(server):  # W&B's client would ask for one in the terminal
            text = f"there is no API key for {without_credentials(server)}: run `wandb login`, or set WANDB_API_KEY"
            raise TrackerUnavailableError(text, is_outage=False)

    @property
    def is_busy(self) -> bool:
        """Whether a thread acts on it."""
        return self.doing is not None and not self.doing.done()

    def let_go(self) -> None:
        """Leave the run as it is: another process writes it, or its files are not here any more."""
        if self.opened is not None:
            self.opened.let_go()
        self.opened = None

    def _has_end(self) -> bool:
        """Whether its last process has kept the status with which it has ended."""
        primary = [path for path in self.directories if not wandb_files.label_in(path)] or self.directories
        return wandb_files.Attempt.at(primary[-1]).exit_code is not None

    def _send(self) -> str:
        """Send what is new, and end a run that is not written. Returns what was done then, in words."""
        if self._is_online():
            self.let_go()
        elif self.opened is None and self.is_written and any(map(_is_described, self.directories)):
            self.opened = sender.Sender.open(self.directories)
        if not self.is_written:
            return self._finish()
        if self.opened is not None:
            try:
                self.opened.send(self.directories, is_written=True)
            except Exception as error:
                if self.opened.is_lost(error):
                    self.opened = None
                raise
            if refusal := self.opened.refusal:
                self._again_at = time.monotonic() + _AGAIN_S
                self.let_go()
                text = f"W&B does not take the rows that it gets: {refusal}. The run is opened again later"
                raise TrackerUnavailableError(text)
        return ""

    def _finish(self) -> str:
        run, self.opened = self.opened, None
        exit_code = None if run is None else run.finish(self.directories)
        # What was never open here; and in a run with several writers, what W&B lacks.
        left = list(filter(has_unsent, self.directories))
        texts = list(map(sender.send, left))
        return "\n".join(texts) if exit_code is None else f"has ended with exit code {exit_code}, and is sent"

    def _is_online(self) -> bool:
        """Whether an attempt of the job writes it that has the service, and sends what others have left."""
        return not all(map(wandb_files.is_offline, self.directories))


class Watcher:
    """Looks at the runs of directories.

    Attributes:
        runs: Those that are not sent, by their names and projects.
    """

    def __init__(self, paths: Sequence[Path], killed_s: float) -> None:
        """Take the directories.

        Raises:
            TrackerUnavailableError: Another process watches one of them.
            OSError: One cannot be locked.
        """
        for path in paths:
            hold(path)
        self._away: dict[Path, str] = {}  # what cannot be looked at now, with the reason
        self._problems, self._said = list[str](), list[str]()  # at the last look
        self.runs: dict[tuple[str, str], WatchedRun] = {}
        self._paths, self._watched = paths, [path.resolve() for path in paths]
        self._killed_s = killed_s
        self._of_ended, self._of_open = ThreadPoolExecutor(_ENDED), ThreadPoolExecutor(_OPEN)

    def look(self) -> None:
        """Find runs, and have each send what is new, beside the others.

        Raises:
            ValueError: A directory is not there any more.
        """
        datastore.close()
        found = self._find()
        _require_directories([path for path in self._paths if path not in self._away])  # what has vanished has no runs
        for key in [key for key, run in self.runs.items() if not (key in found or run.is_busy or self._away)]:
            self._of_open.submit(self.runs.pop(key).let_go)
        for key, paths in found.items():
            run = self.runs.setdefault(key, WatchedRun(key[0], self._watched))
            if run.is_busy:
                continue
            with suppress(ValueError, OSError):  # it goes just now
                run.look(wandb_files.in_order(paths), self._killed_s)
            if run.directories:
                run.doing = (self._of_open if run.is_written or run.opened else self._of_ended).submit(run.act)

    def _find(self) -> dict[tuple[str, str], list[Path]]:
        """Return what is to be sent of each run. What cannot be looked at now is looked at again.

        Says once which directories have no run, or are another user's; and each problem when it comes.
        """
        looked = Found(self._paths, is_watched=True)
        self._away = looked.away
        found: dict[tuple[str, str], list[Path]] = {}
        of_others: list[str] = []
        for path in looked.runs:
            with noting(self._away, path):
                if not has_unsent(path):
                    continue
                if wandb_files.is_run_directory(path):
                    found.setdefault((_name_of(path), wandb_files.project_of(path)), []).append(path)
                else:
                    of_others.append(f"{_OF_OTHERS}: {how_to_send(str(path))}")
        self._problems = [*self._away.values(), *of_others]
        known, self._said = self._said, [*looked.texts, *self._problems]
        for text in self._said:
            if text not in known:
                _print(text)
        return found

    @property
    def is_done(self) -> bool:
        """Whether no run is open, and all is sent, or refused."""
        runs = self.runs.values()
        return not (self._away or any(run.is_busy or run.is_written or not run.is_refused for run in runs))

    @property
    def is_all_sent(self) -> bool:
        """Whether everything that there was is sent."""
        return not (self.runs or self._problems)


def watch(paths: Sequence[Path], interval_s: float, killed_s: float, *, until_done: bool) -> NoReturn:
    """Send what runs in and below directories log, until a signal comes. Ends the process.

    Args:
        paths: The directories.
        interval_s: The time between two looks, in seconds.
        killed_s: The time after its last sign of life when a writer counts as killed, in seconds.
        until_done: Whether to end when no run is open and all is sent.

    Raises:
        TrackerUnavailableError: Another process watches one of them.
        ValueError: One is not there.
    """
    paths = list({path.resolve(): path for path in paths}.values())
    _require_directories(paths)
    for path in paths:
        require_unwatched(path)
    watcher = Watcher(paths, killed_s)
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends at once, wherever it waits: the next one sends the rest
        signal.signal(number, lambda number, _: os._exit(128 + number))
    exit_code = 1
    try:
        while True:
            watcher.look()
            time.sleep(interval_s)
            if until_done and watcher.is_done:  # what is refused is tried again at each look
                break
        exit_code = int(not watcher.is_all_sent)
    except (TrackingError, ValueError) as error:
        sys.stderr.write(f"cannot send: {printable(str(error))}\n")
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(exit_code)  # at the interpreter's exit, W&B's client would end the open runs, whose jobs still log


def _require_directories(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory")


def _is_described(directory: Path) -> bool:
    """Whether W&B's client has written which run it is, and a row. A journal may be long, and is not read for that."""
    return datastore.description(directory) is not None and datastore.head_of(directory).first is not None


def _name_of(directory: Path) -> str:
    """Return the name of the run of a directory: several may be of one run. A role has an end of its own."""
    role = "" if wandb_files.is_rank(directory) else f", {wandb_files.label_in(directory)}"
    return f"{directory.parent / wandb_files.run_id_of(directory)}{role}"


def _print(text: str) -> None:
    """Print a line, with the time. Nothing, if nobody reads."""
    with suppress(OSError):
        if sys.stdout is not None:
            sys.stdout.write(printable(f"{time.strftime('%H:%M:%S')} {text}\n"))
            sys.stdout.flush()
