"""A job that logs offline: what it has logged is in its directories after kills, and arrives when these are sent."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.harness import Job, Outcome, ends, job, python, torchrun
from support.kills import journals_left, kill_process, kill_with_children, moments

OFFLINE = {"WANDB_MODE": "offline"}
SYNC = "wandb sync after another attempt"
SETTINGS: dict[str, Any] = {"tracking": {"id": jobs.RUN_ID}}
_moments = random.Random(28)


def directories(directory: Path) -> list[str]:
    return sorted(str(path) for path in (directory / "wandb").glob("offline-run-*"))


def send(started: Job, command: str = "flyteplugins_tracking send") -> jobs.Done:
    folder = started.directory
    return jobs.run([sys.executable, "-m", *command.split(), *directories(folder)], folder, started.server.environment)


def assert_each_once(found: Outcome) -> None:
    """Assert that the server has each row once: also one that a process was logging when it was killed, or not that."""
    last = {pid: max(number for other, number in found.logged if other == pid) for pid, _ in found.logged}
    assert found.logged <= found.arrived
    assert found.arrived - found.logged <= {(pid, number + 1) for pid, number in last.items()}
    assert found.duplicates == 0
    assert list(found.steps) == list(range(len(found.steps)))


@pytest.mark.full
def test_the_journal_of_an_offline_run_stays_until_it_is_sent(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), OFFLINE, **ends("loop", **SETTINGS))
        started.wait_for("ready 0 0")
        assert journals_left(tmp_path)
        started.signal(process.pid)
        process.communicate()
        assert journals_left(tmp_path)
        assert send(started).returncode == 0
        assert not journals_left(tmp_path)
        assert_each_once(started.outcome())


@pytest.mark.parametrize(
    ("by", "kill"),
    [
        pytest.param("send", kill_with_children, id="send-all processes"),
        pytest.param("send", kill_process, marks=pytest.mark.wide, id="send-the process"),
        pytest.param(SYNC, kill_process, marks=pytest.mark.wide, id=f"{SYNC}-the process"),
    ],
)
def test_rows_of_offline_attempts_that_were_killed_arrive_once(tmp_path, kill, by):
    """Also those that a file lacks and the journal beside it has, if `wandb sync` has sent the files before."""
    with job(tmp_path) as started:
        for count in range(1, moments(2) + 1):
            process = started.start(python(), OFFLINE, **ends("loop", attempts=99, **SETTINGS))
            started.wait_for("ready 0 0", count)
            time.sleep(_moments.random())
            kill(process.pid)
            process.communicate()
        if by != "send":
            jobs.finish(started.start(python(), OFFLINE, **ends("return", **SETTINGS)), tmp_path)
        done = send(started) if by == "send" else send(started, "wandb sync --yes")
        assert done.returncode == 0, done.output
        again = send(started)
        assert again.returncode == 0, again.output
        assert_each_once(started.outcome())
    assert not journals_left(tmp_path)


@pytest.mark.wide
def test_rows_of_a_torn_file_that_wandb_sync_has_sent_already_arrive_once(tmp_path):
    """`wandb sync` does not mark a file whose last record was cut by a kill: it would send the file again."""
    with job(tmp_path) as started:
        process = started.start(python(), OFFLINE, **ends("loop", attempts=99, **SETTINGS))
        started.wait_for("ready 0 0")
        started.log_more(rows=20)
        kill_with_children(process.pid)
        process.communicate()
        (directory,) = directories(tmp_path)
        (file,) = Path(directory).glob("*.wandb")
        os.truncate(file, file.stat().st_size - 5)
        assert send(started, "wandb sync --yes").returncode == 0
        assert len(started.server.runs[0].rows) >= 20
        assert not list(Path(directory).glob("*.synced"))
        for _ in range(2):
            done = send(started)
            assert done.returncode == 0, done.output
        assert_each_once(started.outcome())
    assert not journals_left(tmp_path)


@pytest.mark.full
def test_rows_of_a_killed_wandb_core_arrive_once(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), OFFLINE, **ends("loop", attempts=99, **SETTINGS))
        started.wait_for("ready 0 0")
        for _ in range(moments(2)):
            time.sleep(_moments.random())
            for pid in started.pids("wandb-core"):
                kill_process(pid)
            started.log_more(rows=20)
        started.signal(process.pid)
        process.communicate()
        assert send(started).returncode == 0
        assert_each_once(started.outcome())


@pytest.mark.wide
def test_rows_that_wandb_sync_could_not_know_are_sent_behind_the_others(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), OFFLINE, **ends("loop", attempts=99, **SETTINGS))
        started.wait_for("ready 0 0")
        started.log_more(rows=20)
        for pid in started.pids("wandb-core"):
            started.signal(pid, signal.SIGSTOP)
        started.log_more(rows=20)
        kill_with_children(process.pid)
        process.communicate()
        assert send(started, "wandb sync --yes").returncode == 0
        arrived = len(started.server.runs[0].rows)
        for _ in range(2):
            done = send(started)
            assert done.returncode == 0, done.output
        found = started.outcome()
    assert len(found.arrived) >= arrived + 20
    assert_each_once(found)
    assert not journals_left(tmp_path)


@pytest.mark.full
def test_rows_of_a_shared_run_whose_writer_is_killed_arrive_once(tmp_path):
    """What the other rank has logged after that is in its journal only."""
    settings = {"tracking": {"run_mode": "shared", "id": jobs.RUN_ID}, "rows": 20}
    with job(tmp_path) as started:
        process = started.start(torchrun("--max-restarts=1"), OFFLINE, **ends("loop", **settings))
        (writer,) = started.wait_for("ready 0 0")
        started.wait_for("ready 1 0")
        started.signal(writer, signal.SIGKILL)
        process.communicate()
        done = send(started)
        assert done.returncode == 0, done.output
        assert_each_once(started.outcome())
    assert not journals_left(tmp_path)


@pytest.mark.full
def test_a_full_disk_costs_rows_that_are_told_and_no_others(tmp_path):
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *python()]
    with job(tmp_path) as started:
        process = started.start(limited, OFFLINE, **ends("return", rows=300, value="x" * 1000, **SETTINGS))
        output = jobs.finish(process, tmp_path).output
        assert "rows cannot be kept in" in output, output
        assert send(started).returncode == 0
        found = started.outcome()
    assert found.returncode == 0
    assert 0 < len(found.steps) < 300
    assert list(found.steps) == list(range(len(found.steps)))
