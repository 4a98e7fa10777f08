"""A `wandb.init` in a decorated function joins the function's run, as scripts and frameworks call it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import jobs
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

PROGRAM = jobs.PROGRAMS / "inner_init.py"


def run(server: WandbServer, directory: Path, function: str, ranks: int = 1, **env: str) -> jobs.Done:
    launcher = jobs.torchrun("--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else [sys.executable]
    done = jobs.run([*launcher, PROGRAM, function], directory, {**server.environment, "IMPORTS": "early", **env})
    assert done.returncode == 0, done.output
    return done


def own_config(run: RecordedRun) -> dict[str, object]:
    """The config without what the library adds."""
    ours = ("distributed", "restart_count", "flyte", "tracking_init")
    return {key: value for key, value in run.config.items() if key not in ours}


def values(run: RecordedRun) -> list[object]:
    return [row["x"] for row in run.rows]


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("imports", ["late", "early"])
def test_an_inner_init_describes_the_run_and_returns_one_without_effect_on_other_ranks(tmp_path, imports):
    with WandbServer() as server:
        done = run(server, tmp_path, "describes", 2, IMPORTS=imports)
        assert sorted(run.id for run in server.runs) == ["later-0", "later-1", "outer"]
        outer = server.run("outer")
    assert (outer.name, outer.notes, outer.tags) == ("inner", "by the script", ["a", "b", "c"])
    assert (outer.project, outer.group, outer.job_type) == ("tests", "", "")
    assert own_config(outer) == {"lr": 0.2, "seed": 3, "depth": 2, "late": True}
    assert (values(outer), outer.exit_codes) == ([1, 2, 3], [0])
    assert [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)] == [
        {"is_own": True, "is_again": True, "is_off": False, "lr": 0.2},
        {"is_own": False, "is_again": False, "is_off": True, "lr": 0.2},
    ]
    assert done.output.count("Without effect: project='elsewhere', id='other', group='g', job_type='j'.") == 1
    assert (
        done.output.count("rank 1 logs to a run that does nothing, and what it logs is lost: rank 0 has the run") == 1
    )
    assert len(list((tmp_path / "wandb").glob("run-*"))) == 3  # no call has made a directory for another run


@pytest.mark.full
def test_each_rank_with_a_run_joins_its_own_or_the_shared_one(tmp_path):
    with WandbServer() as server:
        run(server, tmp_path, "several_runs", 2)
        assert sorted(run.id for run in server.runs) == ["all", "each-rank-0", "each-rank-1"]
        for rank in range(2):
            own = server.run(f"each-rank-{rank}")
            assert (own.name, own.tags, own_config(own)) == ("inner", ["a"], {"lr": 0.1, "rank": rank})
            assert (values(own), own.exit_codes) == ([rank], [0])
        shared = server.run("all")
        assert (shared.name, shared.tags, own_config(shared)) == ("inner", ["a"], {"lr": 0.1, "rank": 0})
        assert (sorted(values(shared)), shared.exit_codes) == ([0, 1], [0])


def test_an_inner_init_in_many_situations(tmp_path):
    with WandbServer() as server:
        done = run(server, tmp_path, "situations", WANDB_SILENT="false")
        runs = {run.id: run for run in server.runs}
    kept = runs.pop("kept")
    assert (kept.name, kept.notes, kept.tags) == ("outer", "outer", ["a", "b"])
    assert own_config(kept) == {"lr": 0.2, "seed": 3}
    assert "kept, and adds what tracking_init does not set. Without effect: config['lr'], name='inner'," in done.output
    others = [runs.pop(f"another-{how}") for how in ("create_new", "finish_previous", True)]
    assert [(values(run), run.exit_codes) for run in others] == [([True], [0]), ([False], [0]), ([False], [0])]
    found = {name: (own_config(run), [row.get("x") for row in run.rows], run.exit_codes) for name, run in runs.items()}
    assert found == {
        "with_others": ({"after": 1}, [2], [0]),
        "in_a_thread": ({}, [1], [0]),
        "nested": ({"of": "joined", "outer": True}, [1, 3], [0]),
        "new": ({"of": "new"}, [2], [0]),
        "mine": ({"mine": True}, [], [0]),
        "beside": ({"ours": True}, [1], [0]),
        "fails": ({"lr": 0.1}, [], [1]),
        "after": ({}, [], [0]),
        "forks": ({"parent": True}, [], [0]),
        "child": ({"child": True}, [1], [0]),
    }
    assert runs["in_a_thread"].name == "of-thread"
    assert done.output.count("was opened before the decorated function") == 1
    assert "environment variables will be ignored" not in done.output  # nobody has changed one
    assert "W&B: run mine was opened before" in done.output


@pytest.mark.wide
def test_an_inner_init_syncs_tensorboard(tmp_path):
    with WandbServer() as server:
        run(server, tmp_path, "writes_for_tensorboard", 2, IMPORTS="late")
        (only,) = server.runs
    assert (only.id, only.name, own_config(only)["lr"]) == ("tensorboard", "inner", 0.1)
    assert [row["loss"] for row in only.rows if "loss" in row] == [0, 1, 2, 3, 4]


@pytest.mark.wide
def test_what_a_sweep_has_chosen_stays(tmp_path):
    with WandbServer() as server:
        run(server, tmp_path, "trials")
        assert [own_config(run) for run in server.runs] == [{"x": 1, "depth": 2}, {"x": 2, "depth": 2}]
        assert [values(run) for run in server.runs] == [[1], [2]]


@pytest.mark.full
def test_a_trial_of_a_sweep_in_the_function_has_the_sweeps_run(tmp_path):
    with WandbServer() as server:
        run(server, tmp_path, "trials_in_a_run")
        outer, trial = server.runs
    assert (outer.id, values(outer), own_config(outer), outer.exit_codes[-1]) == ("outer", [0, 9], {}, 0)
    assert (trial.project, own_config(trial), values(trial)) == ("swept", {"x": 1, "depth": 2}, [1])
    assert (outer.state, trial.state) == ("finished", "finished")
