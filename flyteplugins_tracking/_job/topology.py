"""This process's place in its job: from the user's override, or else from the innermost launcher.

The innermost launcher wins: the variables of an outer one describe the agent, not this process (torchrun inside srun,
mpirun or a PyTorchJob).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.launchers import DETECTORS, refuse_leftovers, refuse_ranks_that_disagree

Env = Mapping[str, str]

# Set by `override_distributed_info`. In a tuple, since the override itself may be None.
_override: ContextVar[tuple[DistributedInfo | None] | None] = ContextVar("flyteplugins_tracking_topology", default=None)


def get_distributed_info() -> DistributedInfo | None:
    """Return this process's place in its distributed job, read from the launcher's variables at the time of the call.

    Returns:
        None outside a distributed job and for a world of one process.

    Raises:
        TopologyError: A launcher's values are malformed or contradict each other.
    """
    info = detect(os.environ)
    return info if info is not None and info.world_size > 1 else None


@contextmanager
def override_distributed_info(info: DistributedInfo | None) -> Iterator[None]:
    """Set this process's place in its job, for a launcher that this library does not know.

    It takes precedence over all variables.

    Args:
        info: This process; None if it is not in a distributed job.

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
    """Return this process's place according to `env`, as `get_distributed_info`; also for one process of torchelastic.

    A torchelastic job may have shrunk to one process, or be restarted: it keeps its identity.
    """
    override = _override.get()
    if override is not None:
        return override[0]
    for detector in DETECTORS.values():
        info = detector(env)
        if info is None:
            continue
        if info.launcher == "env":
            refuse_ranks_that_disagree(info, env)
        if info.world_size > 1 or info.launcher == "torchelastic":
            return info
        if info.launcher == "env":
            return None  # a job of one process inside another launcher's job: the outer launcher does not count
    refuse_leftovers(env)
    return None
