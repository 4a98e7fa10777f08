"""When a launcher will end this job, if it tells."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flyteplugins_tracking._util import proc


def ends_at(env: Mapping[str, str], timeout_s: float | None = None) -> float | None:
    """Return when the job's time limit ends, in seconds since the epoch; None if that is not known.

    Slurm 22.05 and later set SLURM_JOB_END_TIME: https://slurm.schedmd.com/sbatch.html

    Args:
        env: The launcher's variables.
        timeout_s: How long the task that this process runs may take; None if that is unknown.
    """
    text = env.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return float(text)
    return None if timeout_s is None else _task_started_at(env) + timeout_s


def _task_started_at(env: Mapping[str, str]) -> float:
    """Return when the pod's process was started: torchelastic's agent, if this is a worker of it."""
    variable = "TORCHELASTIC_RUN_ID"
    return proc.started_at(proc.nearest_without(variable) if variable in env else os.getpid())
