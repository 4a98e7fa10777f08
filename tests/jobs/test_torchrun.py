"""Real torchrun jobs: who gets a run, with which id and group, and how it is said to have ended."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from wandb_files import StoredRun

from flyteplugins_tracking._rank.plan import RANK_SCOPES

FOUR = 4


@dataclass(frozen=True)
class Training:
    """One of the trainings of a job, which has a project of its own."""

    job: jobs.Done
    project: str

    @property
    def runs(self) -> list[StoredRun]:
        return [run for run in self.job.runs if run.project == self.project]

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [report for report in self.job.reports if report["project"] == self.project]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory):
    """A job of 4 ranks on one node for each mode, which trains in one scope and then in the other."""

    @functools.cache
    def job(run_mode: str) -> jobs.Done:
        tracking = {"run_mode": run_mode, "name": "n", "tags": ["t"], "config": {"lr": 0.1}}
        trackings = [{**tracking, "rank_scope": scope, "project": scope} for scope in RANK_SCOPES]
        return jobs.one_node(tmp_path_factory.mktemp(run_mode), FOUR, trackings=trackings)

    return lambda run_mode, rank_scope: Training(job(run_mode), rank_scope)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory):
    """2 nodes of 2 ranks, with a run for each node."""
    directory = tmp_path_factory.mktemp("two-nodes")
    return jobs.nodes(directory, [2, 2], ["--rdzv-id=job"], tracking={"rank_scope": "worker"})


@pytest.fixture(scope="module")
def ragged_nodes(tmp_path_factory: pytest.TempPathFactory):
    """A node of 3 ranks and one of 1, with a run for each rank."""
    directory = tmp_path_factory.mktemp("ragged-nodes")
    return jobs.nodes(directory, [3, 1], ["--rdzv-id=job"], tracking={"run_mode": "new", "rank_scope": "worker"})


def test_a_plain_function_under_torchrun_has_one_run_for_all_ranks(four_ranks):
    assert len(four_ranks("auto", "global").runs) == 1


@pytest.mark.parametrize("rank_scope", ["global", "worker"])
def test_a_rank_without_a_run_loads_no_tracker_starts_nothing_and_writes_nothing(four_ranks, rank_scope):
    done = four_ranks("auto", rank_scope)
    others = [report for report in done.reports if report["run_id"] is None]
    assert [report["rank"] for report in others] == [1, 2, 3]
    for report in others:
        assert not report["wandb_loaded"]
        assert not report["torch_loaded"]
        assert report["children"] == []
    directory = done.job.directory
    assert {path.name for path in directory.iterdir()} - {".cache", ".config"} == {"reports", "wandb"}
    runs = [path for path in (directory / "wandb").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(runs) == len(RANK_SCOPES)


@pytest.mark.full
def test_two_nodes_have_a_run_each_per_worker(two_nodes):
    done = two_nodes
    assert done.returncode == 0, done.output
    ids = {report["worker_index"]: report["run_id"] for report in done.reports if report["run_id"]}
    (group,) = {run.group for run in done.runs}
    assert ids == {0: f"{group}-worker-0", 1: f"{group}-worker-1"}
    assert {run.config["tracking_init"]["num_workers"] for run in done.runs} == {2}
    assert [report["local_rank"] for report in done.reports if report["run_id"]] == [0, 0]


@pytest.mark.full
def test_ragged_nodes_agree_on_ids(ragged_nodes):
    done = ragged_nodes
    assert done.returncode == 0, done.output
    sizes = {
        worker: len([r for r in done.reports if r["worker_index"] == worker])
        for worker in {r["worker_index"] for r in done.reports}
    }
    assert sorted(sizes.values()) == [1, 3]
    base = done.runs[0].group.removesuffix("-worker-0").removesuffix("-worker-1")
    for report in done.reports:
        worker = f"{base}-worker-{report['worker_index']}"
        assert report["run_id"] == f"{worker}-rank-{report['local_rank']}"
    assert len({report["run_id"] for report in done.reports}) == 4


@pytest.mark.wide
def test_a_constant_rendezvous_id_makes_a_new_run_for_each_invocation(two_nodes, ragged_nodes):
    twice = [{run.id.partition("-worker-")[0] for run in done.runs} for done in (two_nodes, ragged_nodes)]
    assert [len(bases) for bases in twice] == [1, 1]
    assert twice[0] != twice[1]
    assert all(base.startswith("job-") for bases in twice for base in bases)


@pytest.mark.full
def test_nodes_that_share_no_store_at_all_agree_through_their_process_group(tmp_path):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    in_a_file = ["--rdzv-id=job", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'store'}"]
    done = jobs.nodes(tmp_path, [1, 1], in_a_file, env, process_group=True, tracking={"run_mode": "new"})
    assert done.returncode == 0, done.output
    assert len({run.group for run in done.runs}) == 1
    assert len(done.runs) == 2


@pytest.mark.full  # the matrix has a restart of two nodes
def test_restarted_nodes_whose_agents_share_no_store_go_on_with_the_same_run(tmp_path):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--rdzv-id=job", "--max-restarts=1"]
    failing = {"end": {"0": "raise"}, "linger_s": 60}  # the agent that restarts waits for the other to come again
    done = jobs.nodes(tmp_path, [1, 1], options, env, process_group=True, tracking={"run_mode": "new"}, **failing)
    assert done.returncode == 0, done.output
    opened = [report for report in done.reports if report["run_id"]]
    assert {report["restart_count"] for report in opened} >= {0, 1}
    assert len({report["run_id"].partition("-rank-")[0] for report in opened}) == 1
    assert [run.exit_code for run in done.runs if run.config.get("tracking_init", {}).get("restart_count") == 1][
        :1
    ] == [0]


@pytest.mark.full
def test_ranks_that_a_shell_starts_by_hand_are_another_run_each_time(tmp_path):
    """The shell is no name for a job: it starts the next one too."""
    script = (
        "for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
        'MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "$@" & done; wait'
    )
    done = jobs.run(["bash", "-c", f"{script}\n{script}", "bash", sys.executable, *jobs.train()], tmp_path)
    assert len({run.id for run in done.runs}) == len(done.runs) == 2, done.output


@pytest.mark.full
def test_several_calls_in_one_job_are_several_runs_with_the_same_ids_on_all_ranks(tmp_path):
    done = jobs.one_node(tmp_path, 2, calls=2, tracking={"run_mode": "new"})
    assert done.returncode == 0, done.output
    assert len({run.id for run in done.runs}) == 4
    assert len({run.group for run in done.runs}) == 2


@pytest.mark.wide
def test_torch_distributed_launch_is_torchelastic(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node=2"]
    done = jobs.run([*command, f"--master-port={jobs.free_port()}", *jobs.train()], tmp_path)
    assert done.returncode == 0, done.output
    assert [report["launcher"] for report in done.reports] == ["torchelastic"] * 2
    assert sorted(report["argv"][0] for report in done.reports) == ["--local-rank=0", "--local-rank=1"]
    assert len(done.runs) == 1


@pytest.mark.full
@jobs.needs_mpirun
def test_mpirun_on_one_node_has_one_run_and_another_one_each_time(tmp_path):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", "bash", "-c", 'exec "$0" "$@"']
    done = [jobs.run([*mpirun, sys.executable, *jobs.train()], tmp_path / str(i)) for i in range(2)]
    assert [d.returncode for d in done] == [0, 0], done[0].output
    assert [report["launcher"] for report in done[0].reports] == ["openmpi"] * 3
    assert len(done[0].runs) == 1
    assert {run.id for run in done[0].runs}.isdisjoint(run.id for run in done[1].runs)


def test_a_plain_process_makes_a_new_run_each_time(tmp_path: Path):
    done = jobs.python(tmp_path, *jobs.train(calls=2, tracking={"run_mode": "new", "rank_scope": "worker"}))
    assert done.returncode == 0, done.output
    assert len({run.id for run in done.runs}) == 2
    assert "tracking_init" not in done.runs[0].config
