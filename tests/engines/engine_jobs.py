"""Jobs of engines, and the variables of what is around a pool: of a task of an srun step, and of a rank of mpirun."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def run_cold(
    command: Sequence[str | Path], directory: Path, env: Mapping[str, str] | None = None, timeout_s: float = 550
) -> jobs.Done:
    """Run `command` to its end, in a new interpreter: engines start their own, which cannot be forked."""
    return jobs.finish(jobs.start(command, directory, env, cold=True), directory, timeout_s)
