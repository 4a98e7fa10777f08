"""SIGTERM while the decorated function runs in a thread, and the main thread runs the asyncio loop that awaits it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.loopback import Fault
from support.wandb_server import WandbServer

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._runs.sigterm import LoopListener
from flyteplugins_tracking.testing import RecordingTracker

PROGRAM = jobs.PROGRAMS / "loop_signals.py"


@dataclass(frozen=True)
class RunningJob:
    """A job that can be ended by SIGTERM.

    Attributes:
        pids: The ids of the processes that have logged, by rank.
    """

    process: subprocess.Popen[str]
    directory: Path
    server: WandbServer
    pids: list[int]

    def end(self) -> jobs.Done:
        self.process.send_signal(signal.SIGTERM)
        return jobs.finish(self.process, self.directory)


@contextmanager
def running_job(
    process: subprocess.Popen[str], directory: Path, server: WandbServer, count: int = 1
) -> Iterator[RunningJob]:
    """Yield the job when `count` of its processes have logged. Kill it after the block if it still runs."""
    files = [directory / f"ready-{rank}" for rank in range(count)]
    try:
        pids: dict[Path, str] = {}  # a file is read until it is not empty: writing it anew empties it for a moment
        while len(pids) < count:
            assert process.poll() is None, process.communicate()[0]
            pids |= {file: pid for file in files if file not in pids and file.exists() and (pid := file.read_text())}
            time.sleep(0.05)
        yield RunningJob(process, directory, server, [int(pids[file]) for file in files])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextmanager
def pod(task: str, directory: Path, count: int = 1, module: str = "flyte2_sigterm") -> Iterator[RunningJob]:
    pytest.importorskip("flyte", reason="flyte is not installed")
    pytest.importorskip("flyteplugins.pytorch", reason="flyteplugins-pytorch is not installed")
    from support import flyte2_pods

    with WandbServer() as server:
        process = flyte2_pods.start(task, directory, run="sigterm", module=module, **server.environment)
        with running_job(process, directory, server, count) as started:
            yield started


@contextmanager
def script(directory: Path, *arguments: str) -> Iterator[RunningJob]:
    """A function of `loop_signals.py`."""
    with WandbServer() as server:
        command = [sys.executable, PROGRAM, *arguments]
        process = jobs.start(command, directory, server.environment)
        with running_job(process, directory, server) as started:
            yield started


def wait_until(done: Any, timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def ended_by_the_signal(done: jobs.Done) -> bool:
    return done.returncode in (-signal.SIGTERM, 143)


@pytest.mark.parametrize("task", ["sleeps", pytest.param("sleeps_async", marks=pytest.mark.full)])
def test_the_run_of_an_evicted_pod_ends_with_143_and_has_its_rows(tmp_path, task):
    with pod(task, tmp_path) as started:
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output
        assert ended_by_the_signal(done), done.output


@pytest.mark.full
def test_what_a_thread_logs_when_the_run_has_ended_does_not_open_it_again(tmp_path):
    with pod("loops", tmp_path) as started:
        done = started.end()
        (run,) = started.server.runs
        assert ended_by_the_signal(done), done.output
        assert (run.exit_codes, run.state, run.rows_after_completion) == ([143], "preempted", 0), done.output
        assert [row["row"] for row in run.rows] == list(range(len(run.rows)))
        assert len(run.rows) >= 50


@pytest.mark.full
def test_an_end_that_is_being_recorded_is_waited_for(tmp_path):
    """The function has returned, and the server does not answer yet."""
    with pod("returns", tmp_path) as started:
        with started.server.failing(Fault.mute()) as fault:
            Path(tmp_path, "go").touch()
            wait_until(lambda: fault.hits)
            started.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                started.process.wait(1)
        done = jobs.finish(started.process, tmp_path)
        (run,) = started.server.runs
        assert (run.exit_codes, run.state != "running", len(run.rows)) in [([0], True, 1), ([143], True, 1)], (
            done.output
        )
        assert ended_by_the_signal(done), done.output


def test_the_agent_of_an_elastic_pod_has_its_workers_end_their_run(tmp_path):
    with pod("workers", tmp_path, count=2, module="flyte2_sigterm_workers") as started:
        assert started.process.pid not in started.pids
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output


@pytest.mark.full
def test_a_function_that_stops_by_itself_is_waited_for(tmp_path):
    with script(tmp_path, "stops") as started:
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, run.summary["stop/reason"]) == ([143], "preempted", "SIGTERM"), done.output
        assert Path(tmp_path, "saved").exists()
        assert ended_by_the_signal(done), done.output


@pytest.mark.parametrize("installer", ["loop", pytest.param("signal", marks=pytest.mark.full)])
def test_a_handler_of_the_users_is_called_once_and_the_run_stays_open(tmp_path, installer):
    """What is logged after it is in the run, which ends once, with the function."""
    with script(tmp_path, "handled", installer) as started:
        done = started.end()
        (run,) = started.server.runs
        assert (done.returncode, done.output.count("told")) == (0, 1), done.output
        assert (run.exit_codes, [row["row"] for row in run.rows]) == ([143], [0, 1])
        assert run.rows_after_completion == 0


def test_a_handler_that_unwinds_the_main_thread_ends_the_run_once(tmp_path):
    with script(tmp_path, "exits") as started:
        done = started.end()
        (run,) = started.server.runs
        assert (done.returncode, run.exit_codes, run.state) == (5, [143], "preempted"), done.output


@pytest.mark.parametrize(
    ("first_is", "expected"), [pytest.param("returned", [0], marks=pytest.mark.full), ("running", [143])]
)
def test_the_runs_of_all_threads_are_ended_and_of_none_that_has_returned(tmp_path, first_is, expected):
    with script(tmp_path, "two_threads", first_is) as started:
        done = started.end()
        assert ended_by_the_signal(done), done.output
        assert {run.id: run.exit_codes for run in started.server.runs} == {"first": expected, "second": [143]}
        assert [len(run.rows) for run in started.server.runs] == [1, 1]


def installed() -> tuple[Any, int]:
    """The handler and the wakeup fd of this process."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return signal.getsignal(signal.SIGTERM), wakeup


@pytest.mark.parametrize("of_the_loop", [False, True])
def test_the_old_handler_is_back_when_the_last_function_returns(of_the_loop):
    recorder = RecordingTracker()
    entered, is_left = threading.Barrier(3), threading.Event()

    @tracking_init(tracker=recorder)
    def train(goes_first: bool) -> None:
        entered.wait(60)
        assert goes_first or is_left.wait(60)

    async def main() -> list[tuple[Any, int]]:
        loop = asyncio.get_running_loop()
        if of_the_loop:
            loop.add_signal_handler(signal.SIGTERM, print)
        found = [installed()]
        first, second = (loop.run_in_executor(None, train, goes_first) for goes_first in (True, False))
        await loop.run_in_executor(None, entered.wait, 60)
        found.append(installed())
        await first
        found.append(installed())
        is_left.set()
        await second
        found.append(installed())
        loop.remove_signal_handler(signal.SIGTERM)
        return found

    before, with_two, with_one, after = asyncio.run(main())
    assert (before, with_two) == (after, with_one)
    assert before[0] is not with_two[0]
    assert (before[1] != with_two[1]) is of_the_loop
    assert [run.exit_codes for run in recorder.runs] == [(0,), (0,)]


@pytest.mark.parametrize("kind", ["ignored", "blocked", "no loop"])
def test_no_handler_is_installed_if_the_main_thread_cannot_run_it(kind):
    """Nor by an installation that comes too late."""
    recorder, seen = RecordingTracker(), []

    @tracking_init(tracker=recorder)
    def train() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)

    async def main() -> None:
        thread.start()
        while thread.is_alive():
            thread.join() if kind == "blocked" else await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        seen.append(signal.getsignal(signal.SIGTERM))

    own = signal.getsignal(signal.SIGTERM)
    try:
        before = signal.SIG_IGN if kind == "ignored" else own
        signal.signal(signal.SIGTERM, before)
        if kind == "no loop":
            thread.start()
            thread.join()
        else:
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, own)
    assert set(seen) == {before}
    assert [run.exit_codes for run in recorder.runs] == [(0,)]


def test_a_run_that_could_not_be_opened_puts_no_signal_off():
    watcher = LoopListener(lambda *_: None)

    def fail_to_open() -> bool:
        is_watched = watcher.start(None, timeout_s=1.0)
        watcher.stop()
        return is_watched

    async def main() -> bool:
        return await asyncio.get_running_loop().run_in_executor(None, fail_to_open)

    assert asyncio.run(main())
    assert watcher._opening == set()


def test_other_signals_reach_the_loop_meanwhile():
    got = threading.Event()

    @tracking_init(tracker=RecordingTracker())
    def train() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert got.wait(60)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGTERM, print), (signal.SIGUSR2, got.set)):
            loop.add_signal_handler(number, handler)
        await loop.run_in_executor(None, train)

    asyncio.run(main())


@pytest.mark.full
def test_a_forked_child_has_the_default_sigterm_handler(tmp_path):
    done = jobs.python(tmp_path, PROGRAM, "forks")
    assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 50)]
