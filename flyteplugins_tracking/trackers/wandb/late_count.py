"""Wait until W&B counts the rows that it has acknowledged.

A run that is opened again continues at the count that W&B gives, and W&B counts 2 to 4 s late. Rows that are written at
too low a count take the place of others: https://github.com/wandb/wandb/pull/12421
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from flyteplugins_tracking._util.files import open_own
from flyteplugins_tracking.trackers.wandb import tail

# How long after the last acknowledged rows a count may still be wrong.
_LATE_S = 6.0
_POLL_S = 0.5
# The part of the log that is read, from its end.
_LOG_BYTES = 65_536
Counts = Callable[[], tuple[int, int] | None]


def await_count(directory: Path, run_id: str, counts: Counts, deadline: float) -> None:
    """Return when W&B's count is right: at once, if no attempt of the run has sent rows in the last seconds.

    Args:
        directory: The directory of all runs.
        run_id: The run's id.
        counts: Asks W&B for the number of rows and the last step; None if it does not say.
        deadline: When to return in any case, in seconds of `time.monotonic`.
    """
    found = [path / "logs" / "debug-internal.log" for path in tail.directories_of(directory, run_id)]
    logs = [path for path in found if _age_s(path) < _LATE_S]
    lines = max((acknowledged_lines(log) for log in logs), default=0)
    while lines and not _is_right(counts(), lines):
        if min(map(_age_s, logs)) > _LATE_S or time.monotonic() + _POLL_S > deadline:
            return
        time.sleep(_POLL_S)


def acknowledged_lines(log: Path) -> int:
    """Return how many rows of the run W&B has, as wandb-core has logged; 0 if it has sent none.

    A request that was not answered before the kill counts: W&B may have it.
    """
    lines, sent = 0, None
    with contextlib.suppress(OSError), open(open_own(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        for text in file.read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(text)
                if entry["msg"] == "filestream: sending request":
                    sent = entry["history_offset"] + entry["history_lines"] if "history_offset" in entry else None
                elif entry["msg"] == "filestream: request sent":
                    lines, sent = sent if sent is not None and entry["status"].startswith("200") else lines, None
    return lines if sent is None else sent


def _is_right(counts: tuple[int, int] | None, lines: int) -> bool:
    """Whether W&B counts all rows, and its last step is not an earlier row's: steps rise by 1 at least."""
    return counts is not None and counts[0] >= lines and counts[1] + 1 >= counts[0]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return _LATE_S
