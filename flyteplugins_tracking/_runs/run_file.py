"""`run_file=`: the file in which a job keeps the base id of its run, for a later job that goes on in the run.

One rank of the job reads and writes it: the first primary. The others get the id from that rank, through the job's
store, or read the file if the job has none. A file has one run. With `run.json`, W&B's run is in that file, MLflow's in
`run.json.mlflow`, and the run of the process's second call in `run.json.2`:

    {"base_id": "9k2m", "after": null, "restart_count": 1, "has_ended": false, "directory": "/ckpt", "project": "llm"}

`after` is the run of the call before, which had ended when this one began. `restart_count` is how many attempts of the
run came before the last one. `directory` is the file's own, by which a copy is known. The members behind it say where
the run is: `Tracker.place`.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.board import STORE_TIMEOUT, job_board
from flyteplugins_tracking._rank.plan import plan
from flyteplugins_tracking._runs.context import Asked
from flyteplugins_tracking._util.checks import check_flag, check_run_id, check_text
from flyteplugins_tracking._util.files import is_own_file, read_own, replace_whole
from flyteplugins_tracking._util.lock import NO_LOCKS, RunLock
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import parse_json
from flyteplugins_tracking._util.threads import wait_until
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import ConfigError, IdentityError
from flyteplugins_tracking.trackers.config import DEFAULT_TRACKER

if TYPE_CHECKING:
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

_LONGEST = 1 << 20
# How long ranks wait for the first one with a run, in seconds: it may load its data before it calls the function.
_LONGEST_WAIT_S = 600.0
# What a file becomes that is damaged, or not such a file at all.
_UNREADABLE_SUFFIX = ".unreadable"
# On the job's board: the attempts in earlier jobs, and the id of the run that goes on, if one does. No id has such a
# character.
_KEY, _BETWEEN = "base_id", "/"


class RunFile:
    """The file of a call, on a rank that opens a run.

    Attributes:
        base_id: The base id of this job's run, found there or not; None if the tracker makes it.
        earlier: How many attempts of the run there were in earlier jobs.
    """

    base_id: str | None = None
    earlier: int = 0

    def __init__(self, asked: Asked, path: str, info: DistributedInfo | None, number: int, attempt: int) -> None:
        """Does nothing yet.

        Args:
            asked: What the call asks for.
            path: The file of the default tracker's first call.
            info: This rank; None outside a distributed job.
            number: The number of the call.
            attempt: How many attempts of the run came before in this job.
        """
        self._asked, self._info, self._number, self._attempt = asked, info, number, attempt
        self._first = Path(os.path.realpath(os.path.expanduser(path)))  # of a link, the file that it leads to
        self._path = self._path_of(number)
        self._place = dict(asked.tracker.place(asked.config))
        self._lock: RunLock | None = None

    def find(self) -> str | None:
        """Return the base id of the run that goes on, the same on all ranks; None for a new run.

        Raises:
            IdentityError: The first rank with a run does not say which.
        """
        config, info, name = self._asked.config, self._info, self._asked.tracker.name
        is_first = plan(info, config.run_mode, config.rank_scope, None, primary_rank=config.primary_rank).first
        if is_first:
            self._lock = self._acquire()
        entry = self._earlier_run() if self._lock is not None or not is_first else None
        earlier = 0 if entry is None else max(0, entry["restart_count"] + 1 - self._attempt)
        found = f"{earlier}{_BETWEEN}{'' if entry is None else entry['base_id']}"
        board, topic = None, f"run_file/{name}.{self._number}"
        with suppress(RuntimeError):  # the store does not answer
            board = None if info is None else job_board(info, os.environ, topic)
        if board is None:
            return self._take(found)
        if is_first:  # agents that start their ranks again keep what the first attempt has found
            return self._take(board.put_first(_KEY, found))
        if not wait_until(lambda: board.get(_KEY) is not None, STORE_TIMEOUT.seconds):
            text = "%s: run_file=%s: waits until the first rank with a run calls the function, and reads the file"
            _warn_once((self._path, "waits"), text, name, self._path)
        if not wait_until(lambda: board.get(_KEY) is not None, _LONGEST_WAIT_S):
            raise IdentityError(
                f"run_file={self._path}: the first rank with a run has not told within {_LONGEST_WAIT_S:.0f} s which "
                "run goes on: call the decorated function on every rank, or pass id=..."
            )
        return self._take(board.get(_KEY) or found)

    def _take(self, found: str) -> str | None:
        """Take what the file has told, on this rank or on the first one. Returns the base id."""
        earlier, _, base_id = found.partition(_BETWEEN)
        check_run_id("run_file", base_id or None)
        self.earlier = int(earlier) if earlier.isdecimal() else 0
        return base_id or None

    def write(self, handle: Handle, *, has_ended: bool) -> None:
        """Keep the base id of the run, on the first primary: when the run is open, and when its training has ended.

        Args:
            handle: This rank's run. One that is disabled leaves the file as it is.
            has_ended: Whether the next job is a new run.
        """
        if self._lock is None or handle.is_disabled:
            return
        path, base_id, kept = self._path, self.base_id or handle.id, self._entry(self._number)
        if kept is not None and has_ended and kept["base_id"] != base_id:
            return  # the directory was moved, and another job has made this file
        entry = {"base_id": base_id, "after": self._ended_before(), "restart_count": self._attempt + self.earlier}
        entry |= {"has_ended": has_ended, "directory": str(path.parent)}
        try:
            if kept is None and os.path.lexists(path):
                if not is_own_file(path):
                    return  # another user's, a device, a FIFO or a directory, which stays
                path.replace(path.with_name(path.name + _UNREADABLE_SUFFIX))
            replace_whole(path, json.dumps({**entry, **self._place}, indent=1))
        except OSError as error:
            follows = "goes on in run %s in any case" if kept or has_ended else "will not go on in run %s"
            text = f"%s: run_file=%s cannot be written, so that the next job {follows}: %s"
            _warn_once((path, base_id), text, self._asked.tracker.name, path, base_id, error)

    def release(self) -> None:
        """Let another job use the file."""
        if self._lock is not None:
            self._lock.release()

    def _acquire(self) -> RunLock | None:
        name, path = self._asked.tracker.name, self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = RunLock.of_file(_lock_of(path), self._asked.config.init_timeout_s / 2)
        except OSError as error:
            if error.errno in NO_LOCKS:
                text = "%s: run_file=%s: its file system has no locks, so no other job may use it at the same time"
                logger.warning(text, name, path)
                return RunLock()
            logger.warning("%s: run_file=%s cannot be used: %s. This is a new run", name, path, error)
            return None
        if lock is None:
            logger.warning("%s: run_file=%s is used by another job: this is a new run", name, path)
        return lock

    def _path_of(self, number: int) -> Path:
        name = self._asked.tracker.name
        suffixes = [*([] if name == DEFAULT_TRACKER else [name]), *([] if number == 1 else [str(number)])]
        return self._first.with_name(".".join([self._first.name, *suffixes]))

    def _earlier_run(self) -> dict[str, Any] | None:
        """Return the entry of the run that goes on; None for a new run."""
        asked, number = self._asked, self._number
        entry = self._entry(number)
        if entry is None or self._has_ended(entry, number) or entry["after"] not in (None, self._ended_before()):
            return None  # if the call before has a new run, this one may be another one too
        place, base_id, reason = {key: entry.get(key) for key in self._place}, entry["base_id"], ""
        original = Path(entry["directory"], self._path.name)
        if original.exists() and not os.path.samefile(original.parent, self._path.parent):
            reason = f"is a copy of {original}. To go on in that run, pass id={base_id!r}"
        elif place != self._place:
            reason = f"is of another place, {place}, and does not keep {base_id} any more"
        else:
            try:
                asked.tracker.check(replace(asked.config, id=base_id, run_file=None))
            except ConfigError as error:
                reason = f"cannot be read: ConfigError: {error}"
        if reason:
            logger.warning("%s: run_file=%s %s. This is a new run", asked.tracker.name, self._path, reason)
        return None if reason else entry

    def _has_ended(self, entry: dict[str, Any], number: int) -> bool:
        """Whether its training has ended, or that of the next call, which was its retry."""
        if entry["has_ended"]:
            return True
        retry = self._entry(number + 1)
        return retry is not None and retry["after"] == entry["base_id"] and self._has_ended(retry, number + 1)

    def _ended_before(self) -> str | None:
        """Return the run of the call before this one, if that has ended; None if it runs, in another thread."""
        number = self._number - 1
        is_there = number > 0 and not _lock_of(self._path_of(number)).exists()
        entry = self._entry(number) if is_there else None
        return None if entry is None else str(entry["base_id"])

    def _entry(self, number: int) -> dict[str, Any] | None:
        """Return what a call's file has; None without it, and, with a warning, if it is damaged, or not this user's."""
        path = self._path_of(number)
        try:
            entry: dict[str, Any] = parse_json(read_own(path, _LONGEST).decode())
            for name in ("base_id", "directory"):
                check_text(name, entry[name], is_optional=False)
            check_run_id("base_id", entry["base_id"])
            check_flag("has_ended", entry["has_ended"])
            if not isinstance(entry["restart_count"], int) or not isinstance(entry["after"], str | None):
                raise TypeError(f"restart_count is {entry['restart_count']!r}, and after {entry['after']!r}")
            return entry
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            text = "%s: run_file=%s cannot be read: %s: %s. This is a new run"
            if is_own_file(path):
                text += f", and when it is open, the file is renamed to {path.name}{_UNREADABLE_SUFFIX}"
            _warn_once(path, text, self._asked.tracker.name, path, type(error).__name__, error)
            return None


def _lock_of(path: Path) -> Path:
    """Return the file that is locked, and there, while a call uses a run file."""
    return path.with_name(f"{path.name}.lock")
