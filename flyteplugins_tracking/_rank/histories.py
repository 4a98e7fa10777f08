"""How many trainings this process has begun, counted so that all ranks have the same number.

A launcher's ranks live as long as their job: each counts its own calls, and all have the same history. A long-lived
worker has served other jobs before, with other ranks: there each world has a count of its own, from its start.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from flyteplugins_tracking._rank.children import default_group
from flyteplugins_tracking._rank.topology import Detection

# The launchers whose ranks may be workers of a pool that is not known here. The ranks of all others end with their job.
_MAY_LIVE_ON = ("env", "process_group")
_of_groups: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_of_jobs: dict[str, Counter[str]] = {}


def counts(found: Detection) -> Counter[str] | None:
    """Return the counts of this process's world, by tracker; None if they are those of the process."""
    info, trial = found.info, None if found.pool is None else found.pool.trial
    if trial is not None:
        return _of_jobs.setdefault(trial.name, Counter())
    if info is None:
        return None
    if info.launcher == "ray" and info.job_id:
        return _of_jobs.setdefault(info.job_id, Counter())
    if found.pool is None and info.launcher not in _MAY_LIVE_ON:
        return None
    group = default_group()
    return None if group is None else _of_groups.setdefault(group, Counter())
