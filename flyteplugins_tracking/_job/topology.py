"""Who am I in this job: what the user has said, or else the innermost launcher.

The innermost launcher wins: what an outer one set describes the agent, not this process (torchrun inside srun, mpirun
or a PyTorchJob).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.launchers import DETECTORS, refuse_leftovers, refuse_ranks_that_disagree

Env = Mapping[str, str]

# What is said goes before everything else; it may be None.
_override: ContextVar[tuple[DistributedInfo | None] | None] = ContextVar("flyteplugins_tracking_topology", default=None)


def get_distributed_info() -> DistributedInfo | None:
    """This process's place in its distributed job, read from the launcher's variables at the time of the call.

    Returns:
        None outside a distributed job and for a world of one process.

    Raises:
        TopologyError: A launcher's values are malformed or contradict each other.
    """
    info = detect(os.environ)
    return info if info is not None and info.world_size > 1 else None


@contextmanager
def override_distributed_info(info: DistributedInfo | None) -> Iterator[None]:
    """Say who this process is, for a launcher that this library does not know. It goes before everything else.

    Args:
        info: This process; None for one that is in no distributed job, whatever the variables say.

    Example:
        ```python
        with override_distributed_info(DistributedInfo(rank=3, world_size=8, local_rank=3, worker_index=0)):
            train()
        ```
    """
    token = _override.set((info,))
    try:
        yield
    finally:
        _override.reset(token)


def detect(env: Env) -> DistributedInfo | None:
    """Like `get_distributed_info`, from `env`, but a torchelastic world of one process counts.

    Such a job may have shrunk to one process, or be restarted: it keeps its identity.
    """
    chosen = _override.get()
    if chosen is not None:
        return chosen[0]
    for detector in DETECTORS.values():
        info = detector(env)
        if info is None:
            continue
        if info.launcher == "env":
            refuse_ranks_that_disagree(info, env)
        if info.world_size > 1 or info.launcher == "torchelastic":
            return info
        if info.launcher == "env":
            return None  # a job of one process inside another launcher's, which is not asked
    refuse_leftovers(env)
    return None
