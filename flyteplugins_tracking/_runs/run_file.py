"""`run_file=`: the file in which a job keeps the base id of its run, for a later job that goes on in the run.

One rank of the job reads and writes it: the first primary. The others get the id from that rank, through the job's
store, or read the file if the job has none. For each tracker, and each call of a process, the file has an entry:

    {"wandb": {"base_id": "9k2m", "project": "llm", "server": "https://api.wandb.ai", "has_ended": false}}

The other members say where the run is: `Tracker.place`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.board import STORE_TIMEOUT, job_board
from flyteplugins_tracking._rank.plan import needs_shared_id, plan
from flyteplugins_tracking._util.checks import check_flag, check_run_id, check_text
from flyteplugins_tracking._util.files import read_own, replace_whole
from flyteplugins_tracking._util.lock import RunLock, locked
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
# How long another call may take to write, in seconds.
_LONGEST_WRITE_S = 10.0
_UNREADABLE = "%s: run_file=%s cannot be read: %s: %s. This is a new run"
# On the job's board: the id of the run that goes on, or that there is none. No id has such a character.
_KEY, _NEW_RUN = "base_id", "/"


class RunFile:
    """The file of a call, on a rank that opens a run.

    Attributes:
        base_id: The base id of this job's run, found there or not; None if the tracker makes it.
    """

    base_id: str | None = None

    def __init__(self, call: Call, path: str) -> None:
        """Does nothing yet.

        Args:
            call: The call.
            path: Where the file is.
        """
        config, tracker = call.config, call.tracker
        self._call = call
        self._path = Path(os.path.expanduser(path)).absolute()
        self._key = self._key_of(call.number)
        self._place = dict(tracker.place(config))
        self._lock: RunLock | None = None

    def find(self) -> str | None:
        """Return the base id of the run that goes on, the same on all ranks; None for a new run.

        Raises:
            IdentityError: The first rank with a run does not say which.
        """
        call, config = self._call, self._call.config
        is_first = plan(call.info, config.run_mode, config.rank_scope, None, primary_rank=config.primary_rank).first
        if is_first:
            self._lock = self._acquire()
        found = self._read() if self._lock is not None or not is_first else None
        if call.info is None or not needs_shared_id(call.info, config.run_mode, config.rank_scope):
            return found
        board = None
        with suppress(RuntimeError):  # the store does not answer
            board = job_board(call.info, os.environ, f"run_file/{self._key}")
        if board is None:
            return found
        if is_first:
            return board.put_first(_KEY, found or _NEW_RUN).removeprefix(_NEW_RUN) or None
        deadline = time.monotonic() + STORE_TIMEOUT.seconds
        while (text := board.get(_KEY)) is None:
            if time.monotonic() > deadline:
                raise IdentityError(
                    f"run_file={self._path}: the first rank with a run has not told within {STORE_TIMEOUT.seconds} s "
                    "which run goes on: call the decorated function on every rank, or pass id=..."
                )
            time.sleep(_POLL_S)
        check_run_id("run_file", text.removeprefix(_NEW_RUN) or None)
        return text.removeprefix(_NEW_RUN) or None

    def write(self, handle: Handle, *, has_ended: bool) -> None:
        """Keep the base id of the run, on the first primary: when the run is open, and when its training has ended.

        If earlier calls of this process have failed, this one was their retry: their training has ended with it.

        Args:
            handle: This rank's run. One that is disabled leaves the file as it is.
            has_ended: Whether the next job is a new run.
        """
        if self._lock is None or handle.is_disabled:
            return
        base_id = self.base_id or handle.id
        entry = {"base_id": base_id, **self._place, "has_ended": has_ended}
        try:
            with locked(self._path.with_name(f"{self._path.name}.lock"), _LONGEST_WRITE_S):
                entries = self._entries()
                if has_ended and entries.get(self._key, entry)["base_id"] != base_id:
                    return  # the directory was moved, and another job has made this file
                entries[self._key] = entry
                for key in self._failed_calls(entries) if has_ended else ():
                    entries[key] = {**entries[key], "has_ended": True}
                replace_whole(self._path, json.dumps(entries, indent=1))
        except OSError as error:
            text = "%s: run_file=%s cannot be written, so that the next job will not go on in run %s: %s"
            logger.warning(text, self._call.tracker.name, self._path, base_id, error)

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

    def _failed_calls(self, entries: dict[str, Any]) -> Iterator[str]:
        """Yield the keys of earlier calls of this process that do not run any more, and have not ended with success."""
        for key in map(self._key_of, range(1, self._call.number)):
            lock = RunLock.of_file(self._lock_of(key)) if key in entries else None
            if lock is not None:
                lock.release()
                yield key

    def _read(self) -> str | None:
        call, entry = self._call, self._entries().get(self._key)
        if entry is None or entry["has_ended"]:
            return None
        place = {name: entry.get(name) for name in self._place}
        if place != self._place:
            text = "%s: run_file=%s is of another place, %s: this is a new run, in %s"
            logger.warning(text, call.tracker.name, self._path, place, self._place)
            return None
        try:
            call.tracker.check(replace(call.config, id=entry["base_id"], run_file=None))
        except ConfigError as error:
            logger.warning(_UNREADABLE, call.tracker.name, self._path, "ConfigError", error)
            return None
        return str(entry["base_id"])

    def _entries(self) -> dict[str, Any]:
        """Return what the file has; nothing, with a warning, if it is damaged, or not this user's."""
        try:
            entries: dict[str, Any] = parse_json(read_own(self._path, _LONGEST).decode())
            for entry in entries.values():
                check_text("base_id", entry["base_id"], is_optional=False)
                check_run_id("base_id", entry["base_id"])
                check_flag("has_ended", entry["has_ended"])
            return entries
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            name = self._call.tracker.name
            _warn_once(str(self._path), _UNREADABLE, name, self._path, type(error).__name__, error)
        return {}
