"""Functions on the long-lived workers of a pool: what Slurm and an MPI have told its daemon is not about them."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import OPENMPI, SLURM, need, run_cold
from support import jobs

TRIALS = jobs.PROGRAMS / "pool_trials.py"
PACKAGES = {
    "dask": "distributed",
    "ray-tasks": "ray",
    "joblib": "joblib",
    "futures": "concurrent.futures",
    "spark": "pyspark",
}
AROUND = {"slurm": SLURM, "openmpi": OPENMPI}


def trials(
    directory: Path, pool: str, count: int, variables: Mapping[str, str], command: tuple[str | Path, ...] = ()
) -> list[dict[str, Any]]:
    """Run `count` trials, and return what each has found. Each must have its own run with every row."""
    done = run_cold([*command, sys.executable, TRIALS, pool, str(count)], directory, variables)
    return of_own_runs(done, count)


def of_own_runs(done: jobs.Done, count: int) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.output
    found = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"trial"')]
    assert len({trial["run"] for trial in found}) == len(found) == count, done.output
    runs = {run.id: run for run in done.runs}
    assert len(done.runs) == len(runs) == count
    for trial in found:
        run = runs[trial["run"]]
        assert (run.config["trial"], run.exit_code) == (trial["trial"], 0)
        assert [(row["trial"], row["row"]) for row in run.rows] == [(trial["trial"], row) for row in range(5)]
    assert [trial["info"] for trial in found] == [None] * count
    return found


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("pool", ["dask", "ray-tasks"])
def test_each_of_20_trials_has_its_run(tmp_path: Path, pool: str, around: str) -> None:
    need(PACKAGES[pool])
    found = trials(tmp_path, pool, 20, AROUND[around])
    assert len({trial["pid"] for trial in found}) < 20  # the workers are long-lived


@pytest.mark.parametrize("pool", ["joblib", pytest.param("futures", marks=pytest.mark.wide), "spark"])
def test_each_trial_has_its_run(tmp_path: Path, pool: str) -> None:
    need(PACKAGES[pool])
    trials(tmp_path, pool, 4, {**SLURM, "PYSPARK_PYTHON": sys.executable})


@pytest.mark.parametrize("around", [{}, SLURM], ids=["alone", "slurm"])
def test_each_of_20_trials_of_mpi4py_has_its_run(tmp_path: Path, around: dict[str, str]) -> None:
    """Open MPI sets its own variables here, for real: the worker processes are its ranks 1 and 2."""
    pytest.importorskip("mpi4py")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun, for instance apt-get install openmpi-bin")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    done = run_cold([*mpirun, TRIALS, "mpi", "20"], tmp_path, around)
    of_own_runs(done, 20)


def test_workers_with_different_histories_agree_on_the_run(tmp_path: Path) -> None:
    """Each training of a process group has an id, the same on all ranks. Afterwards the workers are not ranks."""
    pytest.importorskip("distributed")
    done = run_cold([sys.executable, jobs.PROGRAMS / "dask_training.py", "new"], tmp_path, SLURM)
    assert done.returncode == 0, done.output
    found = json.loads(next(line for line in done.output.splitlines() if line.startswith('{"before"')))
    assert [one["info"] for one in [*found["before"], *found["after"]]] == [None] * 5
    for rank, calls in enumerate(found["trained"]):
        assert [(call["info"]["rank"], call["info"]["launcher"]) for call in calls] == [(rank, "dask")] * 2
    first, second = ([calls[n]["run"].partition("-rank-") for calls in found["trained"]] for n in range(2))
    assert [end for _, _, end in first] == [end for _, _, end in second] == ["0", "1"]
    assert len({base for base, _, _ in first}) == len({base for base, _, _ in second}) == 1
    assert len({run.id for run in done.runs}) == len(done.runs) == 3 + 4 + 2
