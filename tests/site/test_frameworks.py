"""Trainer, Accelerate and Lightning inside the decorator: their run is ours, on exactly our ranks, with its true end.

Each framework runs in one job, whose ranks call several decorated functions: importing it costs seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.backends import EXAMPLES
from support.mlflow_server import StoredRun, stored_runs
from support.wandb_server import RecordedRun, WandbServer

TORCHRUN = jobs.torchrun("--standalone", "--nproc-per-node=2")


class Job:
    """A job that has ended, and what came of it."""

    def __init__(self, server: WandbServer, directory: Path, command: list[str]) -> None:
        self.directory, self.server = directory, server
        self._store = directory / "mlflow.db"
        env = {
            **server.environment,
            "PYTHONPATH": jobs.search_path(EXAMPLES),
            "MLFLOW_TRACKING_URI": f"sqlite:///{self._store}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        self.done = jobs.run(command, directory, env)

    def run(self, project: str) -> RecordedRun:
        """The only one of the project."""
        (run,) = (run for run in self.server.runs if run.project == project)
        assert (run.rows_overwritten, run.rows_after_completion) == (0, 0)
        return run

    def mlflow_run(self) -> StoredRun:
        (run,) = stored_runs(self._store, "mlflow")
        return run

    def seen(self, name: str) -> Any:
        text = (self.directory / f"seen-{name}").read_text()
        return json.loads(text) if name.endswith(".json") else text


def job(directory: Path, package: str, command: list[str]) -> Iterator[Job]:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with WandbServer() as server:
        ended = Job(server, directory, command)
        yield ended
        assert server.errors == []


def script(name: str, *arguments: str) -> list[str]:
    return [str(jobs.PROGRAMS / name), *arguments]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    directory = tmp_path_factory.mktemp("trainer")
    for ended in job(directory, "transformers", [*TORCHRUN, *script("hf_runs.py")]):
        assert ended.done.returncode == 0, ended.done.output
        yield ended


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    directory = tmp_path_factory.mktemp("accelerate")
    yield from job(directory, "accelerate", [*TORCHRUN, *script("accelerate_runs.py", "ended")])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    ports = [str(jobs.free_port()), str(jobs.free_port())]
    command = [sys.executable, *script("accelerate_runs.py", "notebook", *ports)]
    for ended in job(tmp_path_factory.mktemp("notebook"), "accelerate", command):
        assert ended.done.returncode == 0, ended.done.output
        yield ended


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    command = [*TORCHRUN, *script("lightning_runs.py", "wandb", "example")]
    for ended in job(tmp_path_factory.mktemp("lightning"), "lightning", command):
        assert ended.done.returncode == 0, ended.done.output
        yield ended


@pytest.fixture(scope="module")
def own_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    command = [sys.executable, *script("lightning_runs.py", "own")]
    yield from job(tmp_path_factory.mktemp("own"), "lightning", command)


@pytest.mark.sampled_full(2)
@pytest.mark.parametrize(
    ("framework", "projects"),
    [
        pytest.param("trainer", ["examples", "failing", "shared", "search"], marks=pytest.mark.full),
        ("accelerate", ["ended"]),
        pytest.param("lightning", ["wandb", "examples"], marks=pytest.mark.full),
    ],
)
def test_no_framework_makes_a_second_run(request, framework, projects):
    assert [run.project for run in request.getfixturevalue(framework).server.runs] == projects


@pytest.mark.full
def test_trainers_run_is_ours_with_our_name_both_configs_and_all_its_rows(trainer):
    run = trainer.run("failing")
    assert (run.id, run.name) == ("failing", "ours")
    assert [row["train/global_step"] for row in run.rows] == [1, 2, 3, 4, 4]
    assert all("train/loss" in row for row in run.rows[:4])
    assert (run.config["mine"], run.config["max_steps"]) == (1, 4)
    assert run.config["learning_rate"] == 5e-5  # of equal keys, Trainer's is the later one
    assert trainer.seen("0.json")["failing"] == {"id": "failing", "wandb": True, "raised": "made to fail"}
    assert trainer.seen("1.json")["failing"]["id"] is None


@pytest.mark.full
def test_a_failure_after_trainer_is_done_is_the_runs(trainer):
    assert (trainer.run("failing").exit_codes, trainer.run("failing").state) == ([1], "failed")


@pytest.mark.wide
def test_rule_2_a_hyperparameter_search_leaves_one_run(trainer):
    """Trainer calls `wandb.finish()` before each trial, on every rank."""
    run = trainer.run("search")
    assert trainer.seen("0.json")["search"] == {"id": "search", "trials": 2}
    assert [row["train/global_step"] for row in run.rows] == [1, 2, 3, 4, 4] * 2
    assert [row["train/learning_rate"] for row in run.rows[:6:5]] == [0.1, 0.2]
    assert run.exit_codes == [0]


@pytest.mark.wide
def test_in_a_shared_run_trainer_logs_once_and_the_ranks_beside_it(trainer):
    run = trainer.run("shared")
    assert [row["train/global_step"] for row in run.rows if "rank" not in row] == [1, 2, 3, 4, 4]
    assert sorted(row["rank"] for row in run.rows if "rank" in row) == [0, 1]
    assert [trainer.seen(f"{rank}.json")["shared"]["id"] for rank in (0, 1)] == ["shared", "shared"]
    assert run.exit_codes == [0]


@pytest.mark.wide
def test_trainers_mlflow_run_is_ours_which_both_ranks_open_in_a_store_that_is_made_now(trainer):
    run = trainer.mlflow_run()
    assert (run.id, run.name, run.status) == ("mlflow", "ours", "FINISHED")
    assert len(run.values("loss")) == 4
    assert run.params["max_steps"] == "4"
    assert [trainer.seen(f"{rank}.json")["mlflow"]["id"] for rank in (0, 1)] == ["mlflow", "mlflow"]


def test_rule_2_a_crash_after_end_training_is_recorded(accelerate):
    """`end_training()` calls `finish()` on the run."""
    run = accelerate.run("ended")
    assert accelerate.done.output.count("raised: made to fail") == 2
    assert (run.name, run.exit_codes, run.state) == ("ours", [1], "failed")
    assert run.rows[-1]["after"] == 1
    assert (run.config["mine"], run.config["lr"]) == (1, 0.1)


def test_rule_3_accelerates_explicit_steps_keep_all_rows(accelerate):
    rows = accelerate.run("ended").rows
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert all("loss" in row for row in rows)


def test_rule_5_a_run_ends_without_the_process_group(accelerate):
    """`end_training()` has destroyed it."""
    assert accelerate.done.returncode == 0, accelerate.done.output
    assert [accelerate.seen(f"ended-{rank}") for rank in (0, 1)] == ["ended", "None"]


@pytest.mark.wide
def test_notebook_launcher_starts_a_decorated_function_with_one_run(notebook):
    run = notebook.run("launched")
    assert ([row["_step"] for row in run.rows], run.exit_codes) == ([0, 1, 2], [0])
    assert [notebook.seen(f"launched-{rank}") for rank in (0, 1)] == ["launched", "None"]


@pytest.mark.wide
def test_the_forked_workers_of_a_decorated_function_do_not_end_its_run(notebook):
    run = notebook.run("launching")
    assert [{"before", "after"} & row.keys() for row in run.rows] == [{"before"}, {"after"}]
    assert run.exit_codes == [0]
    assert [notebook.seen(f"forked-{rank}") for rank in (0, 1)] == ["None", "None"]
    assert [run.project for run in notebook.server.runs] == ["launched", "launching"]


@pytest.mark.wide
def test_lightnings_run_is_ours_with_our_name_and_all_its_rows(lightning):
    run = lightning.run("wandb")
    assert (run.id, run.name, run.exit_codes, run.config["mine"]) == ("wandb", "ours", [0], 1)
    assert [row.get("trainer/global_step") for row in run.rows] == [0, 1, 1]  # the last one by step_sync=True
    assert run.rows[-1]["after"] == 1
    assert lightning.seen("wandb-0.json") == {"id": "wandb", "same": True}
    assert lightning.seen("wandb-1.json") == {"id": None, "same": False}


@pytest.mark.wide
def test_the_steps_of_lightning_are_the_x_axis_of_its_rows_if_the_function_says_so(lightning):
    """Lightning says so itself in a run that it opens."""
    assert axes_of(lightning.run("wandb")) == {"*": "trainer/global_step"}
    assert not lightning.run("examples").raw_config["_wandb"]["value"].get("m")


def axes_of(run: RecordedRun) -> dict[str, str]:
    """The x axes that are defined for a run's metrics."""
    defined = run.raw_config["_wandb"]["value"]["m"]
    names = [one.get("1") or one.get("2") for one in defined]
    return {name: names[one["5"] - 1] for name, one in zip(names, defined, strict=True) if "5" in one}


@pytest.mark.full
@pytest.mark.parametrize(
    ("framework", "project", "package"),
    [("trainer", "huggingface", "transformers"), ("lightning", "lightning", "lightning")],
)
def test_under_the_command_run_a_frameworks_own_arguments_count(tmp_path, framework, project, package):
    command = [*TORCHRUN, "-m", "flyteplugins_tracking", "run", *script("framework_scripts.py", framework)]
    for ended in job(tmp_path, package, command):
        assert ended.done.returncode == 0, ended.done.output
        run = ended.run(project)
        assert (run.name, run.exit_codes, len(ended.server.runs)) == ("theirs", [0], 1)
        if framework == "lightning":
            assert axes_of(run) == {"*": "trainer/global_step"}
            assert list(tmp_path.glob("elsewhere/wandb/run-*"))


@pytest.mark.full
def test_rule_1_lightnings_own_launcher_has_one_run_with_its_true_end(own_launcher):
    """When the function starts, the parent has no launcher's variables, and the child no RANK."""
    run = own_launcher.run("own")
    assert own_launcher.done.returncode == 1
    assert ([row["trainer/global_step"] for row in run.rows], run.exit_codes) == ([0, 1], [1])
    assert [run.project for run in own_launcher.server.runs] == ["own"]
    assert "the function has connected" not in own_launcher.done.output
    parent, child = (own_launcher.seen(f"own-{rank}.json") for rank in (0, 1))
    assert parent == {"id": "own", "environment": {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None}}
    assert child == {"id": None, "environment": {"RANK": None, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}}


@pytest.mark.full
def test_the_run_under_lightnings_own_launcher_names_the_rank_that_fails_first(tmp_path):
    for ended in job(tmp_path, "lightning", [sys.executable, *script("lightning_runs.py", "other")]):
        run = ended.run("own")
        failure = {key: run.summary.get(f"failure/{key}") for key in ("rank", "type", "message")}
        assert failure == {"rank": 1, "type": "ValueError", "message": "made to fail"}, ended.done.output


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize(("framework", "data"), [("trainer", "y = 2x"), ("lightning", "noise")])
def test_the_examples_have_one_run_with_the_frameworks_rows(framework, data, request):
    run = request.getfixturevalue(framework).run("examples")
    assert (run.name, run.exit_codes, run.config["data"]) == (framework, [0], data)
    assert any("train/loss" in row or "loss" in row for row in run.rows)
