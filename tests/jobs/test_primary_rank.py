"""Real jobs whose primary is the last rank, as in pipeline parallelism: who has the run, and who ends it."""

from __future__ import annotations

import signal
import sys

import pytest
from faults.matrix import agent, until_logged
from support import jobs
from support.harness import ENDS, Job, ends, job

RANKS = 4
SHARED = {"run_mode": "shared", "id": "chosen", "primary_rank": -1}
NODES = [pytest.param([4], id="one node"), pytest.param([2, 2], id="two nodes", marks=pytest.mark.wide)]


def start(started: Job, nodes: list[int], how: dict[str, str]) -> None:
    """One agent for each node, with so many ranks."""
    rendezvous = f"127.0.0.1:{jobs.free_port()}"
    settings = ends(how, with_step=True, rank_in_config=True, tracking=SHARED)
    for ranks in nodes:
        options = [f"--nnodes={len(nodes)}", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"]
        started.start([*jobs.torchrun(*options, *where), str(ENDS)], **settings)


def test_only_the_last_rank_has_the_run_and_its_exit_code_counts(tmp_path):
    done = jobs.one_node(tmp_path, RANKS, tracking={"primary_rank": -1}, end={"3": 3})
    (run,) = done.runs
    assert [row["row"] for row in run.rows] == [0, 1, 2]
    assert run.exit_code == 3
    opened = {report["rank"]: report["run_id"] for report in done.reports}
    assert opened == {0: None, 1: None, 2: None, 3: run.id}
    for report in done.reports[:-1]:
        assert not report["wandb_loaded"]
        assert not report["torch_loaded"]


@pytest.mark.wide
def test_the_last_local_rank_of_each_worker_has_its_run(tmp_path):
    tracking = {"primary_rank": -1, "rank_scope": "worker"}
    done = jobs.nodes(tmp_path, [3, 1], ["--rdzv-id=job"], tracking=tracking)
    assert done.returncode == 0, done.output
    opened = [(report["local_rank"], report["run_id"]) for report in done.reports if report["run_id"]]
    assert sorted(local_rank for local_rank, _ in opened) == [0, 2]
    assert {run_id for _, run_id in opened} == {run.id for run in done.runs}
    (group,) = {run.group for run in done.runs}
    assert {run.id for run in done.runs} == {f"{group}-worker-0", f"{group}-worker-1"}


@pytest.mark.full
def test_a_rank_that_the_job_does_not_have_is_refused_on_every_rank(tmp_path):
    done = jobs.one_node(tmp_path, 2, tracking={"primary_rank": 2})
    assert done.returncode != 0
    assert "TopologyError: primary_rank=2 is not in this job, whose ranks are 0 to 1" in done.output
    assert done.runs == []


@pytest.mark.wide
def test_a_restart_goes_on_with_the_run_of_the_last_rank(tmp_path):
    done = jobs.one_node(tmp_path, 2, ["--max-restarts=1"], end={"1": "raise"}, tracking={"primary_rank": -1})
    assert done.returncode == 0, done.output
    assert len({run.id for run in done.runs}) == 1
    assert [
        run.exit_code for run in sorted(done.runs, key=lambda run: run.config["tracking_init"]["restart_count"])
    ] == [1, 0]
    assert {report["rank"] for report in done.reports if report["run_id"]} == {1}


@pytest.mark.wide
def test_a_process_group_without_a_job_name_gives_the_last_rank_an_id_alone(tmp_path):
    """Rank 0 has no run, and so sends no id."""
    script = (
        "for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
        f'MASTER_ADDR=127.0.0.1 MASTER_PORT={jobs.free_port()} "$@" & done; wait'
    )
    program = jobs.train(tracking={"primary_rank": -1}, process_group=True)
    done = jobs.run(["bash", "-c", script, "bash", sys.executable, *program], tmp_path)
    assert [report["run_id"] is not None for report in done.reports] == [False, True], done.output
    assert [(len(run.rows), run.exit_code) for run in done.runs] == [(3, 0)]
    assert done.runs[0].id.startswith("env-")


def ends_once_all_have_returned(started: Job) -> None:
    """Let the ranks that still log return. The run, which is still open, ends then, with all rows."""
    (run,) = started.server.runs
    assert not run.completed
    started.go()
    found = started.outcome()
    assert (found.returncode, found.lost, found.duplicates, found.leaked) == (0, 0, 0, ()), found.output
    assert (run.exit_codes, run.state, run.rows_after_completion, run.mixed_writers) == ([0], "finished", 0, False)


@pytest.mark.full
@pytest.mark.parametrize("nodes", NODES)
def test_the_last_rank_waits_for_the_others(tmp_path, nodes):
    with job(tmp_path) as started:
        start(started, nodes, {"3": "return", "*": "until go"})
        started.wait_for("returns")
        for rank in range(RANKS - 1):
            started.wait_for(f"ready {rank} 0")
        started.log_more(rows=20, but_not=started.wait_for("ready 3 0"))
        ends_once_all_have_returned(started)
        (run,) = started.server.runs
        assert (run.config["rank"], len(run.senders)) == (3, RANKS)


@pytest.mark.wide
def test_in_an_elastic_job_the_run_goes_on_where_the_last_rank_is(tmp_path):
    """A second node comes, and has the last rank. Then it dies, and the first node goes on alone."""
    tracking = {"run_mode": "shared", "primary_rank": -1}
    with job(tmp_path) as started:
        port, how = jobs.free_port(), ends("together", attempts=9, step_s=0.1, tracking=tracking)
        agent(started, "127.0.0.1", port, host=True, **how)
        (alone,) = started.wait_for("ready 0 0")
        second = agent(started, "127.0.0.2", port, host=False, **how)
        started.wait_until(lambda: any("entered 1" in lines for lines in started.notes().values()), "no second rank")
        (last,) = started.wait_for("entered 1")
        until_logged(started, but_not=set(started.notes()) - {last})
        before = set(started.notes())
        for pid in (second.pid, last):
            started.signal(pid, signal.SIGKILL)
        until_logged(started, but_not=before)
        started.go()
        found = started.outcome()
        assert found.runs == 1, found.output
        (run,) = started.server.runs
        writers = {row["pid"] for row in run.rows}
        assert {alone, last} <= writers
        assert (run.exit_codes[-1], run.state, found.duplicates) == (0, "finished", 0), found.output
        assert found.logged - found.arrived <= {row for row in found.fresh if row[0] == last}
