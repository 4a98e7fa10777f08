"""Two processes of one parent whose variables say the same rank: both would be rank 0. The second one is refused.

It happens where a launcher sets the variables once for all of its children, as a notebook's `os.environ` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.fork import after_fork_in_child
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking.errors import TopologyError

# The launchers whose variables a script may have set, for all of its processes at once.
_SET_BY_SCRIPTS = ("env", "env_rank")
# An earlier attempt of this rank may still be ending.
_PATIENCE_S = 2.0
_POLL_S = 0.1
# The locks of the ranks that this process is, by name. The system releases them when the process ends.
_held: dict[str, RunLock] = {}


def refuse_twin(info: DistributedInfo, env: Mapping[str, str]) -> None:
    """Hold this rank, which has a run, against the other processes of the parent, until this process ends.

    It does nothing where a launcher sets the variables for each process, or a process group of all ranks has told them
    apart.

    Raises:
        TopologyError: Another process holds it.
    """
    if info.world_size == 1 or info.launcher not in _SET_BY_SCRIPTS or _is_in_group(info):
        return
    parent = os.getppid()
    if parent <= 1 or _is_child_of_rank(parent, info):
        return
    job = (env.get("MASTER_ADDR"), env.get("MASTER_PORT"))
    name = "\0".join(map(str, ("rank", parent, proc.start_time(parent), *job, info.rank, info.world_size)))
    if name in _held:
        return
    lock, deadline = RunLock.acquire(name), time.monotonic() + _PATIENCE_S
    while lock is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        lock = RunLock.acquire(name)
    if lock is None:
        raise TopologyError(
            f"RANK={info.rank} and WORLD_SIZE={info.world_size} are set in this process and in another one that "
            f"process {parent} has started: both would be rank {info.rank}. Set RANK and LOCAL_RANK in each process, "
            "or call the decorated function after torch.distributed.init_process_group()."
        )
    _held[name] = lock


def _is_child_of_rank(parent: int, info: DistributedInfo) -> bool:
    """Return whether the parent was started as the same rank: its children inherit the variables, and are no ranks."""
    variables = proc.variables_at_start(parent)
    ranks = (variables.get("RANK"), variables.get("LOCAL_RANK"))
    return str(info.rank) in ranks and variables.get("WORLD_SIZE") == str(info.world_size)


def _is_in_group(info: DistributedInfo) -> bool:
    group = detect_process_group()
    return group is not None and group.world_size == info.world_size


@after_fork_in_child
def _release() -> None:
    """Close a forked child's copies: the parent holds the locks."""
    for lock in _held.values():
        lock.release()
    _held.clear()
