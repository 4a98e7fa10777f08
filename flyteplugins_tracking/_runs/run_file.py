"""`run_file=`: the file in which a job keeps the base id of its run, for a later job that goes on in the run.

One rank of the job reads and writes it: the first primary. The others get the id from that rank, through the job's
store, or read the file if the job has none. For each tracker, and each call of a process, the file has an entry:

    {"wandb": {"base_id": "9k2m", "restart_count": 1, "has_ended": false, "project": "llm", "server": "https://..."}}

`restart_count` is how many attempts of the run came before the last one. The members behind `has_ended` say where the
run is: `Tracker.place`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.board import STORE_TIMEOUT, job_board
from flyteplugins_tracking._rank.plan import plan
from flyteplugins_tracking._util.checks import check_flag, check_run_id, check_text
from flyteplugins_tracking._util.files import is_own_file, read_own, replace_whole
from flyteplugins_tracking._util.lock import NO_LOCKS, RunLock, locked
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import parse_json
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import ConfigError, IdentityError

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.call import Call
    from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

_LONGEST = 1 << 20
_POLL_S = 0.1
# How long ranks wait for the first one with a run, in seconds: it may load its data before it calls the function.
_LONGEST_WAIT_S = 600.0
# How long another call may take to write, in seconds.
_LONGEST_WRITE_S = 10.0
_UNREADABLE = "%s: run_file=%s cannot be read: %s: %s. This is a new run"
# What a file becomes that is damaged, or not such a file at all.
_UNREADABLE_SUFFIX = ".unreadable"
# On the job's board: the attempts in earlier jobs, and the id of the run that goes on, if one does. No id has
# such a character.
_KEY, _BETWEEN = "base_id", "/"


class RunFile:
    """The file of a call, on a rank that opens a run.

    Attributes:
        base_id: The base id of this job's run, found there or not; None if the tracker makes it.
        earlier: How many attempts of the run there were in earlier jobs.
    """

    base_id: str | None = None
    earlier: int = 0

    def __init__(self, call: Call, path: str) -> None:
        """Does nothing yet.

        Args:
            call: The call.
            path: Where the file is.
        """
        config, tracker = call.config, call.tracker
        self._call = call
        self._path = Path(os.path.realpath(os.path.expanduser(path)))  # of a link, the file that it leads to
        self._key = self._key_of(call.number)
        self._place = dict(tracker.place(config))
        self._lock: RunLock | None = None
        self._has_locks = True
        self._is_kept = False  # whether the next job finds this job's run in the file

    def find(self) -> str | None:
        """Return the base id of the run that goes on, the same on all ranks; None for a new run.

        Raises:
            IdentityError: The first rank with a run does not say which.
        """
        call, config = self._call, self._call.config
        is_first = plan(call.info, config.run_mode, config.rank_scope, None, primary_rank=config.primary_rank).first
        if is_first:
            self._lock = self._acquire()
        entry = self._read() if self._lock is not None or not is_first else None
        found = f"0{_BETWEEN}"
        if entry is not None:
            found = f"{max(0, entry['restart_count'] + 1 - call.attempt)}{_BETWEEN}{entry['base_id']}"
        if call.info is None:
            return self._take(found)
        board = None
        with suppress(RuntimeError):  # the store does not answer
            board = job_board(call.info, os.environ, f"run_file/{self._key}")
        if board is None:
            return self._take(found)
        if is_first:  # agents that start their ranks again keep what the first attempt has found
            return self._take(board.put_first(_KEY, found))
        begun_at = time.monotonic()
        while (text := board.get(_KEY)) is None:
            waits_s = time.monotonic() - begun_at
            if waits_s > _LONGEST_WAIT_S:
                raise IdentityError(
                    f"run_file={self._path}: the first rank with a run has not told within {_LONGEST_WAIT_S:.0f} s "
                    "which run goes on: call the decorated function on every rank, or pass id=..."
                )
            if waits_s > STORE_TIMEOUT.seconds:
                text = "%s: run_file=%s: waits until the first rank with a run calls the function, and reads the file"
                _warn_once((self._path, "waits"), text, call.tracker.name, self._path)
            time.sleep(_POLL_S)
        return self._take(text)

    def _take(self, found: str) -> str | None:
        """Take what the file has told, on this rank or on the first one. Returns the base id."""
        earlier, _, base_id = found.partition(_BETWEEN)
        check_run_id("run_file", base_id or None)
        self.earlier = int(earlier) if earlier.isdecimal() else 0
        self._is_kept = bool(base_id)
        return base_id or None

    def write(self, handle: Handle, *, has_ended: bool) -> None:
        """Keep the base id of the run, on the first primary: when the run is open, and when its training has ended.

        If earlier calls of this process have failed, this one was their retry: their training has ended with it.

        Args:
            handle: This rank's run. One that is disabled leaves the file as it is.
            has_ended: Whether the next job is a new run.
        """
        if self._lock is None or handle.is_disabled or (has_ended and not self._is_kept):
            return
        base_id = self.base_id or handle.id
        entry = {"base_id": base_id, "restart_count": self._call.attempt, "has_ended": has_ended, **self._place}
        try:
            of_all = self._path.with_name(f"{self._path.name}.lock")
            with locked(of_all, _LONGEST_WRITE_S) if self._has_locks else nullcontext():
                entries = self._entries()
                if entries is None and not is_own_file(self._path):
                    return  # another user's, a device, a FIFO or a directory, which stays
                if entries is None:
                    self._path.replace(self._path.with_name(self._path.name + _UNREADABLE_SUFFIX))
                entries = entries or {}
                if has_ended and entries.get(self._key, entry)["base_id"] != base_id:
                    return  # the directory was moved, and another job has made this file
                self._put(entries, entry)
                replace_whole(self._path, json.dumps(entries, indent=1))
                self._is_kept = True
        except OSError as error:
            text = "%s: run_file=%s cannot be written, so that the next job will not go on in run %s: %s"
            if self._is_kept:
                text = "%s: run_file=%s cannot be written, so that the next job goes on in run %s in any case: %s"
            _warn_once((self._path, base_id), text, self._call.tracker.name, self._path, base_id, error)

    def release(self) -> None:
        """Let another job use the file."""
        if self._lock is not None:
            self._lock.release()

    def _acquire(self) -> RunLock | None:
        name = self._call.tracker.name
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = RunLock.of_file(self._lock_of(self._key), self._call.config.init_timeout_s / 2)
        except OSError as error:
            if error.errno in NO_LOCKS:
                text = "%s: run_file=%s: its file system has no locks, so no other job may use it at the same time"
                logger.warning(text, name, self._path)
                self._has_locks = False
                return RunLock()
            logger.warning("%s: run_file=%s cannot be used: %s. This is a new run", name, self._path, error)
            return None
        if lock is None:
            logger.warning("%s: run_file=%s is used by another job: this is a new run", name, self._path)
        return lock

    def _key_of(self, number: int) -> str:
        name = self._call.tracker.name
        return name if number == 1 else f"{name}-{number}"

    def _lock_of(self, key: str) -> Path:
        """Return the file that whoever uses an entry has locked: stacked decorators may have one run file."""
        return self._path.with_name(f"{self._path.name}.{key}.lock")

    def _put(self, entries: dict[str, Any], entry: dict[str, Any]) -> None:
        """Put this call's entry in, and change those of other calls that follow from it."""
        number = self._call.number
        entries[self._key] = entry
        if entry["has_ended"]:  # it was the retry of those that have failed
            for key in self._unused(entries, range(1, number)):
                entries[key] = {**entries[key], "has_ended": True}
        if not self._is_kept:  # a new run: the next call need not be what it was in an earlier job
            for key in self._unused(entries, range(number + 1, number + 1 + len(entries))):
                if not entries[key]["has_ended"]:
                    del entries[key]

    def _unused(self, entries: dict[str, Any], numbers: range) -> list[str]:
        """Return the keys of the calls with these numbers that no process runs just now; none if that is unknown."""
        unused = []
        for key in map(self._key_of, numbers if self._has_locks else ()):
            lock = RunLock.of_file(self._lock_of(key)) if key in entries else None
            if lock is not None:
                lock.release()
                unused.append(key)
        return unused

    def _read(self) -> dict[str, Any] | None:
        """Return the entry of the run that goes on; None for a new run."""
        call = self._call
        entry: dict[str, Any] | None = (self._entries() or {}).get(self._key)
        if entry is None or entry["has_ended"]:
            return None
        place = {name: entry.get(name) for name in self._place}
        if place != self._place:
            text = (
                "%s: run_file=%s is of another place, %s: this is a new run, in %s. The file does not keep %s any more"
            )
            logger.warning(text, call.tracker.name, self._path, place, self._place, entry["base_id"])
            return None
        try:
            call.tracker.check(replace(call.config, id=entry["base_id"], run_file=None))
        except ConfigError as error:
            logger.warning(_UNREADABLE, call.tracker.name, self._path, "ConfigError", error)
            return None
        return entry

    def _entries(self) -> dict[str, Any] | None:
        """Return what the file has; None, with a warning, if it is damaged, or not this user's, or not such a file."""
        try:
            entries: dict[str, Any] = parse_json(read_own(self._path, _LONGEST).decode())
            for entry in entries.values():
                check_text("base_id", entry["base_id"], is_optional=False)
                check_run_id("base_id", entry["base_id"])
                check_flag("has_ended", entry["has_ended"])
                if not isinstance(entry["restart_count"], int):
                    raise TypeError(f"restart_count is {entry['restart_count']!r}")
            return entries
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            name = self._call.tracker.name
            renamed = f", and when it is open, the file is renamed to {self._path.name}{_UNREADABLE_SUFFIX}"
            text, more = f"{_UNREADABLE}%s", renamed if is_own_file(self._path) else ""
            _warn_once(self._path, text, name, self._path, type(error).__name__, error, more)
            return None
