"""Scripts in the style of public projects: as a stranger writes them (`bare`), and moved as the docs say (`moved`).

`diff -ru bare moved` is what the move costs. Each moved script goes through a whole training, an exception on rank 1, a
SIGTERM to the launcher or to all processes of the job, and a SIGKILL of rank 1 with a restart. What the service has of
it afterwards is compared with the tables below; that of a whole training also with what the bare script sends.
"""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import jobs
from support.backends import EXAMPLES
from support.mlflow_server import StoredRun, stored_runs
from support.waiting import wait_until
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

FIELD = Path(__file__).parent
PASSES, AT = 8, 4  # those of a whole training; and the one that fails, counted from 0
# What the library adds to a config, and what each job has otherwise.
OURS = {"tracking_init"}
OF_A_JOB = {"output_dir"}


@dataclass(frozen=True)
class Fault:
    """What happens to a job, and how it and its run must end.

    Attributes:
        model: What the model does: see `tiny.py`. A slow one is sent a SIGTERM.
        restarts: How often the launcher may restart the job.
        failure: The rank and the kind of the failure that the summary tells.
    """

    model: str = ""
    restarts: int = 0
    exit_codes: tuple[int, ...] = (0,)
    state: str = "finished"
    returncode: int = 0
    failure: tuple[int | None, str | None] = (None, None)


FAULTS = {
    "none": Fault(),
    "exception": Fault("raise", 0, (1,), "failed", 1, (1, "ArithmeticError")),
    "sigterm": Fault("slow", 0, (143,), "preempted", 1),
    "sigterm to all": Fault("slow", 0, (143,), "preempted", 1),
    "sigkill": Fault("kill", 1, (137, 0)),
}


@dataclass(frozen=True)
class Script:
    """A script, and what its run must have.

    Attributes:
        loss: A column of each row that a forward pass brings.
        column: The column that counts these rows.
        again: Its values in what is trained after a restart, where that is not the whole training.
        arguments: Those of a whole training.
        long: And more, for one that does not end by itself.
        config: Some of the config.
        files: Files of the user's.
        brief: The fault that the default tier has.
        to_all: Whether it also meets a SIGTERM to all its processes: its DataLoader has workers.
    """

    loss: str
    column: str
    again: range | None = None
    arguments: tuple[str, ...] = ()
    long: tuple[str, ...] = ("--steps=100000",)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    brief: str = "none"
    to_all: bool = False

    def values(self, run: RecordedRun) -> list[int]:
        """What its column has in the rows of the forward passes."""
        rows = sorted((row for row in run.rows if self.loss in row), key=lambda row: row["_step"])
        return [functools.reduce(dict.__getitem__, self.column.split("."), row) for row in rows]

    def expected(self, fault: str, begun: int) -> list[list[int]]:
        """What it may have; `begun` forward passes were begun, and the last one may have no row."""
        whole = list(range(PASSES))
        if fault == "none":
            return [whole]
        if fault == "exception":
            return [whole[:AT]]
        if fault == "sigkill":
            return [whole[:AT] + list(self.again or range(PASSES))]
        return [list(range(rows)) for rows in (begun - 1, begun)]


SCRIPTS = {
    "module_level": Script(
        "train/loss",
        "iter",
        long=("--max_iters=100000",),
        config={"batch_size": 4, "backend": "gloo", "decay_lr": True},
        brief="sigterm",
    ),
    "many_arguments": Script(
        "train/loss",
        "step",
        again=range(AT, PASSES),  # it has a checkpoint
        arguments=("--log-wandb", "--resume=latest"),
        long=("--epochs=1000", "--steps-per-epoch=100"),
        config={"distributed": True, "local_rank": 0, "wandb_notes": "", "std": [0.2, 0.2, 0.2], "device": "cpu"},
        files=("params.txt",),
        brief="sigkill",
        to_all=True,
    ),
    "hydra_config": Script(
        "train/loss",
        "trainer.step",
        long=("steps=100000",),
        config={"checkpoint": "???", "tags": ["dev", "gpt"], "run_name": "train-gpt-lr0.01"},
        brief="exception",
    ),
    "trainer_class/main": Script(
        "train/loss", "iteration", long=("100000",), config={"data": {"samples": 64}}, brief="sigterm"
    ),
}
MLFLOW = Script("loss", "")
# Scripts that log from a rank of their own, the number of ranks, and which rank that is.
OTHER_RANK = {
    "metrics_rank": (Script("loss", "at", long=("100000",), config={"pp": 2}), 4, 2),
    "last_rank_writer": (
        Script("lm loss", "iteration", long=("--train-iters=100000",), config={"wandb_exp_name": "gpt3-126m"}),
        2,
        1,
    ),
}


def train(
    directory: Path, command: list[str], script: Script, fault: str, env: Mapping[str, str], ranks: int = 2
) -> jobs.Done:
    """Have a script on some ranks meet a fault."""
    what = FAULTS[fault]
    restarts = f"--max-restarts={what.restarts}"
    launcher = jobs.torchrun("--standalone", f"--nproc-per-node={ranks}", "--monitor-interval=0.1", restarts)
    variables = {
        **env,
        "FIELD_FAULT": what.model,
        "FIELD_AT": str(AT),
        "PYTHONPATH": jobs.search_path(FIELD),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # gloo, after a restart
    }
    is_slow = what.model == "slow"
    job = jobs.start([*launcher, *command, *script.arguments, *(script.long if is_slow else ())], directory, variables)
    if is_slow:
        wait_until(lambda: passes(directory) > AT, job)
        send_sigterm(job, to_all="all" in fault)
    return jobs.finish(job, directory)


def train_with_wandb(directory: Path, command: list[str], name: str, fault: str) -> tuple[jobs.Done, RecordedRun]:
    """Also returns its run, the only one."""
    with WandbServer() as server:
        done = train(directory, command, SCRIPTS[name], fault, server.environment)
        assert (len(server.runs), server.errors) == (1, []), done.output
        return done, server.runs[0]


def send_sigterm(job: jobs.Process, to_all: bool) -> None:
    """As a supervisor does it: to the launcher, or as Slurm to all that it has started."""
    launcher = psutil.Process(job.pid)
    for process in [*(launcher.children(recursive=True) if to_all else []), launcher]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)


def passes(directory: Path) -> int:
    """How many forward passes rank 0 of the first attempt has begun."""
    path = directory / "passes-0-0"
    return path.stat().st_size if path.exists() else 0


def bare(name: str) -> list[str]:
    return [str(FIELD / "bare" / f"{name}.py")]


def moved(name: str) -> list[str]:
    """The script, moved; one without a function stays as it is, and another one starts it."""
    path = FIELD / "moved" / f"{name}.py"
    return [str(path)] if path.exists() else [str(EXAMPLES / "tracked.py"), *bare(name)]


def under_run(name: str) -> list[str]:
    """The script as it is, under the command `run`."""
    return ["-m", "flyteplugins_tracking", "run", *bare(name)]


def faults_of(script: Script) -> list[str]:
    return [fault for fault in FAULTS if fault != "sigterm to all" or script.to_all]


# Beside an exception, which one meets in `make test`.
UNDER_RUN = {("module_level", "sigkill")}


DEFAULT_TIER = ("trainer_class/main",)


def tier_of(form: Callable[[str], list[str]], name: str, fault: str) -> tuple[pytest.MarkDecorator, ...]:
    """Each script meets a fault in `make test-all`, and some do under `run`; `DEFAULT_TIER` is in `make test`.

    `make test-wide` has all pairs.
    """
    if fault == (SCRIPTS[name].brief if form is moved else "exception" if name == "module_level" else ""):
        return () if name in DEFAULT_TIER or form is under_run else (pytest.mark.full,)
    return (pytest.mark.full if form is under_run and (name, fault) in UNDER_RUN else pytest.mark.wide,)


@pytest.mark.parametrize(
    ("form", "name", "fault"),
    [
        pytest.param(form, name, fault, marks=tier_of(form, name, fault))
        for name, script in SCRIPTS.items()
        for fault in faults_of(script)
        for form in (moved, under_run)
    ],
)
def test_a_script_has_one_run_with_all_rows_and_its_true_end(tmp_path, form, name, fault):
    script, what = SCRIPTS[name], FAULTS[fault]
    done, run = train_with_wandb(tmp_path, form(name), name, fault)
    end = (done.returncode, run.exit_codes, run.state)
    assert end == (what.returncode, list(what.exit_codes), what.state), done.output
    assert script.values(run) in script.expected(fault, passes(tmp_path)), done.output
    assert (run.rows_overwritten, run.rows_after_completion) == (0, 0)
    assert {key: run.config.get(key) for key in script.config} == script.config
    assert set(script.files) <= set(run.files)
    assert (run.summary.get("failure/rank"), run.summary.get("failure/type")) == what.failure


@pytest.mark.parametrize(
    ("form", "name", "fault"),
    [
        pytest.param(under_run, "metrics_rank", "none", marks=pytest.mark.full),
        pytest.param(moved, "metrics_rank", "none", marks=pytest.mark.wide),
        pytest.param(under_run, "last_rank_writer", "sigkill", marks=pytest.mark.full),
        pytest.param(under_run, "last_rank_writer", "sigterm", marks=pytest.mark.full),
        pytest.param(moved, "last_rank_writer", "exception", marks=pytest.mark.full),
    ],
)
def test_a_script_that_logs_from_another_rank_has_its_run_there(tmp_path, form, name, fault):
    """Under `run` nothing says so; under the decorator, `primary_rank=`."""
    (script, ranks, rank), what = OTHER_RANK[name], FAULTS[fault]
    with WandbServer() as server:
        options = {"FLYTE_TRACKING_CONFIG": f'{{"primary_rank": {rank}}}'} if form is moved else {}
        done = train(tmp_path, form(name), script, fault, {**server.environment, **options}, ranks)
        assert (len(server.runs), server.errors) == (1, []), done.output
        (run,) = server.runs
    codes = [0] if fault == "sigkill" else list(what.exit_codes)  # the killed rank is the one that has the run
    assert (done.returncode, run.exit_codes, run.state) == (what.returncode, codes, what.state), done.output
    assert script.values(run) in script.expected(fault, passes(tmp_path)), done.output
    assert {key: run.config.get(key) for key in script.config} == script.config
    assert "logs to a run that does nothing" not in done.output


PARITY = ("trainer_class/main",)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [one if one in PARITY else pytest.param(one, marks=pytest.mark.wide) for one in SCRIPTS]
)
def test_a_moved_script_sends_what_the_bare_one_sends(tmp_path, name):
    (_, was), (done, now) = (
        train_with_wandb(tmp_path / form.__name__, form(name), name, "none") for form in (bare, moved)
    )
    assert done.returncode == 0, done.output
    assert [row.keys() for row in now.rows] == [row.keys() for row in was.rows]
    assert SCRIPTS[name].values(now) == SCRIPTS[name].values(was) == list(range(PASSES))
    assert _without(now.config, OURS | OF_A_JOB) == _without(was.config, OF_A_JOB)
    assert now.summary.keys() == was.summary.keys()
    assert (set(now.tags), now.notes, now.exit_codes) == (set(was.tags), was.notes, [0])
    assert _names(was.files) <= _names(now.files)


def _names(files: Iterable[str]) -> set[str]:
    """The names of files without what a job's time and process put into them."""
    return {re.sub(r"\d+", "0", name) for name in files}


def _without(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        pytest.param("none", "FINISHED", marks=pytest.mark.wide),
        pytest.param("exception", "FAILED", marks=pytest.mark.wide),
        ("sigterm", "KILLED"),
        pytest.param("sigkill", "FINISHED", marks=pytest.mark.wide),
    ],
)
def test_a_moved_script_of_mlflow(tmp_path, fault, status):
    done = train(tmp_path, moved("mlflow_example"), MLFLOW, fault, {"MLFLOW_TRACKING_URI": store_of(tmp_path)})
    run = mlflow_run(tmp_path)
    assert (done.returncode, run.status) == (FAULTS[fault].returncode, status), done.output
    steps = [step for key, _, step, _ in sorted(run.rows, key=lambda row: row[3]) if key == "loss"]
    assert steps in MLFLOW.expected(fault, passes(tmp_path)), done.output
    assert (run.params["lr"], run.params["distributed"], run.name) == ("0.01", "False", "digits")
    assert run.tags.get("done") == ("yes" if status == "FINISHED" else None)


def store_of(directory: Path) -> str:
    return f"sqlite:///{directory / 'mlflow.db'}"


def mlflow_run(directory: Path) -> StoredRun:
    (run,) = stored_runs(directory / "mlflow.db", "mlflow-example")
    return run


@pytest.mark.parametrize(
    ("form", "arguments", "code"),
    [
        (moved, ["--target=0"], 3),
        pytest.param(moved, [], 0, marks=pytest.mark.full),
        pytest.param(bare, [], 0, marks=pytest.mark.full),
    ],
)
def test_a_command_of_typer_ends_with_its_own_exit_code(tmp_path, form, arguments, code):
    with WandbServer() as server:
        env = {**server.environment, "PYTHONPATH": jobs.search_path(FIELD)}
        done = jobs.python(tmp_path, *form("typer_command"), *arguments, env=env)
        (run,) = server.runs
    assert (done.returncode, run.exit_codes) == (code, [code]), done.output
    assert ["loss" in row for row in run.rows] == [True] * PASSES
    assert (run.config["lr"], run.config["steps"]) == (0.01, PASSES)
