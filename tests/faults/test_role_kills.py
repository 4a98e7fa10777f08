"""Kills, outages and mistakes in a run with roles: each row of each job arrives once."""

from __future__ import annotations

import random
import time

import pytest
from support.backends import BACKENDS
from support.kills import moments
from support.loopback import Fault
from support.roles import Roles

ROLES = ["rollout-0", "rollout-1"]
_random = random.Random(7)


@pytest.fixture
def job(tmp_path):
    with BACKENDS["wandb"](tmp_path / "server") as running:
        yield Roles(running, tmp_path / "jobs", WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")


def require_each_row_once(job, *names):
    for name in names:
        assert job.logged(name), name
        assert job.arrived(name) == job.logged(name), name
    assert job.server.runs[0].mixed_writers is False


@pytest.mark.full
@pytest.mark.parametrize("victim", ["rollout-0", pytest.param("owner", marks=pytest.mark.wide)])
def test_a_job_that_is_killed_again_and_again_loses_no_row(job, victim):
    """The other job logs meanwhile, and is not disturbed."""
    other = "owner" if victim == "rollout-0" else "rollout-0"
    settings = {"owner": {"role": None, "roles": ROLES}, "rollout-0": {"role": "rollout-0"}}
    watched = job.start(**settings["owner"], rows=400, pause_s=0.01, ends="stop") if other == "owner" else None
    first = 0
    for _ in range(moments(2)):
        process = job.start(**settings[victim], first=first, rows=10_000, pause_s=0.003)
        job.wait(f"open-{victim}", process)
        if watched is None:
            watched = job.start(**settings[other], rows=400, pause_s=0.01, ends="stop")
        time.sleep(_random.random() * 2)
        job.kill(victim, process)
        (job.directory / f"open-{victim}").unlink()
        first += 10_000
    done = job.run(**settings[victim], first=first, rows=50)
    assert done.returncode == 0, done.output
    job.go("stop")
    assert watched is not None
    assert job.finish(watched).returncode == 0
    require_each_row_once(job, "owner", "rollout-0")
    (run,) = job.server.runs
    assert run.state == "finished"


@pytest.mark.full
def test_a_role_logs_through_an_outage(job):
    owner = job.start(roles=ROLES, rows=100, pause_s=0.01, ends="stop")
    role = job.start("rollout-0", rows=100, pause_s=0.05, ends="stop")
    job.wait("open-rollout-0", role)
    with job.server.failing(Fault.status(503)) as fault:
        job.server.wait_for(lambda: fault.hits > 2)
    job.go("stop")
    assert [job.finish(one).returncode for one in (role, owner)] == [0, 0]
    require_each_row_once(job, "owner", "rollout-0")


@pytest.mark.full
def test_two_processes_with_one_role_lose_no_row(job):
    """By mistake. One is killed, and two are started then: one of them sends its rows."""
    owner = job.start(roles=ROLES, rows=10, ends="stop")
    pair = [job.start("rollout-0", first=first, rows=150, pause_s=0.01, ends="stop") for first in (0, 1000)]
    for process in pair:
        job.wait("open-rollout-0", process)
    job.wait("logs-no-more-rollout-0", owner)
    job.kill("rollout-0", owner, waits=False)  # one of the two: that which has written its id last
    later = [job.start("rollout-0", first=first, rows=10) for first in (2000, 3000)]
    assert [job.finish(one).returncode for one in later] == [0, 0]
    job.go("stop")
    for process in (*pair, owner):
        job.finish(process)
    require_each_row_once(job, "owner", "rollout-0")


@pytest.mark.full
def test_nodes_that_share_a_run_lose_no_row(job):
    """Both are killed again and again."""

    def start(first, rows):
        settings = {"rows": rows, "first": first, "pause_s": 0.003, "arguments": {"run_mode": "shared"}}
        return [
            job.start(name=f"node-{node}", key=f"rank{node}", env=node_variables(node), **settings) for node in (0, 1)
        ]

    for attempt in range(moments(2)):
        pair = start(10_000 * attempt, 10_000)
        for node, process in enumerate(pair):
            job.wait(f"open-node-{node}", process)
        time.sleep(_random.random() * 2)
        for node, process in enumerate(pair):
            job.kill(f"node-{node}", process)
            (job.directory / f"open-node-{node}").unlink()
    done = [job.finish(process) for process in start(1_000_000, 20)]
    assert [one.returncode for one in done] == [0, 0], [one.output for one in done]
    require_each_row_once(job, "node-0", "node-1")


def node_variables(node):
    """The variables of a node with one rank, without a store that the nodes share."""
    of_rank = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": node}
    return {name: str(value) for name, value in of_rank.items()}
