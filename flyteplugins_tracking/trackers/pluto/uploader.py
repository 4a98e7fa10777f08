"""A rank's uploader: the process that sends what the rank has put into its queue, as long as the rank lives.

`python -m flyteplugins_tracking.trackers.pluto.uploader DATABASE PARENT`. Its standard input has the settings in one
line, since they hold the key, and then a line when the rank has ended its run.

The vendor's own has the key and the config on its command line, sends 100 rows a second, skips rows after 25 attempts,
and ends by the signal that a launcher sends to all of a job's processes, while the rank still logs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

_log = logging.getLogger("flyteplugins_tracking.pluto.uploader")

# What the queue's rows have as their data type that are requests to be posted as they are.
POST = "flyteplugins_tracking.post"

_INTERVAL_S = 0.1
_LONGEST_WAIT_S = 4.0
_TIMEOUT_S = 10.0
_CLEANING_S = 60.0
_COMPLETED = 2
_ABANDONED = 4
_FOREVER = 1 << 30
# The service says 422 of a row that it cannot read, and of troubles of its own.
_REFUSALS = (400, 413, 422)
# How many rows are refused one by one, and none is taken, before that is the service's trouble.
_MOST_REFUSED = 8


def unsent(connection: sqlite3.Connection) -> int:
    """How many rows and files of a queue are still to be sent."""
    rows = connection.execute("SELECT COUNT(*) FROM sync_queue WHERE status != ?", (_COMPLETED,))
    files = connection.execute("SELECT COUNT(*) FROM file_uploads WHERE status NOT IN (?, ?)", (_COMPLETED, _ABANDONED))
    return int(rows.fetchone()[0] + files.fetchone()[0])


def main(database: str, parent: int) -> int:
    """Send until the rank has ended and nothing is left, or too much time has passed since then.

    Returns:
        The process's status: 0 where nothing is left.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the rank, which tells us when it is done
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    told = threading.Event()
    threading.Thread(target=_await_end, args=(told,), daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    from pluto.sync.store import SyncStore

    store = SyncStore(database, parent_pid=parent)
    uploader = _uploader(settings, store)
    try:
        return _send(store, uploader, settings, parent, told)
    finally:
        uploader.close()
        store.close()


def _await_end(told: threading.Event) -> None:
    sys.stdin.readline()
    told.set()


def _send(store: Any, uploader: Any, settings: dict[str, Any], parent: int, told: threading.Event) -> int:
    end, cleaned = None, time.monotonic()
    while True:
        if end is None and (told.is_set() or os.getppid() != parent):
            told.set()
            end = time.monotonic() + settings["finish_timeout_s"]
            uploader.failures = 0
        sent = _send_batch(store, uploader, settings)
        if end is not None and not sent:
            left = unsent(store.conn)
            if not left or time.monotonic() > end:
                return int(left > 0)
        if not sent:
            time.sleep(_INTERVAL_S) if told.is_set() else told.wait(max(_INTERVAL_S, uploader.wait_s()))
        if time.monotonic() - cleaned > _CLEANING_S:
            cleaned = time.monotonic()
            store.cleanup_completed(older_than_seconds=_CLEANING_S)


def _send_batch(store: Any, uploader: Any, settings: dict[str, Any]) -> int:
    from pluto.sync.process import _sync_batch

    quiet = logging.getLogger("flyteplugins_tracking.pluto")
    quiet.setLevel(logging.ERROR)  # what it warns about in each round, the uploader says once
    rows, files = settings["sync_process_batch_size"], settings["sync_process_file_batch_size"]
    try:
        sent: int = _sync_batch(store, uploader, quiet, _FOREVER, rows, files)
    except sqlite3.OperationalError:
        return 0  # locked: again
    return sent


def _uploader(settings: dict[str, Any], store: Any) -> Any:
    from pluto.sync.process import _SyncUploader

    uploader = type("_Uploader", (_Careful, _SyncUploader), {})(settings, _log)
    uploader.store = store
    return uploader


class _Careful:
    """What the vendor's uploader is to do otherwise: to send each row until it is taken."""

    failures = 0
    client: Any
    store: Any
    settings: dict[str, Any]
    _get_headers: Any

    def wait_s(self) -> float:
        """How long the service is left alone after it has not answered."""
        return min(_LONGEST_WAIT_S, 0.25 * 2 ** min(self.failures, 8)) if self.failures else 0.0

    def upload_metrics_batch(self, records: Sequence[Any]) -> None:
        """In halves, where they are refused: one row that cannot be read takes no other with it."""
        refused = self._refused(list(records))
        if len(refused) == len(records):
            self._failed("it refuses all rows")
            raise _RejectedError
        if refused:
            steps = ", ".join(str(record.step) for record in refused[:10])
            _log.error("Pluto: %d rows are refused by the service, and lost: of steps %s", len(refused), steps)
        # The vendor's batch does so when all else of it is sent too: till then they would be sent again.
        self.store.mark_completed([record.id for record in records])

    def _refused(self, records: list[Any]) -> list[Any]:
        waiting, refused, taken = [records], [], 0
        while waiting:
            part = waiting.pop()
            try:
                super().upload_metrics_batch(part)  # type: ignore[misc]
                taken += len(part)
            except _RejectedError:
                if len(part) == 1:
                    refused += part
                elif not taken and len(refused) > _MOST_REFUSED:
                    return records
                else:
                    waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
        return refused

    def upload_data_batch(self, records: Sequence[Any]) -> None:
        """Requests that wait in the queue are posted as they are; the names of keys together, for each type."""
        posts: dict[tuple[str, Any], dict[str, Any]] = {}
        for record in records:
            if record.payload.get("data_type") == POST:
                url, body = record.payload["log_name"], record.payload["data"]
                same = posts.setdefault((url, body.get("logType", record.id)), {**body, "logName": []})
                same["logName"] = [*same["logName"], *body.get("logName", ())]
        for (url, _), body in posts.items():
            headers = {**self._get_headers(), "Content-Type": "application/json"}
            self._post_with_retry(url, json.dumps({k: v for k, v in body.items() if v != []}), headers)
        data = [record for record in records if record.payload.get("data_type") != POST]
        super().upload_data_batch(data)  # type: ignore[misc]

    def _post_with_retry(self, url: str, body: Any, headers: Any) -> None:
        """Once: what is not taken stays in the queue."""
        try:
            answer = self.client.post(url, content=body, headers=headers, timeout=_TIMEOUT_S)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise
        if answer.status_code >= 300:
            self._not_taken(url, answer.status_code, answer.text[:200])
        elif self.failures:
            self.failures = 0
            _log.warning("Pluto: the service takes what is logged again")

    def _not_taken(self, url: str, code: int, why: str) -> None:
        is_refusal = code in _REFUSALS
        if is_refusal and url == self.settings["url_num"]:
            raise _RejectedError
        if is_refusal and not url.startswith(self.settings["url_num"].rpartition("/")[0]):
            _log.error("Pluto: %s is refused: HTTP %d: %s", url, code, why)  # tags, the config: they will not change
            return
        self._failed(f"HTTP {code}: {why}")
        raise ConnectionError(f"HTTP {code}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 3:
            _log.warning("Pluto: the service does not take what is logged: %s. It is kept, and sent later", why)


class _RejectedError(Exception):
    """The service cannot read it, or says so."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
