"""`goodput/*` of real jobs that are restarted: on this machine, and on others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import jobs
from support.mlflow_server import stored_runs
from support.wandb_server import WandbServer

PROGRAM = str(jobs.PROGRAMS / "goodput_attempts.py")
# The first two attempts make 5 and 3 steps more than their checkpoints have.
ENDS = [(55, "SIGKILL"), (83, "raise"), (100, "return")]


def attempt_on_new_machine(number: int, base: Path, ends: list, env: Mapping[str, str]) -> jobs.Done:
    """Make one attempt. Of the one before it has the checkpoint, and what its service has."""
    directory = base / f"machine-{number}"
    directory.mkdir()
    before = base / f"machine-{number - 1}" / "checkpoint"
    if before.exists():
        (directory / "checkpoint").write_text(before.read_text())
    env = {**env, "ATTEMPT": str(number), "TMPDIR": str(directory)}
    return jobs.python(directory, PROGRAM, json.dumps(ends), env=env)


def assert_tells(values: Mapping[str, float], attempts: int) -> None:
    assert values["goodput/attempts"] == attempts
    assert 0 < values["goodput/share"] < 1
    assert all(values[f"goodput/attempt_{number}/restart_s"] > 0 for number in range(1, attempts))
    assert all(values[f"goodput/attempt_{number}/kept_s"] > 0 for number in range(attempts))
    # 5 of 55 steps, and 3 of 33. An attempt that is killed may have been noted some steps before that.
    share = values["goodput/attempt_1/repeated_s"] / (
        values["goodput/attempt_1/repeated_s"] + values["goodput/attempt_1/kept_s"]
    )
    assert share == pytest.approx(3 / 33, abs=0.05)
    assert values[f"goodput/attempt_{attempts - 1}/repeated_s"] == 0


@pytest.mark.parametrize("column", ["", pytest.param("train_step", marks=pytest.mark.full)])
def test_a_job_that_is_restarted_need_not_do_anything(tmp_path, column):
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1")
    with WandbServer() as server:
        command = [*jobs.torchrun(*options), PROGRAM, json.dumps(ENDS)]
        done = jobs.run(command, tmp_path, {**server.environment, "COLUMN": column}, timeout_s=120)
        (run,) = server.runs
    assert done.returncode == 0, done.output
    assert_tells(run.summary, attempts=3)


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGTERM", "raise"])
def test_an_attempt_on_another_machine_knows_those_before(tmp_path, how):
    ends = [(55, how), (83, how), (100, "return")]
    with WandbServer() as server:
        done = [attempt_on_new_machine(number, tmp_path, ends, server.environment) for number in range(3)]
        (run,) = server.runs
    assert [job.returncode != 0 for job in done] == [True, True, False], "".join(job.output for job in done)
    assert_tells(run.summary, attempts=3)
    assert run.exit_codes == [143 if how == "SIGTERM" else 1] * 2 + [0]
    assert run.rows_after_completion == 0  # what is recorded with a run that has ended would open it again


@pytest.mark.full
def test_an_attempt_on_another_machine_knows_those_before_from_mlflow(tmp_path):
    env = {"TRACKER": "mlflow", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "PATH": os.environ["PATH"]}
    ends = [(55, "SIGTERM"), (83, "raise"), (100, "return")]
    done = [attempt_on_new_machine(number, tmp_path, ends, env) for number in range(3)]
    assert [job.returncode != 0 for job in done] == [True, True, False], "".join(job.output for job in done)
    (run,) = (run for run in stored_runs(tmp_path / "mlflow.db", "tests") if run.id is not None)
    assert_tells(
        {key: float(value) for key, value in run.tags.items() if key.startswith("goodput/") and value[0].isdigit()}, 3
    )
