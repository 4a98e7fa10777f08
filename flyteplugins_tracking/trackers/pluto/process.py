"""The rank's uploader, seen from the rank: a process that sends the run's queue, and can be started again."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking.trackers.pluto import vendor

# How long after its start a process that has ended is not started again.
_RESTART_S = 10


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
