"""Kill a training of `killed_training.py`, or who sends what it has left, at random moments, again and again."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from support import jobs
from support.waiting import wait_for_file, wait_until

# What a process says before it opens its run, when its first row is logged, and when its function returns.
When = Literal["opening", "logged", "ending"]
Kill = Callable[[int], None]
# Rows that are logged at once by an attempt that is to end, so that there is something to send then.
ROWS = 300


def moments(default: int) -> int:
    """How many random moments a test takes: `default`, or as many as the variable TESTS_KILLS says."""
    return int(os.environ.get("TESTS_KILLS", default))


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_with_children(pid: int) -> None:
    """Kill all processes of the job at once, as when its node dies."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
            process.send_signal(signal.SIGKILL)


def logged_by_killed_training(
    directory: Path,
    tracker: str,
    project: str,
    env: Mapping[str, str],
    kills: int,
    longest_s: float = 1.0,
    when: When = "logged",
    kill: Kill = kill_process,
) -> list[int]:
    """Kill it so often, have it end at last, and return the numbers of the rows that it has logged.

    Args:
        directory: Where it runs.
        tracker: Its tracker.
        project: Its project.
        env: Its variables.
        kills: How often it is killed.
        longest_s: The longest time from the moment to the kill, in seconds.
        when: From what moment on.
        kill: How.
    """
    directory.mkdir(exist_ok=True)
    for process in _attempts(directory, [tracker, project, *([str(ROWS)] if when == "ending" else [])], env, kills):
        _kill_later(directory, process, when, longest_s, kill)
    (directory / "stop").touch()
    done = jobs.run(_command(tracker, project), directory, env)
    assert done.returncode == 0, done.output
    return logged(directory)


def left_by_killed_training(directory: Path, tracker: str, project: str, env: Mapping[str, str]) -> list[int]:
    """Kill it when it has logged `ROWS` rows at once, and return their numbers."""
    process = jobs.start(_command(tracker, project, str(10 * ROWS)), directory, env)
    wait_until(lambda: len(logged(directory)) >= ROWS, process)
    kill_process(process.pid)
    process.wait()
    return logged(directory)


def logged(directory: Path) -> list[int]:
    """The numbers of the rows that were logged."""
    notes = [path.read_text().split("\n")[:-1] for path in directory.glob("logged-*")]
    return sorted(int(number) for numbers in notes for number in numbers)


def journals_left(directory: Path) -> list[Path]:
    """The journals below a directory. A process that was killed when it made one has left an empty file."""
    while True:
        with suppress(FileNotFoundError):  # a directory goes just now
            return [path for path in directory.rglob("*.journal.*") if path.stat().st_size]


def send_in_spite_of_kills(kept: Path, directory: Path, env: Mapping[str, str], kills: int, longest_s: float) -> str:
    """Have `send` be killed so often, at a random time after its start, and then end. Returns what it prints then."""
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", str(kept)]
    for _ in range(kills):
        process = jobs.start(command, directory, env)
        time.sleep(_random.random() * longest_s)
        if process.poll() is None:
            kill_process(process.pid)
        process.wait()
    done = jobs.run(command, directory, env)
    assert done.returncode == 0, done.output
    return done.output


_random = random.Random(18)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(jobs.PROGRAMS / "killed_training.py"), *arguments]


def _attempts(directory: Path, arguments: list[str], env: Mapping[str, str], count: int) -> Iterator[jobs.Process]:
    for _ in range(count):
        process = jobs.start(_command(*arguments), directory, env)
        yield process
        process.wait()  # not for what it has started: that may outlive it


def _kill_later(directory: Path, process: jobs.Process, when: When, longest_s: float, kill: Kill) -> None:
    wait_for_file(directory / f"{when}-{process.pid}", process)
    time.sleep(_random.random() * longest_s)
    if process.poll() is None:
        kill(process.pid)
