"""A job that logs offline: what it has logged is in its directories after kills, and arrives when these are sent."""

from __future__ import annotations

import random
import signal
import sys
import time
from typing import Any

import pytest
from support import jobs
from support.harness import Job, ends, job, python, torchrun
from support.kills import journals_left, kill_process, kill_with_children, moments

OFFLINE = {"WANDB_MODE": "offline"}
SETTINGS: dict[str, Any] = {"tracking": {"id": jobs.RUN_ID}}
_moments = random.Random(28)


def send(started: Job) -> jobs.Done:
    folder = started.directory
    directories = sorted((folder / "wandb").glob("offline-run-*"))
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", *directories]
    return jobs.run(command, folder, started.server.environment)


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
        started.outcome().assert_each_once()


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(kill_with_children, id="all processes"),
        pytest.param(kill_process, marks=pytest.mark.wide, id="the process"),
    ],
)
def test_rows_of_offline_attempts_that_were_killed_arrive_once(tmp_path, kill):
    with job(tmp_path) as started:
        for count in range(1, moments(2) + 1):
            process = started.start(python(), OFFLINE, **ends("loop", attempts=99, **SETTINGS))
            started.wait_for("ready 0 0", count)
            time.sleep(_moments.random())
            kill(process.pid)
            process.communicate()
        for _ in range(2):
            done = send(started)
            assert done.returncode == 0, done.output
        started.outcome().assert_each_once()
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
        started.outcome().assert_each_once()


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
        started.outcome().assert_each_once()
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
