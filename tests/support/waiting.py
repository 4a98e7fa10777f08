"""Wait for what a running job does, instead of sleeping for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from support.jobs import TIME_SCALE, Process

T = TypeVar("T")


def wait_until(condition: Callable[[], T], job: Process | None = None, timeout_s: float = 12 * TIME_SCALE) -> T:
    """Ask `condition` again and again, and return its first true value.

    Raises:
        AssertionError: `job` ended before the condition was true, or `timeout_s` have passed. A failing test, not a
            busy machine, should see it.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        # A job may make the condition true with its last action.
        if job is not None and job.poll() is not None and not (value := condition()):
            raise AssertionError(f"the job ended with {job.returncode}:\n{job.communicate()[0]}")
        if value:
            break
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
    return value


def wait_for_file(path: Path, job: Process | None = None) -> None:
    """Wait until a job has made the file."""
    wait_until(path.exists, job)
