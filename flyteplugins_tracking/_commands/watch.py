"""`flyteplugins-tracking send --watch DIRECTORY...`: send what runs log, while they log it.

A compute node without a network writes what it always writes: W&B's own file, or journals. This process sees the same
disk and the service. It looks again and again. A run whose writer lives is open at its service, and gets what is new
(`trackers.wandb.live`, `OutboxHandle.follow`). One that has ended, and was never open here, is sent as `send` does.
What is sent, `send` and the job's next attempt know too: this process may be killed at any time.

A writer lives while it holds the lock of its journal, or while its files change. By this process's own clock: that of
another node may differ.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from flyteplugins_tracking._commands.directories import SENT, Found, has_unsent, hold, require_unwatched
from flyteplugins_tracking._commands.send import (
    attempts_of,
    journals_in,
    open_run,
    remove_empty,
    require_servers,
    send_directory,
)
from flyteplugins_tracking._util.files import touch_own
from flyteplugins_tracking._util.fork import OwnLock, register
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking.errors import TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.journal import SUFFIX, StoredJournal, files_in, stored
from flyteplugins_tracking.trackers.kept import OutboxHandle
from flyteplugins_tracking.trackers.wandb import datastore, live, outbox
from flyteplugins_tracking.trackers.wandb import send as wandb_files

# How many runs are sent at once that have ended, and how many are open at the most: each may wait for its service.
_ENDED, _OPEN = 1, 256
_printing = register(OwnLock())


class Watched(ABC):
    """A run that is looked at again and again: found, open at its service, ended.

    Attributes:
        directories: What is not sent of it, in the order of the attempts; of W&B, other ranks before the primary.
        opened: The run at its service; None if it is not open there.
        rows: How many rows were sent.
        error: What keeps it from being sent; empty for nothing.
        is_refused: Whether that does not pass.
        is_whole: Whether the service has rejected none of its rows.
        is_written: Whether its writer may live.
    """

    opened: Any = None
    doing: Future[None] | None = None
    rows, error, is_refused, is_whole, is_written = 0, "", False, True, True

    def __init__(self, name: str, watched: Collection[Path]) -> None:
        """`watched` are the directories that this process watches."""
        self.name, self.directories, self._watched = name, list[Path](), watched
        self._seen: object = None
        self._sign_at = 0.0

    @abstractmethod
    def has_end(self) -> bool:
        """Whether its last process has kept the status with which it has ended."""

    @abstractmethod
    def send(self) -> str:
        """Send what is new, and end a run that is not written. Returns what was done then, in words."""

    def look(self, killed_s: float) -> None:
        """See whether its writer lives. It is killed so many seconds after its last sign of life."""
        files = [path for one in self.directories for glob in ("*.wandb", f"*{SUFFIX}") for path in one.glob(glob)]
        seen = [(path, (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
        is_held = any(StoredJournal({}, path).is_open() for path in files if path.name.endswith(SUFFIX))
        has_changed = seen != self._seen
        is_sign = is_held or (has_changed and self._seen is not None)
        if is_held or has_changed:
            self._seen, self._sign_at = seen, time.monotonic()
        # To look for its end, a whole file is read: not of a run that was written since.
        self.is_written = is_sign or not (time.monotonic() > self._sign_at + killed_s or self.has_end())

    def act(self) -> None:
        """Send what is new, and the end of a run that has ended."""
        try:
            was_open = self.opened is not None
            if not was_open:
                require_unwatched(self.directories[0], self._watched)
            text = self.send()
            if text or (self.opened is not None and not was_open):
                self._say(text or "is open: what it logs is sent")
            self.error, self.is_refused = "", False
        except Exception as error:  # the others go on
            if isinstance(error, FileNotFoundError) and str(error.filename).startswith(str(self.directories[0])):
                return  # its job, or its next attempt, takes it away just now
            kind = "" if isinstance(error, (TrackingError, ValueError)) else f"{type(error).__name__}: "
            text = f"not sent: {kind}{first_line(error)}"
            if text != self.error:
                self._say(text)
            self.error, self.is_refused = text, not getattr(error, "is_outage", not isinstance(error, ValueError))

    @property
    def is_busy(self) -> bool:
        """Whether a thread acts on it."""
        return self.doing is not None and not self.doing.done()

    def _say(self, text: str) -> None:
        _print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}\n")


class WandbRun(Watched):
    """The directories of a W&B run."""

    def has_end(self) -> bool:
        return outbox.attempt_at(self.directories[-1]).exit_code is not None

    def send(self) -> str:
        if self._is_online():
            self.opened = None
        elif self.opened is None and self.is_written and any(map(_is_described, self.directories)):
            self.opened = live.LiveRun(self.directories)
        if not self.is_written:
            return self._finish()
        if self.opened is not None:
            try:
                self.rows += self.opened.send(self.directories)
            except Exception as error:
                if self.opened.is_lost(error):
                    self.opened = None
                raise
        return ""

    def _finish(self) -> str:
        run, self.opened = self.opened, None
        exit_code = None if run is None else run.finish(self.directories)
        # What was never open here; and in a run with several writers, what W&B lacks.
        left = [path for path in self.directories if not outbox.is_synced(path) or stored(path)]
        texts = [wandb_files.send(path, self.directories) for path in left]
        return "\n".join(texts) if exit_code is None else _ended(exit_code)

    def _is_online(self) -> bool:
        """Whether an attempt of the job writes it that has the service, and sends what others have left."""
        return not all(map(outbox.is_offline, self.directories))


class KeptRun(Watched):
    """The directory with the journals of a run of another tracker."""

    _attempt = ""  # the first journal of the one that is open
    _waits_for_end = False  # whether its tracker cannot follow a journal
    _paths: Sequence[Path] = ()
    _journals: Sequence[StoredJournal] = ()

    def has_end(self) -> bool:
        return any("exit_code" in line for last in self._attempts()[-1:] for line in last[0].lines())

    def send(self) -> str:
        attempts = self._attempts()
        online = [one for one in self._journals if not one.header.get("is_kept", True)]
        if any(one.is_open() for one in online):  # an attempt that has the service sends what others have left
            self.opened = None
            return ""
        if not self.is_written and self.opened is None and (online or not attempts or self._waits_for_end):
            return send_directory(self.directories[0])
        if self._waits_for_end:
            return ""
        exit_code = 1
        for attempt in attempts:
            is_last = attempt is attempts[-1]
            is_written = self.is_written if is_last else any(journal.is_open() for journal in attempt)
            self.rows += self._open(attempt).follow(attempt, is_written=is_written)
            if is_written:  # a later attempt's rows come behind all of an earlier one
                return ""
            exit_code = self._end(attempt, ends_run=is_last)
        return _ended(exit_code)

    def _attempts(self) -> list[list[StoredJournal]]:
        paths = files_in(self.directories[0])
        if paths != self._paths:  # a journal is read as a whole for its header
            self._journals, self._paths = journals_in(self.directories[0]), paths
        return list(attempts_of(self._journals))

    def _open(self, attempt: Sequence[StoredJournal]) -> OutboxHandle:
        if self.opened is None or self._attempt != attempt[0].name:
            require_servers(self.directories[0], attempt)
            handle, self._attempt = open_run(attempt, follows=True), attempt[0].name
            if not isinstance(handle, OutboxHandle):
                self._waits_for_end = True
                raise TrackerUnavailableError("a run of this tracker is sent when it has ended")
            self.opened = handle
        return cast("OutboxHandle", self.opened)

    def _end(self, attempt: Sequence[StoredJournal], *, ends_run: bool) -> int:
        handle, self.opened = self._open(attempt), None
        handle.ends_run = ends_run and handle.request.plan.role is None
        exit_code = handle.exit_code_of(attempt)
        handle.finish(exit_code)
        if str(attempt[0].path.parent) in handle.unsent():
            raise TrackerUnavailableError("the service has not taken the run's end")
        touch_own(self.directories[0] / SENT)
        for journal in attempt:
            handle.before_removal(journal)
            journal.remove(is_bad=handle.rejected_rows > 0)
        if ends_run:
            remove_empty(self.directories[0])
        if handle.rejected_rows:
            self.is_whole = False
            self._say(f"the service rejects {handle.rejected_rows} rows: the files are kept as *.bad")
        return exit_code


class Watcher:
    """Looks at the runs of directories.

    Attributes:
        runs: Those that are not sent, by their names.
    """

    _sent, _is_whole, _problem, _is_away = 0, True, "", False

    def __init__(self, paths: Sequence[Path], killed_s: float) -> None:
        self.runs: dict[str, Watched] = {}
        self._paths, self._watched = paths, [path.resolve() for path in paths]
        self._killed_s = killed_s
        self._of_ended, self._of_open = ThreadPoolExecutor(_ENDED), ThreadPoolExecutor(_OPEN)

    def look(self) -> None:
        """Find runs, and have each send what is new, beside the others."""
        found: dict[str, list[Path]] = {}
        before, self._problem, self._is_away = self._problem, "", False
        try:
            for path in self._find():
                found.setdefault(_name_of(path), []).append(path)
        except (TrackingError, OSError) as error:  # too many directories, or a file system that is away
            self._problem, self._is_away = str(error), isinstance(error, OSError)
        if self._problem not in ("", before):
            _print(f"{time.strftime('%H:%M:%S')} {self._problem}\n")
        for name in [name for name, run in self.runs.items() if not (name in found or run.is_busy or self._is_away)]:
            run = self.runs.pop(name)
            self._sent, self._is_whole = self._sent + run.rows, self._is_whole and run.is_whole and not run.is_refused
        for name, paths in found.items():
            kind = WandbRun if wandb_files.is_run_directory(paths[0]) else KeptRun
            run = self.runs.setdefault(name, kind(name, self._watched))
            if run.is_busy:
                continue
            run.directories = wandb_files.in_order(paths)
            with suppress(ValueError, OSError):  # it goes just now
                run.look(self._killed_s)
            run.doing = (self._of_open if run.is_written or run.opened else self._of_ended).submit(run.act)

    def _find(self) -> Iterator[Path]:
        for path in self._paths:
            path.stat()
        found = Found(self._paths, is_watched=True)
        yield from filter(has_unsent, found.runs)
        found.require_all_seen()

    @property
    def is_done(self) -> bool:
        """Whether no run is open, and all is sent, or refused."""
        runs = self.runs.values()
        return not (self._is_away or any(run.is_busy or run.is_written or not run.is_refused for run in runs))

    @property
    def is_all_sent(self) -> bool:
        """Whether everything that there was is sent."""
        return self._is_whole and not (self.runs or self._problem)

    def __str__(self) -> str:
        runs = list(self.runs.values())
        count, waiting = sum(run.opened is not None for run in runs), sum(bool(run.error) for run in runs)
        rows = self._sent + sum(run.rows for run in runs)
        return f"{len(runs)} runs, {count} open, {waiting} with an error, {rows} rows sent, {time.strftime('%H:%M:%S')}"


def watch(paths: Sequence[Path], interval_s: float, killed_s: float, *, until_done: bool) -> int:
    """Send what runs in and below directories log, until a signal comes. Returns the exit status of the process.

    Args:
        paths: The directories.
        interval_s: The time between two looks, in seconds.
        killed_s: The time after its last sign of life when a writer counts as killed, in seconds.
        until_done: Whether to end when no run is open and all is sent.

    Raises:
        TrackerUnavailableError: Another process watches one of them.
    """
    for path in paths:
        require_unwatched(path)
    held = [hold(path) for path in paths]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_process)
    watcher = Watcher(paths, killed_s)
    while True:
        watcher.look()
        if sys.stdout.isatty():
            _print(str(watcher))
        if until_done and watcher.is_done:
            break
        time.sleep(interval_s)
    for lock in held:
        lock.release()
    return int(not watcher.is_all_sent)


def _end_process(number: int, _: object) -> None:
    """End at once, whatever is under way and wherever it waits: the next one sends it."""
    with suppress(OSError):
        os.write(1, f"ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def _ended(exit_code: int) -> str:
    return f"has ended with exit code {exit_code}, and is sent"


def _is_described(directory: Path) -> bool:
    """Whether W&B's client has written which run it is, and there is a row. Its first rows are in a journal before."""
    return datastore.description(directory) is not None and any(True for _ in outbox.attempt_at(directory).rows())


def _name_of(directory: Path) -> str:
    """Return the name of the run of a directory: those of W&B may be of one run. A role has an end of its own."""
    if not wandb_files.is_run_directory(directory):
        return str(directory)
    role = "" if wandb_files.is_rank(directory) else f", {wandb_files.label_in(directory)}"
    return f"{directory.parent / outbox.run_id_of(directory)}{role}"


def _print(text: str) -> None:
    """Print a line; on a terminal over the one with the state."""
    with _printing.lock:
        sys.stdout.write(f"\r\033[K{text}" if sys.stdout.isatty() else text)
        sys.stdout.flush()
