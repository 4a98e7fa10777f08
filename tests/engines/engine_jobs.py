"""Jobs of engines, and the variables of what is around a pool: of a task of an srun step, and of a rank of mpirun."""

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import jobs

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "1673068545",
}


def need(package: str) -> None:
    """Skip the test if a package is missing, or Java for Spark."""
    if find_spec(package) is None:
        install = "apt-get install default-jre-headless, and " if package == "pyspark" else ""
        pytest.skip(f"needs {package}: {install}make test-engines")
    if package == "pyspark" and shutil.which("java") is None:
        pytest.skip("needs Java, for instance apt-get install default-jre-headless")


def run_cold(
    command: Sequence[str | Path], directory: Path, env: Mapping[str, str] | None = None, timeout_s: float = 550
) -> jobs.Done:
    """Run `command` to its end, in a new interpreter: engines start their own, which cannot be forked."""
    return jobs.finish(jobs.start(command, directory, env, cold=True), directory, timeout_s)
