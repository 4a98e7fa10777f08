"""This process's place in its job: from the user's override, or else from the innermost launcher.

The innermost launcher wins: the variables of an outer one describe the agent, not this process (torchrun inside srun,
mpirun or a PyTorchJob).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from flyteplugins_tracking._rank.children import is_child_of_rank, is_forked
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import (
    LAUNCHERS,
    ranks_of_unknown,
    refuse_left_over,
    refuse_leftovers,
    refuse_ranks_that_disagree,
)
from flyteplugins_tracking._rank.pools import Pool, innermost_pool, is_inherited
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TopologyError

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

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


class Detection(NamedTuple):
    """The place of this process, and how it was found.

    Attributes:
        info: This rank; None outside a distributed job.
        pool: The pool whose worker runs the function; None if there is no pool.
        parent: The rank that has started this process, which is not a rank itself; None for any other process.
        variables: The variables by which this process is a rank.
    """

    info: DistributedInfo | None = None
    pool: Pool | None = None
    parent: DistributedInfo | None = None
    variables: Mapping[str, str] = {}

    @property
    def is_child(self) -> bool:
        """Whether a rank, or the only process of a job, has started this process: that one's run is not its own."""
        return self.parent is not None or (self.info is None and is_forked())


def detect(env: Env) -> DistributedInfo | None:
    """Return this process's place according to `env`, as `get_distributed_info`, even in a world of one process.

    A job of torchelastic or Ray may have shrunk to one process, and keeps its identity. A child of a rank has
    that rank's place here, so that it can read that rank's share of the data. A worker of a pool has none.
    """
    found = examine(env)
    return found.info if found.pool is not None else found.info or found.parent


def examine(env: Env) -> Detection:
    """Return who this process is according to `env`: a rank, a rank's child, a pool's worker, or one by itself.

    Raises:
        TopologyError: As `get_distributed_info`.
    """
    override = _override.get()
    if override is not None:
        return Detection(override[0])
    pool = innermost_pool()
    return _without_pool(env) if pool is None else _in_pool(env, pool)


def _without_pool(env: Env) -> Detection:
    for launcher in LAUNCHERS.values():
        variables = RecordingEnv(env)
        info = launcher.detect(variables)
        if info is None:
            continue
        if info.launcher == "env":
            refuse_ranks_that_disagree(info, env)
        if info.launcher == "env_rank":
            refuse_left_over(info, env)
        if _counts(info):
            return _rank_or_child(info, variables.read)
        if info.launcher == "env":
            return Detection()  # a job of one process inside another launcher's job: the outer launcher does not count
    refuse_leftovers(env)
    if unknown := ranks_of_unknown(env):
        text = "%s look like a rank of a launcher that is not known: this process is taken for the only one. If it is "
        _warn_once(unknown, text + "one of several, set RANK, WORLD_SIZE and LOCAL_RANK in each", unknown)
    return Detection()


def _in_pool(env: Env, pool: Pool) -> Detection:
    """Return the place that the pool's worker has got since its start; what its daemon was given does not count."""
    parent = None
    for launcher in LAUNCHERS.values():
        if launcher.is_of_node:
            continue
        variables, info, error = RecordingEnv(env), None, None
        try:
            info = launcher.detect(variables)
        except TopologyError as wrong:
            error = wrong
        if info is None and error is None:
            continue
        if pool.has_inherited(variables.read) if variables.read else is_inherited(launcher.name):
            parent = parent or (info if info is not None and _counts(info) else None)
            continue
        if error is not None:
            raise error
        if info is not None and _counts(info):
            if info.launcher == "env":
                refuse_left_over(info, env)
            return Detection(_of_pool(info, pool), pool)
    return Detection(pool=pool, parent=parent if pool.is_child else None)


def _of_pool(info: DistributedInfo, pool: Pool) -> DistributedInfo:
    """Name the pool as the launcher, unless another launcher has started this process on the pool's worker."""
    return replace(info, launcher=pool.name) if info.launcher in ("env", "process_group") else info


def _counts(info: DistributedInfo) -> bool:
    """Return whether the launcher gives an identity; that of one process keeps it over its restarts."""
    return info.world_size > 1 or info.launcher in ("torchelastic", "ray")


def _rank_or_child(info: DistributedInfo, variables: Mapping[str, str]) -> Detection:
    is_child = is_child_of_rank(variables) if variables else is_inherited(info.launcher)
    return Detection(parent=info) if is_child else Detection(info, variables=variables)


class RecordingEnv(Mapping[str, str]):
    """An environment that records which of its variables were read."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.read: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        self.read[name] = self._env[name]
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)
