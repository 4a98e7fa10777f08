"""When a launcher will end this job, if it tells."""

from __future__ import annotations

from collections.abc import Mapping


def ends_at(env: Mapping[str, str]) -> float | None:
    """Return when the job's time limit ends, in seconds since the epoch; None if that is not known.

    Slurm 22.05 and later set SLURM_JOB_END_TIME: https://slurm.schedmd.com/sbatch.html
    """
    text = env.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() else None
