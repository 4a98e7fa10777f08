"""`send --watch` beside a job that logs without a service: each row arrives once while it trains, and the true state.

The job's process and the watcher are killed at random moments. `killed_training.py` writes down what it has logged.
"""

from __future__ import annotations

import random
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support import backends, jobs
from support.harness import ends, job, torchrun
from support.kills import Kill, journals_left, kill_process, kill_with_children, logged, moments
from support.loopback import Fault
from support.waiting import wait_until

_moments = random.Random(45)


class Cluster:
    """A compute node without a service, and a login node that has one. Both see one directory."""

    def __init__(self, directory: Path, backend: backends.Backend) -> None:
        self.directory, self.backend = directory, backend
        self.started: list[jobs.Process] = []
        self.resends = False  # whether a killed watcher may have sent what it has not noted

    @property
    def missing(self) -> dict[str, str]:
        """The variables of a job that does not reach the service."""
        return {**self.backend.missing(self.directory), "IF_UNAVAILABLE": "degrade", "INIT_TIMEOUT_S": "5"}

    def start_job(self, env: Mapping[str, str] | None = None) -> jobs.Process:
        """Start an attempt, and return when it has logged its first row."""
        offline = {**self.backend.environment(), "WANDB_MODE": "offline"}
        away = offline if self.backend.name == "wandb" else self.missing
        command = [sys.executable, str(jobs.PROGRAMS / "killed_training.py"), self.backend.name, "p"]
        process = jobs.start(command, self.directory, {**away, **(env or {})})
        self.started.append(process)
        wait_until(lambda: (self.directory / f"logged-{process.pid}").exists(), process)
        return process

    def watch(self, *options: str) -> jobs.Process:
        return self.start("--watch", "--interval", "0.2", "--killed-after", "2", *options)

    def start(self, *options: str) -> jobs.Process:
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", *options, str(self.directory)]
        self.started.append(jobs.start(command, self.directory, self.backend.environment()))
        return self.started[-1]

    def send(self, *options: str) -> jobs.Done:
        return jobs.finish(self.start(*options), self.directory)

    def runs(self) -> list[backends.Kept]:
        if isinstance(self.backend, backends.PlutoBackend) and self.resends:
            for run in self.backend._server.runs:
                run.duplicates = 0  # equal rows: a chart has one of them
        with suppress(sqlite3.OperationalError):  # the file is being made
            return self.backend.runs("p")
        return []

    @property
    def state(self) -> str:
        return next((run.status for run in self.runs()), "not there")

    def arrived(self) -> list[int]:
        """The numbers of the rows that the service has, each as often as it has it."""
        return sorted(value for run in self.runs() for key, value in run.points.elements() if key == "rank0")

    def wait_for_more_rows(self, watcher: jobs.Process) -> None:
        count = len(self.arrived())
        wait_until(lambda: len(self.arrived()) > count, watcher)
        self.arrived()
        self.resends = False

    def kill(self, watcher: jobs.Process, kill: Kill = kill_process) -> None:
        self.resends = True
        if watcher.poll() is None:
            kill(watcher.pid)
        watcher.communicate()

    def assert_each_once(self) -> None:
        """A row that was being logged when its process was killed may have arrived, or not."""
        rows, arrived = logged(self.directory), self.arrived()
        assert len(arrived) == len(set(arrived))
        assert set(rows) <= set(arrived)
        assert set(arrived) - set(rows) <= {row + 1 for row in rows}
        assert not journals_left(self.directory)


@contextmanager
def cluster(directory: Path, tracker: str) -> Iterator[Cluster]:
    service = directory / "service"
    service.mkdir()
    with backends.BACKENDS[tracker](service) as backend:
        made = Cluster(directory / "shared", backend)
        made.directory.mkdir()
        try:
            yield made
        finally:
            for process in made.started:
                if process.poll() is None:
                    jobs.kill(process)


def end(process: jobs.Process, number: int = signal.SIGKILL) -> int:
    process.send_signal(number)
    process.communicate()
    return process.returncode


def test_a_wandb_run_without_network_is_live_and_has_its_true_state(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        attempt, watcher = here.start_job(), here.watch()
        here.wait_for_more_rows(watcher)
        here.wait_for_more_rows(watcher)
        assert here.state == "running"

        second, sent = here.send("--watch"), here.send()
        for refused in (second, sent):
            assert refused.returncode == 1
            assert f"is watched already: host {socket.gethostname()}, pid {watcher.pid}" in refused.output

        end(attempt)
        wait_until(lambda: here.state == "failed", watcher)
        attempt = here.start_job()
        wait_until(lambda: here.state == "running", watcher)
        here.wait_for_more_rows(watcher)
        (run,) = here.runs()
        assert run.ends == 1

        began = time.monotonic()
        assert end(watcher, signal.SIGTERM) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 5 * jobs.TIME_SCALE
        assert end(attempt, signal.SIGTERM) != 0
        done = here.send()
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "killed"  # by a SIGTERM from outside: W&B's "preempted"
        assert here.send("--watch", "--until-done").returncode == 0


@pytest.mark.parametrize(
    "tracker", ["trackio", *(pytest.param(one, marks=pytest.mark.wide) for one in ("pluto", "mlflow"))]
)
def test_runs_of_other_trackers_are_live_too(tmp_path, tracker):
    with cluster(tmp_path, tracker) as here:
        attempt, watcher = here.start_job(), here.watch()
        here.wait_for_more_rows(watcher)
        here.wait_for_more_rows(watcher)
        here.kill(watcher)
        # The job's: one of the watcher would count as a later attempt.
        assert len(list(here.directory.rglob("*.journal.txt"))) == 1
        watcher = here.watch()
        here.wait_for_more_rows(watcher)
        assert here.state == "running"
        end(attempt)
        wait_until(lambda: here.state == "failed", watcher)
        attempt = here.start_job()
        wait_until(lambda: here.state == "running", watcher)
        here.kill(watcher)
        watcher = here.watch("--until-done")
        here.wait_for_more_rows(watcher)
        (here.directory / "stop").touch()
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished"


def killed_again_and_again(count: int, start: Callable[[], jobs.Process], rest_s: float) -> None:
    for _ in range(count):
        process = start()
        time.sleep(_moments.random() * rest_s)
        if process.poll() is None:
            _moments.choice([kill_process, kill_with_children])(process.pid)
        process.communicate()


@pytest.mark.full
@pytest.mark.parametrize(
    "tracker", ["wandb", *(pytest.param(one, marks=pytest.mark.wide) for one in ("trackio", "mlflow", "pluto"))]
)
def test_every_row_arrives_once_whenever_the_job_or_the_watcher_is_killed(tmp_path, tracker):
    with cluster(tmp_path, tracker) as here:
        for _ in range(moments(3)):
            watcher = here.watch()
            killed_again_and_again(2, here.start_job, 5.0)
            here.kill(watcher, _moments.choice([kill_process, kill_with_children]))
        attempt, watcher = here.start_job(), here.watch("--until-done")
        (here.directory / "stop").touch()
        assert jobs.finish(attempt, here.directory).returncode == 0
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        rows, arrived = logged(here.directory), here.arrived()
        text = (
            f"{tracker}: {2 * moments(3)} SIGKILLs of the job, {moments(3)} of the watcher: {len(rows)} rows logged, "
        )
        print(f"{text}{len({*rows} & {*arrived})} arrived, {len(arrived) - len({*arrived})} twice")
        here.assert_each_once()
        assert here.state == "finished"


@pytest.mark.full
@pytest.mark.parametrize("tracker", ["wandb", pytest.param("trackio", marks=pytest.mark.wide)])
def test_an_attempt_that_still_ends_when_the_next_one_has_begun_on_another_node_loses_nothing(tmp_path, tracker):
    node = tmp_path / "node"
    node.mkdir(0o700)
    with cluster(tmp_path, tracker) as here:
        first, watcher = here.start_job(), here.watch("--until-done")
        here.wait_for_more_rows(watcher)
        second = here.start_job({"XDG_RUNTIME_DIR": str(node)})
        for _ in range(2):
            here.wait_for_more_rows(watcher)
        end(first)
        wait_until(lambda: here.arrived()[-1] >= 200_000, watcher)
        (here.directory / "stop").touch()
        assert jobs.finish(second, here.directory).returncode == 0
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished", done.output


@pytest.mark.full
def test_a_wandb_core_that_dies_is_replaced(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        attempt, watcher = here.start_job(), here.watch("--until-done")
        for _ in range(2):
            here.wait_for_more_rows(watcher)
            for child in psutil.Process(watcher.pid).children(recursive=True):
                child.kill()
        here.wait_for_more_rows(watcher)
        (here.directory / "stop").touch()
        assert jobs.finish(attempt, here.directory).returncode == 0
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished"


@pytest.mark.parametrize(
    ("options", "tracker"),
    [
        ((), "pluto"),
        pytest.param(("--watch", "--until-done"), "trackio", marks=pytest.mark.full),
        *(pytest.param((), one, marks=pytest.mark.wide) for one in ("mlflow", "trackio")),
        *(pytest.param(("--watch", "--until-done"), one, marks=pytest.mark.wide) for one in ("mlflow", "pluto")),
    ],
)
def test_attempts_that_have_ended_before_are_sent_one_behind_the_other(tmp_path, tracker, options):
    with cluster(tmp_path, tracker) as here:
        (here.directory / "stop").touch()
        for _ in range(2):
            assert jobs.finish(here.start_job(), here.directory).returncode == 0
        done = here.send(*options)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished"


@pytest.mark.full
def test_an_attempt_that_is_online_goes_on_behind_the_rows_that_were_sent(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        attempt, watcher = here.start_job({**here.missing, "WANDB_MODE": "online"}), here.watch()
        here.wait_for_more_rows(watcher)
        end(attempt)
        attempt = here.start_job({**here.backend.environment(), "IF_UNAVAILABLE": "raise"})
        here.wait_for_more_rows(watcher)
        (here.directory / "stop").touch()
        done = jobs.finish(attempt, here.directory)
        assert done.returncode == 0, done.output
        end(watcher)
        sent = here.send()
        assert sent.returncode == 0, f"{sent.output}\n{done.output}"
        here.assert_each_once()


@pytest.mark.full
def test_rows_of_a_long_outage_arrive_once(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        attempt, watcher = here.start_job(), here.watch("--until-done")
        here.wait_for_more_rows(watcher)
        with here.backend._server.failing(Fault.status(503)) as fault:
            (here.directory / "stop").touch()
            assert jobs.finish(attempt, here.directory).returncode == 0
            here.backend._server.wait_for(lambda: fault.hits > 10)
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished"


@pytest.mark.full
@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_shared_run_is_live_with_the_rows_of_all_ranks(tmp_path, is_killed):
    settings = {"tracking": {"run_mode": "shared", "id": jobs.RUN_ID}}
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", "--watch", "--until-done", "--interval", "0.2"]
    with job(tmp_path) as started:
        env = started.server.environment
        process = started.start(torchrun("--max-restarts=0"), {"WANDB_MODE": "offline"}, **ends("until go", **settings))
        started.wait_for("ready 0 0")
        started.wait_for("ready 1 0")
        for _ in range(2):
            watcher = jobs.start([*command, "--killed-after", "2", str(tmp_path)], tmp_path, env)
            count = len(started.server.runs[0].rows) if started.server.runs else 0
            wait_until(lambda: started.server.runs and len(started.server.runs[0].rows) > count, watcher)  # noqa: B023
            end(watcher)
        if is_killed:
            kill_with_children(process.pid)
        else:
            started.go()
        process.communicate()
        done = jobs.run([*command, "--killed-after", "2", str(tmp_path)], tmp_path, env)
        assert done.returncode == 0, done.output
        found = started.outcome()
    assert found.logged <= found.arrived
    assert found.duplicates == 0
    assert found.state == ("failed" if is_killed else "finished")
