"""Kill a training of `killed_training.py` at random moments, and start it again on the same disk."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from support import jobs
from support.waiting import wait_for_file


def logged_by_killed_training(
    directory: Path, tracker: str, project: str, env: Mapping[str, str], kills: int, longest_s: float = 1.0
) -> list[int]:
    """Kill it so often, have it end at last, and return the numbers of the rows that it has logged."""
    command = [sys.executable, jobs.PROGRAMS / "killed_training.py", tracker, project]
    moments = random.Random(18)
    directory.mkdir(exist_ok=True)
    for _ in range(kills):
        process = jobs.start(command, directory, env)
        wait_for_file(directory / f"logged-{process.pid}", process)
        time.sleep(moments.random() * longest_s)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    (directory / "stop").touch()
    done = jobs.run(command, directory, env)
    assert done.returncode == 0, done.output
    notes = [path.read_text().split("\n")[:-1] for path in directory.glob("logged-*")]
    return sorted(int(number) for numbers in notes for number in numbers)
