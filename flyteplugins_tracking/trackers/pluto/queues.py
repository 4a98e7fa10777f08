"""The queues of a run on this disk: a rank's own, and those that killed ranks of earlier attempts have left.

A queue is the directory of one rank and attempt. It has the client's database of unsent rows, and a journal that says
of which run it is: its rank holds that open as long as it lives. The rank's uploader outlives a killed rank for some
seconds, and holds a lock meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import is_own_directory, is_own_file, open_own
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.earlier import RunFile
from flyteplugins_tracking.trackers.journal import StoredJournal, stored
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.pluto import vendor

logger = logging.getLogger(__name__)

_DATABASE, _LOCK = "sync.db", "uploader.lock"
# How long `send` waits for the uploader of a rank that has ended: mostly a moment, at most that one's finish_timeout_s.
_LONGEST_UPLOAD_S, _POLL_S = 60.0, 0.1


class Queue:
    """The queue of this rank.

    Attributes:
        directory: Where it is.
        file: The journal that says of which run it is.
    """

    def __init__(self, request: RunRequest, tracker: Tracker, settings: Any) -> None:
        """Begin a queue in the client's directory."""
        self.directory = str(settings.dir)
        self._run_id = str(request.plan.run_id)
        self._place = [str(settings.url_api), str(settings.project)]
        self._adopts = request.plan.primary or request.leads_node
        self.file = RunFile(request, tracker, self._run_id, self.directory, {"place": self._place})
        self.file.queue(self.directory)

    @property
    def database(self) -> str:
        """The file of the client's database."""
        return os.path.join(self.directory, _DATABASE)

    def last_step(self) -> int:
        """Return the highest step of this run's rows in the queues of this disk, sent or not; 0 if there is none."""
        databases = [os.path.join(directory, _DATABASE) for directory, _ in self._others()]
        return max(map(vendor.last_step_in, databases), default=0)

    def adopt(self, op: Any) -> None:
        """Put what killed ranks of earlier attempts have left into the queue of `op`, before its own rows.

        One rank of each node does. A queue whose uploader lives is left to that one.
        """
        for directory, journals in self._others() if self._adopts else ():
            try:
                rows = self._adopt_one(op, directory, journals)
            except (OSError, sqlite3.Error) as error:
                text = "Pluto: run %s: what is in %s cannot be read now: %s. Send it later: %s"
                logger.warning(text, self._run_id, directory, error, how_to_send(directory))
                continue
            if rows:
                text = "Pluto: run %s: sends %d rows that an earlier attempt had logged and Pluto may lack, from %s"
                logger.warning(text, self._run_id, rows, directory)

    def take(self, op: Any, directory: str, written_in: str) -> None:
        """Put the rows and files of another directory into the queue of `op`, and leave its journal.

        Args:
            op: The run.
            directory: The directory.
            written_in: Where the directory was when its rank wrote to it.

        Raises:
            TrackerUnavailableError: An uploader is still sending it.
        """
        with uploading(directory, _LONGEST_UPLOAD_S) as is_free:
            if not is_free:
                raise TrackerUnavailableError(f"a process is sending {directory}: wait for its end")
            vendor.move_queue(op, os.path.join(directory, _DATABASE), written_in, self.directory)
            for path in glob.glob(f"{glob.escape(os.path.join(directory, _DATABASE))}*"):
                os.unlink(path)

    def keep(self, exit_code: int) -> None:
        """Leave the queue to who sends it later, with the run's end."""
        self.file.end(exit_code)
        self.file.journal.close()

    def remove(self) -> None:
        """Remove the directory, and its parent if that is empty then: the service has everything."""
        self.file.journal.remove()
        remove_directory(self.directory)

    def _adopt_one(self, op: Any, directory: str, journals: Sequence[StoredJournal]) -> int:
        """Adopt one queue if nobody uses it. Returns how many rows there were."""
        with uploading(directory) as is_free:
            if not is_free or any(journal.is_open() for journal in journals):
                return 0
            rows = vendor.move_queue(op, os.path.join(directory, _DATABASE), directory, self.directory)
            shutil.rmtree(directory, ignore_errors=True)
            return rows

    def _others(self) -> Iterator[tuple[str, list[StoredJournal]]]:
        """Yield the other queues of this run, with their journals. Those of other runs in this process are left out."""
        for path in sorted(Path(self.directory).parent.glob(f"{glob.escape(self._run_id)}-rank-*")):
            # Others may have made the directory, or its database, which names files that are sent.
            is_own = is_own_directory(path) and all(map(is_own_file, path.glob(f"{_DATABASE}*")))
            journals = stored(path) if is_own and str(path) != self.directory else []
            if any((one.header["id"], one.header.get("place")) == (self._run_id, self._place) for one in journals):
                yield str(path), journals


def as_lines(directory: Path, lines: Sequence[Any]) -> list[Any]:
    """Return the lines of a journal, with the unsent rows of the queue beside it."""
    rows = [
        {"row": json.loads(text), "step": step, "time": time_ms / 1000}
        for kind, text, time_ms, step in vendor.unsent_rows(str(directory / _DATABASE))
        if kind == vendor.METRIC
    ]
    return [one for line in lines for one in (rows if "queue" in line else [line])]


def remove_directory(directory: str) -> None:
    """Remove a run's directory, and its parent if that is empty then."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(directory))


@contextlib.contextmanager
def uploading(directory: str, timeout_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of who sends the queue in `directory`. Gives False if another process holds it after `timeout_s`.

    If that is unknown, as on some network file systems, it counts as free.
    """
    deadline = time.monotonic() + timeout_s
    try:
        file = open_own(Path(directory, _LOCK), os.O_WRONLY | os.O_CREAT)
    except OSError:
        yield os.path.isdir(directory)
        return
    try:
        while not (is_ours := _is_locked_now(file)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield is_ours
    finally:
        os.close(file)


def _is_locked_now(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
