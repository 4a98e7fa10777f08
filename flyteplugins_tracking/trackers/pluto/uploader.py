"""A rank's uploader: the process that sends the rank's queue, as long as the rank lives.

`python -m flyteplugins_tracking.trackers.pluto.uploader DATABASE PARENT`. The rank writes the settings to the standard
input in one line, since they hold the key, and a second line when it has ended its run.

The client's own uploader has the key and the config on its command line, sends 100 rows a second, skips rows after 25
attempts, and ends by the signal that a launcher sends to all of a job's processes, while the rank still logs.

The rank has an `UploaderProcess`. The rest of this module runs in the uploader.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flyteplugins_tracking.trackers.pluto import vendor
from flyteplugins_tracking.trackers.pluto.queues import uploading

_log = logging.getLogger("flyteplugins_tracking.pluto.uploader")

# How long after its start a process that has ended is not started again.
_RESTART_S = 10
_INTERVAL_S = 0.1
_LONGEST_WAIT_S = 4.0
_TIMEOUT_S = 10.0
_CLEANING_S = 60.0
# The service answers 422 to a row that it cannot read, and also when it has troubles of its own.
_REJECTIONS = (400, 413, 422)
# After so many rows that are rejected one by one, with none that is taken, the service is in trouble.
_MOST_REJECTED = 8


class UploaderProcess:
    """The process that sends a run's queue."""

    def __init__(self, database: str, settings: Mapping[str, Any], stderr: int) -> None:
        """Start the process.

        Args:
            database: The queue's file.
            settings: The uploader's settings, with the API key.
            stderr: Where the uploader logs: a file descriptor, which `close` closes.
        """
        self._database = database
        self._settings = json.dumps(settings, default=str)
        self._stderr = stderr
        self._process = self._start()
        self._started = time.monotonic()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603 our own
            [sys.executable, "-m", "flyteplugins_tracking.trackers.pluto.uploader", self._database, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": _search_path(), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # so that a launcher's signals to the job's processes do not end it
        )
        self._write_line(process, self._settings)  # the key is in neither the command nor a variable
        return process

    def _write_line(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def revive(self) -> None:
        """Start the process again if it has been killed."""
        if self._process.poll() is not None and time.monotonic() - self._started > _RESTART_S:
            self._started = time.monotonic()
            self._process = self._start()

    def stop(self, timeout_s: float) -> int:
        """Have all rows sent within `timeout_s` seconds, and end the process. Returns how many are left."""
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0 and self._process.poll() not in (None, 0):
            self._process = self._start()
        while self._end_process(deadline) < 0 and time.monotonic() < deadline:  # it was killed
            self._process = self._start()
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return vendor.count_unsent(connection)

    def _end_process(self, deadline: float) -> int:
        """Have the process end, at the latest at the deadline. Returns its exit code: below 0 for a signal."""
        self._write_line(self._process, "end")
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Close the pipe to the process, and its log."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(OSError):
            os.close(self._stderr)
        self._stderr = subprocess.DEVNULL


def _search_path() -> str:
    """Return a PYTHONPATH with which the process finds the same modules as this one.

    The standard library comes first: this process imported its modules before the user's came to the path.
    """
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    stdlib |= {os.path.join(directory, "lib-dynload") for directory in stdlib}
    entries = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]  # Python skips other entries too
    return os.pathsep.join(sorted(entries, key=lambda entry: entry not in stdlib))


def main(database: str, parent: int) -> int:
    """Send until the rank has ended and nothing is left, or `finish_timeout_s` has passed since then.

    Returns:
        The process's exit code: 0 if nothing is left.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher means the rank, which says when it has ended
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    rank_ended = threading.Event()
    threading.Thread(target=_await_end, args=(rank_ended,), daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    with uploading(os.path.dirname(database)):
        store = vendor.open_store(database, parent)
        uploader = _uploader(settings, store)
        try:
            return _send(store, uploader, settings, parent, rank_ended)
        finally:
            uploader.close()
            store.close()


def _await_end(rank_ended: threading.Event) -> None:
    sys.stdin.readline()
    rank_ended.set()


def _send(store: Any, uploader: Any, settings: dict[str, Any], parent: int, rank_ended: threading.Event) -> int:
    deadline, cleaned = None, time.monotonic()
    while True:
        if deadline is None and (rank_ended.is_set() or os.getppid() != parent):
            rank_ended.set()
            deadline = time.monotonic() + settings["finish_timeout_s"]
            uploader.failures = 0
        sent = _send_batch(store, uploader, settings)
        if deadline is not None and not sent:
            unsent = vendor.count_unsent(store.conn)
            if not unsent or time.monotonic() > deadline:
                return int(unsent > 0)
        if not sent:
            time.sleep(_INTERVAL_S) if rank_ended.is_set() else rank_ended.wait(max(_INTERVAL_S, uploader.wait_s()))
        if time.monotonic() - cleaned > _CLEANING_S:
            cleaned = time.monotonic()
            vendor.clean(store, _CLEANING_S)


def _send_batch(store: Any, uploader: Any, settings: dict[str, Any]) -> int:
    quiet = logging.getLogger("flyteplugins_tracking.pluto")
    quiet.setLevel(logging.ERROR)  # the client warns in each round; the uploader warns once
    rows, files = settings["sync_process_batch_size"], settings["sync_process_file_batch_size"]
    try:
        return vendor.send_batch(store, uploader, quiet, rows, files)
    except sqlite3.OperationalError:  # locked: the next round tries again
        with contextlib.suppress(sqlite3.OperationalError):
            vendor.begin_anew(store)
        return 0


def _uploader(settings: dict[str, Any], store: Any) -> Any:
    uploader = type("_Uploader", (_Careful, vendor.uploader_class()), {})(settings, _log)
    uploader.store = store
    return uploader


class _Careful:
    """Changes the client's uploader: each row is sent until the service takes it."""

    failures = 0
    client: Any
    store: Any
    settings: dict[str, Any]
    _get_headers: Any

    def wait_s(self) -> float:
        """Return the seconds to wait after requests that the service has not taken."""
        return min(_LONGEST_WAIT_S, 0.25 * 2 ** min(self.failures, 8)) if self.failures else 0.0

    def upload_metrics_batch(self, records: Sequence[Any]) -> None:
        """Send rows. If the service rejects them, send them in halves: a bad row must not take others with it."""
        rejected = self._rejected(list(records))
        if len(rejected) == len(records):
            self._failed("it rejects all rows")
            raise _RejectedError
        if rejected:
            steps = ", ".join(str(record.step) for record in rejected[:10])
            _log.error("Pluto: the service rejects %d rows, which are lost: of steps %s", len(rejected), steps)
        # The client does this when its whole batch is sent: until then, it would send these rows again.
        self.store.mark_completed([record.id for record in records])

    def _rejected(self, records: list[Any]) -> list[Any]:
        waiting, rejected, taken = [records], [], 0
        while waiting:
            part = waiting.pop()
            try:
                super().upload_metrics_batch(part)  # type: ignore[misc]
                taken += len(part)
            except _RejectedError:
                if len(part) == 1:
                    rejected += part
                elif not taken and len(rejected) > _MOST_REJECTED:
                    return records
                else:
                    waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
        return rejected

    def upload_data_batch(self, records: Sequence[Any]) -> None:
        """Post queued requests as they are. The names of new keys go in one request for each type."""
        posts: dict[tuple[str, Any], dict[str, Any]] = {}
        for record in records:
            if record.payload.get("data_type") == vendor.POST:
                url, body = record.payload["log_name"], record.payload["data"]
                same = posts.setdefault((url, body.get("logType", record.id)), {**body, "logName": []})
                same["logName"] = [*same["logName"], *body.get("logName", ())]
        for (url, _), body in posts.items():
            headers = {**self._get_headers(), "Content-Type": "application/json"}
            self._post_with_retry(url, json.dumps({k: v for k, v in body.items() if v != []}), headers)
        data = [record for record in records if record.payload.get("data_type") != vendor.POST]
        super().upload_data_batch(data)  # type: ignore[misc]

    def _post_with_retry(self, url: str, body: Any, headers: Any) -> None:
        """Post once. A row that the service does not take stays in the queue."""
        try:
            answer = self.client.post(url, content=body, headers=headers, timeout=_TIMEOUT_S)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise
        if answer.status_code >= 300:
            self._not_taken(url, answer.status_code, answer.text[:200])
        elif self.failures:
            self.failures = 0
            _log.warning("Pluto: the service takes rows again")

    def _not_taken(self, url: str, code: int, why: str) -> None:
        is_rejection = code in _REJECTIONS
        if is_rejection and url == self.settings["url_num"]:
            raise _RejectedError
        if is_rejection and not url.startswith(self.settings["url_num"].rpartition("/")[0]):
            _log.error("Pluto: the service rejects %s: HTTP %d: %s", url, code, why)  # tags or the config
            return
        self._failed(f"HTTP {code}: {why}")
        raise ConnectionError(f"HTTP {code}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 3:
            _log.warning("Pluto: the service does not take rows: %s. They are kept, and sent later", why)


class _RejectedError(Exception):
    """The service says that it cannot read a row."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
