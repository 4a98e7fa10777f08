"""Ray Train and Ray Tune, for real: ranks, runs, ids, ends and retries."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import SLURM, run_cold
from support import jobs
from support.wandb_server import WandbServer

pytest.importorskip("ray", reason="needs Ray: make test-engines")


def train(directory: Path, *arguments: str, **variables: str) -> tuple[jobs.Done, list[dict[str, Any]]]:
    """Run `ray_training.py`; return the job and what each rank has reported as Ray's truth and as ours."""
    env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "PYTHONPATH": jobs.search_path(jobs.PROGRAMS), **variables}
    done = run_cold([sys.executable, jobs.PROGRAMS / "ray_training.py", *arguments], directory, env)
    assert done.returncode == 0, done.output
    for report in done.reports:
        for call in report["calls"]:
            if "world_size" in report:
                assert_ray_agrees(report, call["info"])
    return done, done.reports


def assert_ray_agrees(truth: dict[str, Any], info: dict[str, Any]) -> None:
    names = ("rank", "world_size", "local_rank")
    assert [info[name] for name in names] == [truth[name] for name in names]
    assert (info["worker_index"], info["launcher"]) == (truth["node"], "ray")


@pytest.mark.parametrize("around", [{}, SLURM], ids=["alone", "slurm"])
@pytest.mark.parametrize(("workers", "run_mode"), [(2, "new"), (4, "auto")])
def test_the_ranks_are_those_of_ray_train(tmp_path: Path, workers: int, run_mode: str, around: dict[str, str]) -> None:
    done, reports = train(tmp_path, "train", str(workers), run_mode, **around)
    assert [report["rank"] for report in reports] == list(range(workers))
    assert len(done.runs) == (workers if run_mode == "new" else 1)
    assert {(len(run.rows), run.exit_code) for run in done.runs} == {(5, 0)}
    assert len({run.group or run.id for run in done.runs}) == 1
    assert done.runs[0].config["tracking_init"]["launcher"] == "ray"


@pytest.mark.parametrize("around", [{}, SLURM], ids=["alone", "slurm"])
def test_the_ranks_of_two_nodes_have_the_runs_of_their_scope(tmp_path: Path, around: dict[str, str]) -> None:
    done, reports = train(tmp_path, "train", "4", "auto", "worker", RAY_NODES="2", **around)
    assert sorted((report["node"], report["local_rank"]) for report in reports) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(run.id.rpartition("-worker-")[2] for run in done.runs) == ["0", "1"]
    assert len({run.id.rpartition("-worker-")[0] for run in done.runs}) == 1
    assert {(len(run.rows), run.exit_code) for run in done.runs} == {(5, 0)}


def test_the_ranks_of_two_nodes_share_a_run(tmp_path: Path) -> None:
    done, _ = train(tmp_path, "train", "4", "shared", RAY_NODES="2")
    assert len({run.id for run in done.runs}) == 1
    assert sum(len(run.rows) for run in done.runs) == 4 * 5
    assert {run.exit_code for run in done.runs} == {0}


def test_two_trainings_in_the_same_workers_are_two_runs(tmp_path: Path) -> None:
    done, reports = train(tmp_path, "loop", "2", "new")
    bases = [{report["calls"][call]["run"].partition("-rank-")[0] for report in reports} for call in range(2)]
    assert [len(base) for base in bases] == [1, 1]
    assert len({run.id for run in done.runs}) == len(done.runs) == 4


@pytest.mark.parametrize("around", [{}, SLURM], ids=["alone", "slurm"])
def test_a_retry_continues_the_run(tmp_path: Path, around: dict[str, str]) -> None:
    """New workers, which Ray starts after a failure, are the same training: `FailureConfig(max_failures=1)`."""
    done, reports = train(tmp_path, "retry", "2", **around)
    assert {run.id for run in done.runs} == {reports[0]["calls"][0]["run"]}
    assert sorted((len(run.rows), run.exit_code) for run in done.runs) == [(3, 1), (5, 0)]


@pytest.mark.parametrize(("kind", "around"), [("tune", {}), ("tune-retry", {}), ("tune-retry", SLURM)])
def test_each_trial_of_tune_has_one_run(tmp_path: Path, kind: str, around: dict[str, str]) -> None:
    done, reports = train(tmp_path, kind, "3", **around)
    names = {report["calls"][0]["run"]: report["trial"] for report in reports}
    assert {run.id for run in done.runs} == names.keys()
    assert len(done.runs) == (6 if kind == "tune-retry" else 3)
    for run in done.runs:
        assert run.group == names[run.id]
        assert run.config["kind"] == kind
    assert sorted({round(run.config["lr"], 1) for run in done.runs}) == [0.1, 0.2, 0.3]
    assert json.dumps([report["calls"][0]["info"] for report in reports]) == "[null, null, null]"


def test_the_example_has_a_run_for_the_training_and_one_for_each_trial(tmp_path: Path) -> None:
    example = jobs.PACKAGE.parent / "examples" / "ray_training.py"
    env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    done = run_cold([sys.executable, example], tmp_path, env)
    assert done.returncode == 0, done.output
    assert [(len(run.rows), run.exit_code) for run in done.runs] == [(10, 0)] * 4
    assert sorted(run.config.get("lr", 0) for run in done.runs) == [0, 0.01, 0.1, 0.3]
    assert len({run.group for run in done.runs}) == 4


def test_actors_have_roles_in_one_run(tmp_path: Path) -> None:
    with WandbServer() as server:
        done = run_cold([sys.executable, jobs.PROGRAMS / "ray_roles.py"], tmp_path, server.environment)
        assert done.returncode == 0, done.output
        run = server.run("of-actors")
        assert (run.state, run.exit_codes, run.mixed_writers) == ("finished", [0], False)
        for number in range(2):
            assert [row[f"rollout-{number}/reward"] for row in run.rows if f"rollout-{number}/reward" in row] == [
                *range(10)
            ]
            assert run.config[f"rollout-{number}"] == {"number": number}
