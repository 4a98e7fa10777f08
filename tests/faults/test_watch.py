"""`send --watch` beside a job that logs without a service: each row arrives once while it trains, and the true state.

The job's process and the watcher are killed at random moments. `killed_training.py` writes down what it has logged.
"""

from __future__ import annotations

import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support import backends, jobs
from support.harness import ends, job, torchrun
from support.kills import Kill, journals_left, kill_process, kill_with_children, logged, moments
from support.loopback import Fault
from support.users import NOBODY, needs_root
from support.waiting import wait_for_file, wait_until

_moments = random.Random(45)


class Cluster:
    """A compute node without a service, and a login node that has one. Both see one directory."""

    def __init__(self, directory: Path, backend: backends.Backend) -> None:
        self.directory, self.backend = directory, backend
        self.started: list[jobs.Process] = []

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
        wait_for_file(self.directory / f"logged-{process.pid}", process)
        return process

    def watch(self, *options: str) -> jobs.Process:
        return self.start("--watch", "--interval", "0.2", "--killed-after", "2", *options)

    def start(
        self,
        *options: str,
        program: Sequence[str] = ("-m", "flyteplugins_tracking"),
        env: Mapping[str, str] | None = None,
    ) -> jobs.Process:
        command = [sys.executable, *program, "send", *options, str(self.directory)]
        self.started.append(jobs.start(command, self.directory, {**self.backend.environment(), **(env or {})}))
        return self.started[-1]

    def send(self, *options: str, env: Mapping[str, str] | None = None) -> jobs.Done:
        return jobs.finish(self.start(*options, env=env), self.directory)

    def runs(self) -> list[backends.Kept]:
        return self.backend.runs("p")

    @property
    def state(self) -> str:
        return next((run.status for run in self.runs()), "not there")

    def arrived(self) -> list[int]:
        """The numbers of the rows that the service has, each as often as it has it."""
        return sorted(value for run in self.runs() for key, value in run.points.elements() if key == "rank0")

    def wait_for_more_rows(self, watcher: jobs.Process) -> None:
        count = len(self.arrived())
        wait_until(lambda: len(self.arrived()) > count, watcher)

    def kill(self, process: jobs.Process, kill: Kill = kill_process) -> None:
        if process.poll() is None:
            kill(process.pid)
        process.communicate()

    def finish(self, attempt: jobs.Process, watcher: jobs.Process) -> jobs.Done:
        """Let the attempt end, and with it the run and the watcher. Returns that."""
        (self.directory / "stop").touch()
        assert jobs.finish(attempt, self.directory).returncode == 0
        done = jobs.finish(watcher, self.directory)
        assert done.returncode == 0, done.output
        self.assert_each_once()
        assert self.state == "finished", done.output
        return done

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


@pytest.mark.full
def test_every_row_arrives_once_whenever_the_job_or_the_watcher_is_killed(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        for _ in range(moments(3)):
            watcher = here.watch()
            for _ in range(2):
                attempt = here.start_job()
                time.sleep(_moments.random() * 5)
                here.kill(attempt, _moments.choice([kill_process, kill_with_children]))
            here.kill(watcher, _moments.choice([kill_process, kill_with_children]))
        attempt, watcher = here.start_job(), here.watch("--until-done")
        here.finish(attempt, watcher)


@pytest.mark.wide
def test_an_attempt_that_still_ends_when_the_next_one_has_begun_on_another_node_loses_nothing(tmp_path):
    node = tmp_path / "node"
    node.mkdir(0o700)
    with cluster(tmp_path, "wandb") as here:
        first, watcher = here.start_job(), here.watch("--until-done")
        here.wait_for_more_rows(watcher)
        second = here.start_job({"XDG_RUNTIME_DIR": str(node)})
        for _ in range(2):
            here.wait_for_more_rows(watcher)
        end(first)
        wait_until(lambda: here.arrived()[-1] >= 200_000, watcher)
        here.finish(second, watcher)


@pytest.mark.wide
def test_a_shared_run_is_live_with_the_rows_of_all_ranks(tmp_path):
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
        kill_with_children(process.pid)
        process.communicate()
        env = {**env, "WANDB_MODE": "offline"}  # that of the jobs may be set on the login node too
        done = jobs.run([*command, "--killed-after", "2", str(tmp_path)], tmp_path, env)
        assert done.returncode == 0, done.output
        found = started.outcome()
    assert found.logged <= found.arrived
    assert found.duplicates == 0
    assert found.state == "failed"


@pytest.mark.full
def test_a_directory_that_is_not_there_is_refused_and_one_that_vanishes_ends_the_watcher_with_an_error(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        other, missing, file = here.directory / "other", here.directory / "missing", here.directory / "file"
        other.mkdir()
        file.touch()
        for path in (missing, file):
            refused = here.send("--watch", str(path))
            assert (refused.returncode, refused.output) == (1, f"cannot send: {path} is not a directory\n")

        attempt, watcher = here.start_job(), here.watch("--until-done", str(other))
        here.wait_for_more_rows(watcher)
        shutil.rmtree(other)
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 1, done.output
        assert done.output.endswith(f"cannot send: {other} is not a directory\n")
        assert here.state == "running"
        jobs.kill(attempt)


BARE = """
import sys, time, wandb
from pathlib import Path
quick = wandb.Settings(x_transaction_log_flush_interval=0.05, x_disable_stats=True)
run = wandb.init(project="p", id="run", settings=quick)
for row in range(20):
    while not Path(f"go-{row // 10}").exists():
        time.sleep(0.01)
    run.log({"row": row})
run.finish()
"""


@pytest.mark.wide
def test_a_run_of_wandbs_client_that_was_taken_for_killed_goes_on(tmp_path):
    """Only its file tells that the client lives: a job that loads its data, or that was stopped, looks killed."""
    with cluster(tmp_path, "wandb") as here:
        here.started.append(jobs.start([sys.executable, "-c", BARE], here.directory))
        wait_until(lambda: list(here.directory.glob("wandb/*/*.wandb")), here.started[-1])
        done = here.send("--watch", "--until-done", "--interval", "0.2", "--killed-after", "1")
        assert done.returncode == 0, done.output
        for number in range(2):
            (here.directory / f"go-{number}").touch()
        assert jobs.finish(here.started[0], here.directory).returncode == 0
        for options in ((), ("--watch", "--until-done")):
            done = here.send(*options)
            assert done.returncode == 0, done.output
            run = here.backend._server.run("run")
            assert [(row["_step"], row["row"]) for row in run.rows] == [(row, row) for row in range(20)]
            assert run.state == "finished"


@pytest.mark.full
def test_the_console_name_tags_summary_and_metadata_of_a_wandb_run_are_sent_while_it_logs(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        logs = "print('row', row, flush=True); run.tags = ['later']; run.name = 'renamed'; time.sleep(0.3); run.log("
        sets = "run.define_metric('row', summary='min'); run.summary['set'] = 1\nfor row in"
        code = BARE.replace("run.log(", logs).replace("for row in", sets)
        here.started.append(jobs.start([sys.executable, "-c", code], here.directory))
        (here.directory / "go-0").touch()
        wait_until(lambda: list(here.directory.glob("wandb/*/*.wandb")), here.started[-1])

        def lines() -> list[str]:
            return [line.partition(" ")[2] for run in here.backend._server.runs for line in run.log]

        watcher = here.watch("--until-done", "--killed-after", "20")
        wait_until(lambda: "row 9" in lines() and len(here.backend._server.runs[0].rows) == 10, watcher)
        (run,) = here.backend._server.runs
        assert run.state == "running"
        wait_until(lambda: (run.summary["set"], run.summary["row"]) == (1, {"min": 0}), watcher)
        here.kill(watcher)
        watcher = here.watch("--until-done", "--killed-after", "20")
        (here.directory / "go-1").touch()
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        rows = [line for line in lines() if line.startswith("row")]
        assert list(dict.fromkeys(rows)) == [f"row {row}" for row in range(20)]
        assert {line for line in rows if rows.count(line) > 1} <= {"row 9"}  # it may stand behind its row in the file
        assert not any("is open" in line for line in lines())  # what the watcher prints
        assert run.files.keys() >= {"output.log", "wandb-metadata.json"}
        assert (run.tags, run.name) == (["later"], "renamed")
        assert (run.summary["set"], run.summary["row"]) == (1, {"min": 0})


@pytest.mark.full
@needs_root
def test_what_does_not_pass_by_itself_ends_the_watcher_with_an_error(tmp_path):
    """No key where nobody can be asked for one, a key that is refused, and a file of another user."""
    once = ("--watch", "--until-done", "--interval=0.2", "--killed-after=1")
    with cluster(tmp_path, "wandb") as here:
        # While its job logs, a run is tried again: its user may set another key.
        attempt, watcher = here.start_job(), here.start(*once, env={"WANDB_API_KEY": "0" * 40})
        wait_until(lambda: len(here.backend._server.headers) > 20, watcher)
        (here.directory / "stop").touch()
        assert jobs.finish(attempt, here.directory).returncode == 0
        refused = jobs.finish(watcher, here.directory)
        env = jobs.environment(here.directory, **here.backend.environment())
        del env["WANDB_API_KEY"]
        main, terminal = pty.openpty()
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", *once, str(here.directory)]
        try:
            done = subprocess.run(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal, timeout=60)
            output = os.read(main, 1 << 16).decode()
        finally:
            os.close(main)
            os.close(terminal)
        assert done.returncode == 1, output
        assert output.count("there is no API key for") == 1
        assert here.state == "not there"

        (file,) = here.directory.glob("wandb/offline-run-*/*.wandb")
        os.chown(file, NOBODY, NOBODY)
        of_another = here.send(*once)
        assert (refused.returncode, of_another.returncode) == (1, 1)
        assert refused.output.count("not sent") == 1
        assert "is not a file of this user" in of_another.output
        os.chown(file, 0, 0)
        done = here.send(*once)
        assert done.returncode == 0, done.output
        here.assert_each_once()


def test_a_run_that_was_killed_while_it_was_opened_does_not_keep_the_watcher(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        killed = here.directory / "wandb" / "offline-run-20260101_000000-run"
        killed.mkdir(parents=True)
        (killed / "run-run.wandb").write_bytes(b":W&B\x00\xe1\x00")
        done = here.send("--watch", "--until-done", "--interval", "0.1", "--killed-after", "0.2")
        assert done.returncode == 0, done.output
        assert done.output.count("has no rows") == 1


@pytest.mark.wide
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


@pytest.mark.wide
def test_a_wandb_core_that_dies_is_replaced(tmp_path):
    with cluster(tmp_path, "wandb") as here:
        attempt, watcher = here.start_job(), here.watch("--until-done")
        for _ in range(2):
            here.wait_for_more_rows(watcher)
            for child in psutil.Process(watcher.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it ends with the one before it
                    child.kill()
        here.wait_for_more_rows(watcher)
        (here.directory / "stop").touch()
        assert jobs.finish(attempt, here.directory).returncode == 0
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        here.assert_each_once()
        assert here.state == "finished"


REFUSED_SOON = """
import sys
from flyteplugins_tracking.__main__ import main
from flyteplugins_tracking._commands import watch
watch._AGAIN_S = 5.0
sys.exit(main())
"""


@pytest.mark.wide
def test_a_wandb_run_goes_on_when_wandb_has_refused_its_rows_for_a_moment(tmp_path):
    """wandb-core sends no row after a refusal, and says nothing."""
    with cluster(tmp_path, "wandb") as here:
        attempt = here.start_job()
        watcher = here.start("--watch", "--interval", "0.5", "--until-done", program=("-c", REFUSED_SOON))
        here.wait_for_more_rows(watcher)
        with here.backend._server.failing(Fault.status(401, only="filestream")) as fault:
            here.backend._server.wait_for(lambda: fault.hits)
            time.sleep(1)
        for _ in range(2):
            here.wait_for_more_rows(watcher)
        (here.directory / "stop").touch()
        assert jobs.finish(attempt, here.directory).returncode == 0
        done = jobs.finish(watcher, here.directory)
        assert done.returncode == 0, done.output
        assert done.output.count("W&B does not take the rows") == 1, done.output
        here.assert_each_once()
        assert here.state == "finished"
