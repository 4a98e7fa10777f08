"""Wait for what a running job does, instead of sleeping for a guessed time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flyteplugins_tracking._util import proc
from support.jobs import TIME_SCALE, Process, output_of

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *jobs: Process, timeout_s: float = 12 * TIME_SCALE) -> T:
    """Ask `condition` again and again, and return its first true value.

    Raises:
        AssertionError: All `jobs` ended before the condition was true, or `timeout_s` have passed. They are killed.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        # Before the condition: that may be the last thing they do.
        has_ended = bool(jobs) and all(job.poll() is not None for job in jobs)
        if value := condition():
            return value
        if has_ended or time.monotonic() > deadline:
            for job in jobs:
                job.kill()
            outputs = "\n".join(output_of(job) for job in jobs)
            raise AssertionError(f"not within {timeout_s:g} s, or before the job ended:\n{outputs}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def wait_for_file(path: Path, *jobs: Process) -> None:
    """Wait until a job has made the file."""
    wait_until(path.exists, *jobs)


def stop(pid: int) -> None:
    """Stop a process, and return when none of its threads goes on."""
    os.kill(pid, signal.SIGSTOP)
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    while not {proc.state(thread) for thread in threads} <= {"T", ""}:  # one may have ended
        time.sleep(0.01)
