"""Jobs whose arguments differ after a restart, and have the names of values that the library adds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import jobs
from support.backends import BACKENDS

PROGRAM = jobs.PROGRAMS / "changed_config.py"
NAMES = ("distributed", "flyte", "restart_count", "status", "exit_code", "tags", "notes", "roles")
CHANGE = "this attempt changes the config that an earlier one has set: "


class Job:
    def __init__(self, name: str, directory: Any, mode: str) -> None:
        self.name, self.mode = name, mode
        with BACKENDS[name](directory) as backend:
            script = [PROGRAM, name, "p", mode]
            if mode == "twice":
                self.done = jobs.python(directory, *script, env=backend.environment())
            else:
                agent = jobs.torchrun(
                    "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"
                )
                self.done = jobs.run([*agent, *map(str, script)], directory, backend.environment())
            assert self.done.returncode == 0, self.done.output
            (self.run,) = backend.runs("p")
            self.stored = backend._server.runs("p")[0] if name == "mlflow" else None
        self.told = [json.loads((directory / f"told-{attempt}").read_text()) for attempt in (0, 1)]

    @property
    def changes(self) -> list[str]:
        return [line.partition(CHANGE)[2] for line in self.done.output.splitlines() if CHANGE in line]


# Each tracker has one of the modes, and W&B the default tier. What MLflow does with a param: `test_mlflow_jobs.py`.
ALL = [
    "wandb auto",
    pytest.param("wandb shared", marks=pytest.mark.wide),
    pytest.param("mlflow twice", marks=pytest.mark.wide),
    pytest.param("trackio auto", marks=pytest.mark.wide),
    pytest.param("pluto auto", marks=pytest.mark.wide),
]


@pytest.fixture(scope="module", params=ALL)
def job(request, tmp_path_factory):
    name, mode = request.param.split()
    return Job(name, tmp_path_factory.mktemp(f"{name}-{mode}"), mode)


def test_the_job_ends_well_and_shows_the_last_attempt(job):
    assert job.run.status == "finished"
    if job.name == "mlflow":  # it keeps the first value of a param
        tags = job.stored.tags
        assert (job.stored.params["lr"], tags["tracking_init.params.lr"]) == ("0.1", "0.2")
        assert (job.stored.params["seed"], tags["tracking_init.params.seed"]) == ("0", "1")
        assert tags["tracking_init.params.optimizer.beta"] == "0.91"
        assert (tags["tracking_init.params.late"], tags["tracking_init.params.item"]) == ("1", "1")
        assert "tracking_init.params.epochs" not in tags
        return
    config = job.run.config
    assert (config["lr"], config["output_dir"], config["late"], config["item"]) == (0.2, "out-1", 1, 1)
    assert (config["seed"], config["optimizer"]["beta"], config["epochs"]) == (1, 0.91, 3)


def test_the_arguments_of_the_script_keep_their_names(job):
    found = job.stored.params if job.name == "mlflow" else job.run.config
    assert {name: found[name] for name in NAMES} == {name: f"own {name}" for name in NAMES}
    if job.mode != "twice":
        assert job.run.config["tracking_init"].items() >= {"world_size": 2, "restart_count": 1}.items()


def test_what_is_changed_is_told_with_both_values_and_no_secret(job):
    text = "; ".join(job.changes)
    assert "key-of-attempt" not in job.done.output
    assert "optimizer.beta: 0.9 -> 0.91" in text or "optimizer.beta: '0.9' -> '0.91'" in text
    assert "seed: 0 -> 1" in text or "seed: '0' -> '1'" in text
    assert "restart_count: " not in text
    assert "epochs" not in text
    if job.name in ("wandb", "mlflow"):
        assert "lr: 0.1 -> 0.2" in text or "lr: '0.1' -> '0.2'" in text
        assert "api_key: *** -> ***" in text
        assert len(job.changes) == 4


def test_inside_one_attempt_the_clients_own_rule_holds(job):
    expected = {"wandb": "ConfigError", "mlflow": "MlflowException"}.get(job.name, "")
    assert [told["refused"] for told in job.told] == [expected, expected]
    if job.name == "wandb":
        assert job.told[1]["config"]["lr"] == 0.2
