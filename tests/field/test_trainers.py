"""Scripts that name their run and log tables themselves, and jobs that submitit requeues."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import wait_until
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

FIELD = Path(__file__).parent
TABLES = str(FIELD / "bare" / "completions_table.py")
UNDER_RUN = ("-m", "flyteplugins_tracking", "run")
DECORATED = """
import sys, types
from flyteplugins_tracking import tracking_init
import completions_table

@tracking_init({options})
def main():
    args = types.SimpleNamespace(run_name="grpo-tiny", output_dir=".", max_steps=8)
    completions_table.Trainer(args).train()

main()
"""


def tables(run: RecordedRun) -> list[list[Any]]:
    """The tables of the run's rows, in their order, as the files that the service has."""
    logged = [row["completions"] for row in run.rows if "completions" in row]
    assert {table["_type"] for table in logged} <= {"table-file"}
    return [json.loads(run.files[table["path"]])["data"] for table in logged]


def env_of(server: WandbServer, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(FIELD / "bare"), str(FIELD / "moved"), jobs.search_path(FIELD)])
    return {**server.environment, "PYTHONPATH": path, **more}


@pytest.mark.parametrize("form", ["run", pytest.param("decorator", marks=pytest.mark.full)])
@pytest.mark.parametrize("at", [4, pytest.param(5, marks=pytest.mark.wide)])
def test_the_tables_of_a_killed_training_arrive_with_its_rows(tmp_path, form, at):
    (tmp_path / "main.py").write_text(DECORATED.format(options="project='p', run_file='run'"))
    command = [*UNDER_RUN, "--run-file", "run", TABLES] if form == "run" else ["main.py"]
    with WandbServer() as server:
        env = env_of(server, FIELD_FAULT="kill", FIELD_AT=str(at))
        killed, done = (jobs.python(tmp_path, *command, env=env) for _ in range(2))
        (run,) = server.runs
    assert (killed.returncode, done.returncode, run.state) == (-signal.SIGKILL, 0, "finished"), done.output
    steps = [row["train/global_step"] for row in run.rows if "train/loss" in row]
    assert steps == [*range(1, at + 1), *range(at // 2 * 2 + 1, 9)], done.output
    assert tables(run) == [[[n, f"to {n}", 0.1 * n], [n, f"be {n}", 1.0]] for n in (2, 4, 6, 8)]
    assert (run.rows_overwritten, run.rows_after_completion) == (0, 0)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ([*UNDER_RUN, TABLES], "grpo-tiny"),
        pytest.param([*UNDER_RUN, "--name", "mine", TABLES], "mine", marks=pytest.mark.full),
        pytest.param(["project='p'"], "grpo-tiny", marks=pytest.mark.full),
        pytest.param(["project='p', name='mine'"], "mine", marks=pytest.mark.full),
    ],
)
def test_the_name_that_a_trainer_gives_counts_if_nobody_else_has_given_one(tmp_path, command, name):
    (tmp_path / "main.py").write_text(DECORATED.format(options=command[0]))
    with WandbServer() as server:
        words = command if len(command) > 1 else ["main.py"]
        done = jobs.python(tmp_path, *words, env=env_of(server))
        (run,) = server.runs
    assert (done.returncode, run.name, run.config["max_steps"]) == (0, name, 8), done.output
    assert [row["train/global_step"] for row in run.rows if "train/loss" in row] == list(range(1, 9))


def start_tasks(directory: Path, number: str, attempt: int, env: dict[str, str]) -> list[jobs.Process]:
    """As Slurm starts the two tasks of a submitted job, for the first time or after a requeue."""
    of_job = {"SLURM_JOB_ID": number, "SLURM_JOB_NAME": "submitit", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    of_step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    counts = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
    given = {**env, **of_job, **of_step, **counts, "SUBMITIT_EXECUTOR": "slurm", "SLURM_STEP_TASKS_PER_NODE": "2"}
    command = [sys.executable, "-u", str(FIELD / "submitted.py"), str(directory)]
    of_ranks = [{**given, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    return [jobs.start(command, directory, variables) for variables in of_ranks]


@pytest.mark.full
def test_a_job_that_submitit_requeues_goes_on_in_its_run(tmp_path):
    submit = "import pickle, submitted_job; pickle.dump(submitted_job.Training(300), open('submitted.pkl', 'wb'))"
    number, step = str(secrets.randbelow(10**9)), tmp_path / "step-0"
    with WandbServer() as server:
        env = env_of(server, FIELD_FAULT="slow")
        assert jobs.python(tmp_path, "-c", submit, env=env).returncode == 0
        tasks = start_tasks(tmp_path, number, 0, env)
        wait_until(lambda: step.exists() and int(step.read_text() or 0) > 20, tasks[0])
        for task in tasks:
            task.send_signal(signal.SIGUSR2)
        first = jobs.finish(tasks[0], tmp_path)
        tasks[1].kill()  # Slurm ends what is left of the job
        jobs.finish(tasks[1], tmp_path)
        (run,) = server.runs
        assert ((tmp_path / "requeue").exists(), first.returncode, run.exit_codes) == (True, 255, [255]), first.output
        begun = int(step.read_text())
        second = [jobs.finish(task, tmp_path) for task in start_tasks(tmp_path, number, 1, env)]
        (run,) = server.runs
    assert ([done.returncode for done in second], run.exit_codes, run.state) == ([0, 0], [255, 0], "finished")
    values = [row["at"] for row in run.rows if "at" in row]
    assert values in ([*range(300)], [*range(begun + 1), *range(begun, 300)])  # a row may come before its checkpoint
    assert run.rows_overwritten == 0
    assert pickle.loads((tmp_path / "0_result.pkl").read_bytes()) == ("success", 300)
