"""Trainer, Accelerate and Lightning inside the decorator: their run is ours, on exactly our ranks, with its true end.

Each framework runs in one job, whose ranks call several decorated functions: importing it costs seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.backends import EXAMPLES
from support.mlflow_server import stored_runs
from support.wandb_server import RecordedRun, WandbServer

TORCHRUN = jobs.torchrun("--standalone", "--nproc-per-node=2")


class Job:
    """A job that has ended, and what came of it."""

    def __init__(self, server: WandbServer, directory: Path, command: list[str]) -> None:
        self.directory, self.server = directory, server
        env = {
            **server.environment,
            "PYTHONPATH": jobs.search_path(EXAMPLES),
            "MLFLOW_TRACKING_URI": f"sqlite:///{directory / 'mlflow.db'}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        self.done = jobs.run(command, directory, env)

    @property
    def projects(self) -> list[str]:
        return [run.project for run in self.server.runs]

    def run(self, project: str) -> RecordedRun:
        """The only one of the project."""
        (run,) = (run for run in self.server.runs if run.project == project)
        assert (run.rows_overwritten, run.rows_after_completion) == (0, 0)
        return run

    def seen(self, name: str) -> Any:
        text = (self.directory / f"seen-{name}").read_text()
        return json.loads(text) if name.endswith(".json") else text


@contextmanager
def job(directory: Path, package: str, launcher: list[str], program: str, *arguments: str) -> Iterator[Job]:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with WandbServer() as server:
        yield Job(server, directory, [*launcher, str(jobs.PROGRAMS / program), *arguments])
        assert server.errors == []


@pytest.mark.full
def test_trainers_runs_are_ours(tmp_path):
    with job(tmp_path, "transformers", TORCHRUN, "hf_runs.py") as trainer:
        assert trainer.done.returncode == 0, trainer.done.output
        assert trainer.projects == ["examples", "failing", "shared", "search"]
        seen = [trainer.seen(f"{rank}.json") for rank in (0, 1)]

        run = trainer.run("examples")
        assert (run.name, run.exit_codes, run.config["data"]) == ("trainer", [0], "y = 2x")
        assert any("train/loss" in row for row in run.rows)

        run = trainer.run("failing")  # once Trainer is done
        assert (run.id, run.name) == ("failing", "ours")
        assert [row["train/global_step"] for row in run.rows] == [1, 2, 3, 4, 4]
        assert all("train/loss" in row for row in run.rows[:4])
        assert (run.config["mine"], run.config["max_steps"]) == (1, 4)
        assert run.config["learning_rate"] == 5e-5  # of equal keys, Trainer's is the later one
        assert seen[0]["failing"] == {"id": "failing", "wandb": True, "raised": "made to fail"}
        assert seen[1]["failing"]["id"] is None
        assert (run.exit_codes, run.state) == ([1], "failed")

        run = trainer.run("search")  # Trainer calls `wandb.finish()` before each trial, on every rank
        assert seen[0]["search"] == {"id": "search", "trials": 2}
        assert [row["train/global_step"] for row in run.rows] == [1, 2, 3, 4, 4] * 2
        assert [row["train/learning_rate"] for row in run.rows[:6:5]] == [0.1, 0.2]
        assert run.exit_codes == [0]

        run = trainer.run("shared")  # Trainer logs once, and the ranks beside it
        assert [row["train/global_step"] for row in run.rows if "rank" not in row] == [1, 2, 3, 4, 4]
        assert sorted(row["rank"] for row in run.rows if "rank" in row) == [0, 1]
        assert [one["shared"]["id"] for one in seen] == ["shared", "shared"]
        assert run.exit_codes == [0]

        (stored,) = stored_runs(tmp_path / "mlflow.db", "mlflow")  # both ranks open it, in a store that is made now
        assert (stored.id, stored.name, stored.status) == ("mlflow", "ours", "FINISHED")
        assert len(stored.values("loss")) == 4
        assert stored.params["max_steps"] == "4"
        assert [one["mlflow"]["id"] for one in seen] == ["mlflow", "mlflow"]


def test_a_crash_after_accelerates_end_training_is_recorded(tmp_path):
    """`end_training()` calls `finish()` on the run, and destroys the process group: the run ends without it."""
    with job(tmp_path, "accelerate", TORCHRUN, "accelerate_runs.py", "ended") as accelerate:
        assert accelerate.done.returncode == 0, accelerate.done.output
        assert accelerate.done.output.count("raised: made to fail") == 2
        assert accelerate.projects == ["ended"]
        run = accelerate.run("ended")
        assert (run.name, run.exit_codes, run.state) == ("ours", [1], "failed")
        assert [row["_step"] for row in run.rows] == [0, 1, 2, 3]  # Accelerate's own are explicit
        assert all("loss" in row for row in run.rows)
        assert run.rows[-1]["after"] == 1
        assert (run.config["mine"], run.config["lr"]) == (1, 0.1)
        assert [accelerate.seen(f"ended-{rank}") for rank in (0, 1)] == ["ended", "None"]


@pytest.mark.wide
def test_notebook_launcher_starts_a_decorated_function_and_is_called_in_one(tmp_path):
    ports = [str(jobs.free_port()), str(jobs.free_port())]
    with job(tmp_path, "accelerate", [sys.executable], "accelerate_runs.py", "notebook", *ports) as notebook:
        assert notebook.done.returncode == 0, notebook.done.output
        assert notebook.projects == ["launched", "launching"]
        run = notebook.run("launched")
        assert ([row["_step"] for row in run.rows], run.exit_codes) == ([0, 1, 2], [0])
        assert [notebook.seen(f"launched-{rank}") for rank in (0, 1)] == ["launched", "None"]
        run = notebook.run("launching")  # its forked workers do not end it
        assert [{"before", "after"} & row.keys() for row in run.rows] == [{"before"}, {"after"}]
        assert run.exit_codes == [0]
        assert [notebook.seen(f"forked-{rank}") for rank in (0, 1)] == ["None", "None"]


@pytest.mark.wide
def test_lightnings_runs_are_ours(tmp_path):
    with job(tmp_path, "lightning", TORCHRUN, "lightning_runs.py", "wandb", "example") as lightning:
        assert lightning.done.returncode == 0, lightning.done.output
        assert lightning.projects == ["wandb", "examples"]
        run = lightning.run("wandb")
        assert (run.id, run.name, run.exit_codes, run.config["mine"]) == ("wandb", "ours", [0], 1)
        assert [row.get("trainer/global_step") for row in run.rows] == [0, 1, 1]  # the last one by step_sync=True
        assert run.rows[-1]["after"] == 1
        assert lightning.seen("wandb-0.json") == {"id": "wandb", "same": True}
        assert lightning.seen("wandb-1.json") == {"id": None, "same": False}
        assert axes_of(run) == {"*": "trainer/global_step"}  # the function says so: Lightning, in a run of its own

        run = lightning.run("examples")
        assert (run.name, run.exit_codes, run.config["data"]) == ("lightning", [0], "noise")
        assert any("train/loss" in row or "loss" in row for row in run.rows)
        assert not run.raw_config["_wandb"]["value"].get("m")


def axes_of(run: RecordedRun) -> dict[str, str]:
    """The x axes that are defined for a run's metrics."""
    defined = run.raw_config["_wandb"]["value"]["m"]
    names = [one.get("1") or one.get("2") for one in defined]
    return {name: names[one["5"] - 1] for name, one in zip(names, defined, strict=True) if "5" in one}


@pytest.mark.full
@pytest.mark.parametrize(
    ("framework", "project", "package"),
    [
        ("trainer", "huggingface", "transformers"),
        pytest.param("lightning", "lightning", "lightning", marks=pytest.mark.wide),
    ],
)
def test_under_the_command_run_a_frameworks_own_arguments_count(tmp_path, framework, project, package):
    command = [*TORCHRUN, "-m", "flyteplugins_tracking", "run"]
    with job(tmp_path, package, command, "framework_scripts.py", framework) as ended:
        assert ended.done.returncode == 0, ended.done.output
        run = ended.run(project)
        assert (run.name, run.exit_codes, len(ended.projects)) == ("theirs", [0], 1)
        if framework == "lightning":
            assert axes_of(run) == {"*": "trainer/global_step"}
            assert list(tmp_path.glob("elsewhere/wandb/run-*"))


@pytest.mark.full
def test_lightnings_own_launcher_has_one_run_with_its_true_end(tmp_path):
    """When the function starts, the parent has no launcher's variables, and the child no RANK."""
    with job(tmp_path, "lightning", [sys.executable], "lightning_runs.py", "own") as ended:
        run = ended.run("own")
        assert ended.done.returncode == 1
        assert ([row["trainer/global_step"] for row in run.rows], run.exit_codes) == ([0, 1], [1])
        assert ended.projects == ["own"]
        assert "the function has connected" not in ended.done.output
        parent, child = (ended.seen(f"own-{rank}.json") for rank in (0, 1))
        assert parent == {"id": "own", "environment": {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None}}
        assert child == {"id": None, "environment": {"RANK": None, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}}


@pytest.mark.wide
def test_the_run_under_lightnings_own_launcher_names_the_rank_that_fails_first(tmp_path):
    with job(tmp_path, "lightning", [sys.executable], "lightning_runs.py", "other") as ended:
        run = ended.run("own")
        failure = {key: run.summary.get(f"failure/{key}") for key in ("rank", "type", "message")}
        assert failure == {"rank": 1, "type": "ValueError", "message": "made to fail"}, ended.done.output
