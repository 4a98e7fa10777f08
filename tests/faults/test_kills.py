"""A job that is killed again and again, at random moments: also while it opens its run and sends an earlier tail."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support import jobs
from support.harness import ENDS, Job, Outcome, ends, job, python, torchrun
from support.kills import Kill, journals_left, kill_process, kill_with_children, moments, send_in_spite_of_kills
from support.loopback import Fault
from support.wandb_server import WandbServer

from faults.matrix import PROMPT

KILLS, NODE_KILLS, LONGEST_S = 9, 3, 2.0
# The rows that a killed process leaves: sending them takes about a second.
TAIL = 1500


def test_what_a_killed_process_has_not_sent_is_sent_once(tmp_path):
    """Also if nothing goes on with the run, and if it is sent twice."""
    with job(tmp_path) as started:
        process = started.start(python(), PROMPT, **ends("loop", with_step=True))
        started.wait_for("ready 0 0")
        started.server.wait_for(lambda: started.server.runs[0].rows, 240)
        started.log_more(rows=20)
        started.signal(process.pid, signal.SIGKILL)
        process.communicate()
        (directory,) = {str(path.parent) for path in tmp_path.rglob("*.wandb")}
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", directory]
        texts = [jobs.run(command, tmp_path, started.server.environment).output for _ in range(2)]
        found = started.outcome()
    assert re.search(r"^sent \S+: \d+ rows of run ", texts[0], re.MULTILINE), texts[0]
    assert texts[1].startswith(f"{directory} has nothing that is not sent yet"), texts[1]
    found.assert_each_once()
    assert (found.exit_codes, found.state) == ((1,), "failed")


@pytest.mark.wide
def test_a_job_that_goes_back_keeps_all_rows_with_one_warning(tmp_path):
    settings = {"tracking": {"id": jobs.RUN_ID}, "with_step": True}
    with job(tmp_path) as started:
        process = started.start(python(), **ends("loop", attempts=9, **settings))
        (killed,) = started.wait_for("ready 0 0")
        started.log_more(rows=20)
        started.signal(process.pid, signal.SIGKILL)
        process.communicate()
        started.start(python(), **ends("return", first_step=30, rows=20, **settings))
        found = started.outcome()
        (run,) = started.server.runs
    found.assert_each_once()
    assert [row["global_step"] for row in run.rows if row["pid"] != killed] == list(range(30, 50))
    assert (run.exit_codes, run.state) == ([0], "finished")
    assert found.output.count("All rows are kept") == 1


@pytest.mark.wide
def test_a_service_that_counts_late_loses_no_row_of_a_job_that_is_started_again(tmp_path):
    settings = {"tracking": {"id": jobs.RUN_ID}, "rows": 20}
    with WandbServer(late=(3.0, 3.0)) as server:
        started = Job(server, tmp_path)
        for _ in range(2):
            jobs.finish(started.start(python(), **ends("return", **settings)), tmp_path)
        process = started.start(python(), PROMPT, **ends("loop", attempts=9, **settings))
        started.wait_for("ready 0 0", count=3)
        server.wait_for(lambda: len(server.runs[0].rows) > 60, 240)
        started.signal(process.pid, signal.SIGKILL)
        process.communicate()
        started.start(python(), **ends("return", **settings))
        found = started.outcome()
    assert server.runs[0].rows_overwritten == 0
    found.assert_each_once()


def kill_later(started: Job, process: jobs.Process, longest_s: float, kill: Kill) -> None:
    time.sleep(_moments.random() * longest_s)
    if process.poll() is None:
        started.fault_at = time.monotonic()
        kill(process.pid)
    process.communicate()


_moments = random.Random(18)


@pytest.mark.full
def test_every_row_arrives_once_if_the_job_is_killed_while_its_run_ends(tmp_path):
    settings = {"tracking": {"id": jobs.RUN_ID}, "rows": 200}
    with job(tmp_path) as started:
        for count in range(1, moments(3) + 1):
            process = started.start(python(), **ends("return", **settings))
            started.wait_for("returns", count)
            kill_later(started, process, 0.6, kill_process)
        started.start(python(), **ends("return", **settings))
        assert_each_once(started.outcome(), (0, "finished"), tmp_path)


@pytest.mark.full
def test_a_tail_is_sent_once_if_the_job_is_killed_again_and_again_while_it_sends_it(tmp_path):
    settings = {"tracking": {"id": jobs.RUN_ID}}
    with job(tmp_path) as started:
        process = started.start(python(), **ends("loop", attempts=99, rows=TAIL, **settings))
        started.wait_for("ready 0 0")
        kill_with_children(process.pid)
        process.communicate()
        for count in range(2, moments(3) + 2):
            process = started.start(python(), **ends("loop", attempts=99, rows=1, **settings))
            started.wait_for("starts 0", count)
            kill_later(started, process, 1.5, kill_with_children)
        started.start(python(), **ends("return", rows=1, **settings))
        assert_each_once(started.outcome(), (0, "finished"), tmp_path)


@pytest.mark.full
def test_a_send_that_is_killed_again_and_again_sends_each_row_once(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("loop", rows=TAIL))
        started.wait_for("ready 0 0")
        started.signal(process.pid, signal.SIGKILL)
        process.communicate()
        (directory,) = {path.parent for path in tmp_path.rglob("*.wandb")}
        send_in_spite_of_kills(directory, tmp_path, started.server.environment, moments(3), 2.5)
        assert_each_once(started.outcome(), (1, "failed"), tmp_path)


@pytest.mark.wide
def test_rows_of_attempts_that_were_logged_offline_follow_when_the_service_is_back(tmp_path):
    """Online, offline, offline and killed, online again: and that is killed too."""
    tracking = {"id": jobs.RUN_ID, "if_unavailable": "degrade", "init_timeout_s": 2}
    settings = {"tracking": tracking, "rows": 30, "with_step": True}
    with job(tmp_path) as started:
        jobs.finish(started.start(python(), **ends("return", **settings)), tmp_path)
        with started.server.failing(Fault.refuse()):
            jobs.finish(started.start(python(), **ends("return", **settings)), tmp_path)
            process = started.start(python(), **ends("loop", attempts=99, **settings))
            started.wait_for("ready 0 0", 3)
            kill_process(process.pid)
            process.communicate()
        assert len(list(tmp_path.rglob("offline-run-*"))) == 2
        for count in (4, 5):
            process = started.start(python(), PROMPT, **ends("loop", attempts=99, **settings))
            started.wait_for("ready 0 0", count)
            kill_later(started, process, 2.0, kill_process)
        started.start(python(), **ends("return", **settings))
        found = started.outcome()
        rows = started.server.runs[0].rows
    assert_each_once(found, (0, "finished"), tmp_path)
    of_later_attempts = [row for row in rows if row["pid"] != rows[0]["pid"]]
    assert [row["global_step"] for row in of_later_attempts] == [row["n"] for row in of_later_attempts]
    assert len(list(tmp_path.rglob("offline-run-*/*.synced"))) == 2


def assert_each_once(found: Outcome, end: tuple[int, str], directory: Path) -> None:
    """Assert that the server has each row once, and the true end; and that no journal is left."""
    found.assert_each_once()
    assert (found.exit_codes[-1], found.state) == end
    assert set(found.exit_codes) == {end[0]}
    assert not journals_left(directory)


def assert_each_writers_order(rows: list[dict[str, object]]) -> None:
    """Assert that the rows of each process are in their order. W&B itself gives the steps of several writers."""
    for pid in {row["pid"] for row in rows}:
        numbers = [row["n"] for row in rows if row["pid"] == pid]
        assert numbers == list(range(len(numbers)))


@pytest.mark.full
def test_every_row_arrives_once_whenever_the_process_is_killed(tmp_path):
    delays = random.Random(18)
    settings = {"tracking": {"id": jobs.RUN_ID}, "with_step": True, "step_s": 0.01}
    with job(tmp_path) as started:
        for _ in range(moments(KILLS)):
            process = started.start(python(), **ends("loop", attempts=99, **settings))
            time.sleep(delays.random() * LONGEST_S)
            started.signal(process.pid, signal.SIGKILL)
            process.communicate()
        started.start(python(), **ends("return", **settings))
        found = started.outcome()
    found.assert_each_once()
    assert (found.exit_codes, found.state) == ((0,), "finished")
    assert not journals_left(tmp_path)


def start_nodes(started, count, settings):
    """Start a job of two nodes of two ranks, and return its agents once each rank has a row's time behind it."""
    options = [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}",
    ]
    command = [*jobs.torchrun("--monitor-interval=0.1", *options), str(ENDS)]
    agents = [started.start(command, **settings) for _ in range(2)]
    for rank in range(4):
        started.wait_for(f"ready {rank} 0", count)
    return agents


@pytest.mark.wide
@pytest.mark.parametrize(
    ("run_mode", "with_step"),
    [
        pytest.param("auto", False, marks=pytest.mark.wide),
        ("auto", True),
        pytest.param("shared", False, marks=pytest.mark.wide),
    ],
    ids=["auto", "steps", "shared"],
)
def test_every_row_of_each_nodes_run_arrives_once_when_a_node_is_killed(tmp_path, run_mode, with_step):
    """The platform then ends the other node, and starts the job again on the same disk."""
    delays = random.Random(18)
    tracking = {"id": jobs.RUN_ID, "rank_scope": "worker", "run_mode": run_mode}
    settings = {"tracking": tracking, "with_step": with_step}
    with job(tmp_path) as started:
        for attempt in range(NODE_KILLS):
            agents = start_nodes(started, attempt + 1, ends("loop", attempts=99, **settings))
            time.sleep(delays.random() * LONGEST_S)
            dying, other = (agents, agents[::-1])[attempt % 2]
            jobs.kill(dying)
            dying.communicate()
            if other.poll() is None:
                started.signal(other.pid)
            other.communicate()
        start_nodes(started, NODE_KILLS + 1, ends("return", **settings))
        found, runs = started.outcome(), started.server.runs
    found.assert_each_once(one_writer=False)
    assert sorted(run.id for run in runs) == [f"{jobs.RUN_ID}-worker-{number}" for number in range(2)]
    for run in runs:
        if run_mode == "shared":
            assert_each_writers_order(run.rows)
        else:
            assert [row["_step"] for row in run.rows] == list(range(len(run.rows)))
        assert (run.exit_codes[-1], run.state) == (0, "finished")
    assert not journals_left(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.wide)])
def test_every_row_of_every_rank_arrives_once_whichever_process_of_a_shared_run_is_killed(tmp_path, mode):
    """First a rank or a wandb-core, and a moment later all the others. Offline, one command sends what is left."""
    random_moments, env = random.Random(18), {**PROMPT, "WANDB_MODE": mode}
    settings = {"tracking": {"id": jobs.RUN_ID, "run_mode": "shared"}}
    with job(tmp_path) as started:
        for count in range(1, moments(KILLS // 3) + 1):
            process = started.start(torchrun(ranks=3), env, **ends("loop", attempts=99, **settings))
            ranks = [started.wait_for(f"ready {rank} 0", count)[-1] for rank in range(3)]
            time.sleep(random_moments.random() * LONGEST_S)
            with contextlib.suppress(ProcessLookupError):
                kill_process(random_moments.choice([*ranks, *started.pids("wandb-core")]))
            time.sleep(random_moments.random())
            if process.poll() is None:
                kill_with_children(process.pid)
            process.communicate()
        jobs.finish(started.start(torchrun(ranks=3), env, **ends("return", **settings)), tmp_path)
        if mode == "offline":
            command = [sys.executable, "-m", "flyteplugins_tracking", "send", tmp_path / "wandb"]
            sent = jobs.run(command, tmp_path, started.server.environment)
            assert sent.returncode == 0, sent.output
        found, (run,) = started.outcome(), started.server.runs
    found.assert_each_once(one_writer=False)
    assert (run.mixed_writers, run.rows_overwritten) == (False, 0)
    assert (run.exit_codes[-1], run.state) == (0, "finished")
    assert_each_writers_order(run.rows)
    assert not journals_left(tmp_path)
