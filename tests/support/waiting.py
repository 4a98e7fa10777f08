"""Wait for what a running job does, instead of sleeping for a guessed time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flyteplugins_tracking._util import proc
from support.jobs import TIME_SCALE, Process

T = TypeVar("T")


def wait_until(condition: Callable[[], T], job: Process | None = None, timeout_s: float = 12 * TIME_SCALE) -> T:
    """Ask `condition` again and again, and return its first true value.

    Raises:
        AssertionError: `job` ended before the condition was true, or `timeout_s` have passed. The job is killed.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        has_ended = job is not None and job.poll() is not None  # before the condition: it may be its last action
        if value := condition():
            return value
        if job is not None and (has_ended or time.monotonic() > deadline):
            job.kill()
            raise AssertionError(f"not within {timeout_s:g} s, or before the job ended:\n{job.communicate()[0]}")
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def wait_for_file(path: Path, job: Process | None = None) -> None:
    """Wait until a job has made the file."""
    wait_until(path.exists, job)


def stop(pid: int) -> None:
    """Stop a process, and return when none of its threads goes on."""
    os.kill(pid, signal.SIGSTOP)
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    while not {proc.state(thread) for thread in threads} <= {"T", ""}:  # one may have ended
        time.sleep(0.01)
