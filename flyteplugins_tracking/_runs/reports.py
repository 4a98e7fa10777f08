"""The reports of ranks that have failed, on the job's board.

A rank reports before it exits, and so before its agent ends the others. With its node, the store may end too. So ranks
of other nodes read reports as they come, and acknowledge them: a rank that fails waits a moment for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking._job.board import Board, job_board, nearest_board
from flyteplugins_tracking._job.failures import Failure
from flyteplugins_tracking._job.store import STORE_TIMEOUT, has_job_store
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc, threads
from flyteplugins_tracking._util.timeout import run_with_timeout

# How many old reports are read at first. The board may have those of earlier attempts.
_MOST = 1000
# How long the store may take. A launcher ends a process 30 s after its SIGTERM.
_STORE_S = 3.0
# How long a report may take: a rank that fails early may have to import torch for it.
_SEND_S = 10.0
# How long a report waits for a rank of another node to read it.
_ACKNOWLEDGED_S = 1.0
_POLL_S = 0.1
# How long the end of a run waits for the thread that reads the board, which a store may hold up.
_STOP_S = 0.5
_READ = "read"


def send(failure: Failure, info: DistributedInfo) -> None:
    """Put a failure of this rank on the board. Raises nothing."""
    if info.world_size > 1:
        run_with_timeout(_SEND_S, _append, failure, info)


def _append(failure: Failure, info: DistributedInfo) -> None:
    with suppress(RuntimeError, OSError):  # the store has gone: with rank 0, or its node
        board = nearest_board(info, os.environ, _topic(failure.is_secondary))
        before = board.count(_READ)
        board.append(failure.to_json())
        if _has_other_nodes(info) and failure.exit_code and not failure.is_secondary:
            _wait_until(lambda: board.count(_READ) > before)


def _wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _ACKNOWLEDGED_S
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)


def _has_other_nodes(info: DistributedInfo) -> bool:
    return info.local_world_size != info.world_size


def _topic(is_secondary: bool) -> str:
    """Causes and their echoes are apart, so that thousands of echoes do not hide a cause."""
    return "failures/secondary" if is_secondary else "failures/causes"


class Reports:
    """The reports of the other ranks of this attempt, for a rank that has a run."""

    def __init__(self, info: DistributedInfo, directory: Path) -> None:
        """Watch the board from here on, if there are other nodes.

        Args:
            info: This rank.
            directory: What `board_directory` returns.
        """
        self._info = info
        self._directory = directory
        self._started_at = proc.started_at()
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._starts: dict[bool, int] = {}
        self._found: dict[bool, dict[int, Failure]] = {False: {}, True: {}}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if _has_other_nodes(info):
            self._thread = threading.Thread(target=self._watch, name="failure reports", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching. A store that does not answer now is not waited for."""
        self._stopped.set()
        if self._thread is not None:
            threads.join(self._thread, _STOP_S)

    def read(self) -> list[Failure]:
        """Return all reports, as far as the store answers in time."""
        if self._info.launcher != "torchelastic" or has_job_store(self._info):
            # Importing torch takes seconds, which a process that is being terminated may not have.
            run_with_timeout(_STORE_S, self._read_all)
        reports = [*self._found[False].values(), *self._found[True].values()]
        withdrawn = {(report.rank, report.failed_at) for report in reports if not report.exit_code}
        return [
            report
            for report in reports  # the board may outlive an attempt
            if (report.rank, report.failed_at) not in withdrawn and report.failed_at > self._started_at
        ]

    def _read_all(self) -> None:
        with suppress(RuntimeError, OSError, ImportError), self._lock:
            self._board = self._board or nearest_board(self._info, os.environ, "failures", self._directory)
            for is_secondary in (False, True):
                self._read(self._board.of_topic(_topic(is_secondary)), is_secondary)

    def _read(self, board: Board, is_secondary: bool) -> bool:
        """Read what is new. Tells whether there was something."""
        if is_secondary not in self._starts:
            self._starts[is_secondary] = max(0, board.count("texts") - _MOST)
        found = self._found[is_secondary]
        texts = board.numbered_texts(self._starts[is_secondary], found)
        self._found[is_secondary] = {**found, **{number: Failure.from_json(text) for number, text in texts.items()}}
        return bool(texts)

    def _watch(self) -> None:
        """Read and acknowledge causes as they come, once there is a store."""
        while not has_job_store(self._info):
            if self._stopped.wait(10 * _POLL_S):
                return
        with suppress(RuntimeError, OSError, ImportError):
            with self._lock:
                self._board = self._board or job_board(self._info, os.environ, "failures", STORE_TIMEOUT)
            if self._board is None:
                return
            causes = self._board.of_topic(_topic(False))
            while not self._stopped.wait(_POLL_S):
                with self._lock:
                    has_grown = self._read(causes, False)
                if has_grown:
                    causes.count(_READ, 1)
