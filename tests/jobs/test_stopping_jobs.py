"""Ranks of real jobs that stop at the same step: whoever is asked, and however."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import wait_until
from support.wandb_server import WandbServer

PROGRAM = jobs.PROGRAMS / "stopping_ranks.py"
RANKS = 4
# Seconds of a step of each rank: all are as fast as the slowest one.
UNEVEN = (0.001, 0.005, 0.05, 0.02)
# Without it, a job over gloo may hang after a restart: the groups of both attempts share a store.
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TIMEOUT_S = 120
# A process that hosts a store until its input is closed, and prints the port.
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def torchrun(*options: str, ranks: int = RANKS, **settings: Any) -> list[str]:
    node = options or ("--standalone",)
    command = jobs.torchrun(*node, f"--nproc-per-node={ranks}", "--monitor-interval=0.1")
    return [*command, str(PROGRAM), json.dumps({"step_s": UNEVEN, **settings})]


def alone(**settings: Any) -> list[str]:
    return [sys.executable, str(PROGRAM), json.dumps({"step_s": [0.01], **settings})]


def notes(directory: Path, what: str, attempt: int = 0) -> Mapping[int, int]:
    """The steps that the ranks have written down."""
    return {int(path.name.split("-")[1]): int(path.read_text()) for path in directory.glob(f"{what}-*-{attempt}")}


def last_step(directory: Path, ranks: int = RANKS) -> int:
    """The step at which all ranks have stopped, each with a checkpoint."""
    steps = notes(directory, "stopped")
    assert sorted(steps) == list(range(ranks)), steps
    assert len(set(steps.values())) == 1, steps
    assert {int(path.read_text()) for path in directory.glob("checkpoint-*")} == set(steps.values())
    return steps[0]


def test_a_preempted_job_stops_at_one_step_and_a_restart_goes_on(tmp_path):
    command = torchrun("--standalone", "--max-restarts=1", asks=[[2, 20, "SIGTERM"]], steps=80)
    done = jobs.run(command, tmp_path, RESTARTS, TIMEOUT_S)
    assert done.returncode == 0, done.output
    step = last_step(tmp_path)
    assert 20 <= step < 79
    assert notes(tmp_path, "returned") == {}  # each rank has ended as one that was terminated
    assert notes(tmp_path, "finished", attempt=1) == dict.fromkeys(range(RANKS), 79)
    first, second = done.runs
    assert (first.exit_code, second.exit_code) == (143, 0)
    assert (first.summary["stop/reason"], first.summary["stop/step"]) == ("SIGTERM", step + 1)
    assert [row["step"] for row in [*first.rows, *second.rows]] == list(range(80))


@pytest.mark.full
@pytest.mark.parametrize(("how", "reason"), [("request", "a reason"), ("SIGUSR1", "SIGUSR1")])
def test_a_job_that_is_asked_to_stop_returns(tmp_path, how, reason):
    done = jobs.run(torchrun(asks=[[3, 10, how]]), tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.output
    step = last_step(tmp_path)
    (run,) = done.runs
    assert (run.exit_code, run.summary["stop/reason"], run.summary["stop/step"]) == (0, reason, step + 1)
    assert sorted(notes(tmp_path, "returned")) == list(range(RANKS))


@pytest.mark.full
def test_a_signal_to_the_agent_stops_all_ranks_at_one_step(tmp_path):
    job = jobs.start(torchrun(), tmp_path)
    wait_until(lambda: len(notes(tmp_path, "trains")) == RANKS, job)
    os.kill(job.pid, signal.SIGTERM)
    done = jobs.finish(job, tmp_path, TIMEOUT_S)
    last_step(tmp_path)
    assert done.returncode != 0
    assert [run.exit_code for run in done.runs] == [143]


@pytest.mark.full
def test_the_ranks_of_two_agents_stop_at_one_step(tmp_path):
    endpoint = f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"
    node = torchrun("--nnodes=2", "--rdzv-backend=c10d", endpoint, ranks=2, asks=[[3, 10, "SIGTERM"]])
    agents = [jobs.start(node, tmp_path) for _ in range(2)]
    done = [jobs.finish(agent, tmp_path, TIMEOUT_S) for agent in agents]
    last_step(tmp_path)
    assert [run.exit_code for run in done[0].runs] == [143]


@pytest.mark.wide
def test_a_rank_that_never_calls_it_leaves_all_as_it_is_without(tmp_path):
    """After 10 s the signal takes effect."""
    done = jobs.run(torchrun(asks=[[2, 10, "SIGTERM"]], never=[1]), tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode != 0
    assert notes(tmp_path, "stopped") == {}
    assert "the ranks have not agreed on a step at which to stop (SIGTERM): rank 1 does not call" in done.output
    assert 2 in notes(tmp_path, "unwound")


@pytest.mark.full
def test_a_rank_that_dies_while_the_others_agree_fails_the_job(tmp_path):
    done = jobs.run(torchrun(asks=[[1, 10, "request"], [3, 10, "SIGKILL"]]), tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode != 0
    assert 3 not in notes(tmp_path, "stopped")
    (run,) = done.runs
    assert (run.exit_code, run.summary["failure/rank"]) == (137, 3)


@pytest.mark.wide
def test_a_job_whose_store_goes_away_ends_as_it_does_without(tmp_path):
    """The store is in a process of its own. It is killed before a rank gets the signal."""
    store = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with store:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{store.stdout.readline().strip()}"
        options = ["--nnodes=1:2", "--rdzv-backend=c10d", endpoint, "--rdzv-conf=is_host=0,last_call_timeout=1"]
        job = jobs.start(torchrun(*options, asks=[[2, 60, "SIGTERM"]]), tmp_path)
        wait_until(lambda: len(notes(tmp_path, "trains")) == RANKS, job)
        store.kill()
        done = jobs.finish(job, tmp_path, TIMEOUT_S)
    assert done.returncode != 0
    assert notes(tmp_path, "returned") == {}  # a rank that waits in a collective is ended, the others are unwound
    assert [run.exit_code for run in done.runs] == [143], done.output


@pytest.mark.wide
def test_the_button_of_wandb_stops_all_ranks(tmp_path):
    with WandbServer() as server:
        job = jobs.start(torchrun(ranks=2), tmp_path, server.environment)
        wait_until(lambda: len(notes(tmp_path, "trains")) == 2, job)
        server.runs[0].stop_requested = True
        done = jobs.finish(job, tmp_path, TIMEOUT_S)
        assert done.returncode == 0, done.output
        step = last_step(tmp_path, ranks=2)
        (run,) = server.runs
        assert (run.exit_codes, run.state) == ([0], "finished")
        assert (run.summary["stop/reason"], run.summary["stop/step"]) == ("wandb", step + 1)


def test_a_process_is_not_unwound_and_ends_as_terminated(tmp_path):
    done = jobs.run(alone(asks=[[0, 5, "SIGTERM"]]), tmp_path, timeout_s=TIMEOUT_S)
    assert (done.returncode, last_step(tmp_path, ranks=1)) == (143, 5), done.output
    (run,) = done.runs
    assert (run.exit_code, run.summary["stop/reason"], run.summary["stop/step"]) == (143, "SIGTERM", 6)
    assert notes(tmp_path, "returned") == {}


def test_a_loop_that_goes_on_is_unwound_after_its_grace(tmp_path):
    settings = {"tracking": {"kill_after_s": 1}, "ignores": True}
    done = jobs.run(alone(asks=[[0, 5, "SIGTERM"]], **settings), tmp_path, timeout_s=TIMEOUT_S)
    assert (done.returncode, notes(tmp_path, "stopped")) == (143, {})
    assert notes(tmp_path, "unwound")[0] > 5
    assert [run.exit_code for run in done.runs] == [143]
