"""Which ranks run on this worker (= node), and which of them leads there."""

from __future__ import annotations

from collections.abc import Mapping

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RankScope

Env = Mapping[str, str]


def leader_of(info: DistributedInfo, rank_scope: RankScope, primary_rank: int, env: Env) -> int:
    """Return the local rank that leads on the worker of `info`: the primary's, or 0 if the primary runs elsewhere.

    Args:
        info: A rank whose local rank is known.
        rank_scope: The scope of the run.
        primary_rank: The primary's number in that scope, from 0.
        env: The environment variables.
    """
    if rank_scope == "worker":
        return primary_rank
    return local_rank_of(primary_rank, info, env) or 0


def has_primary(info: DistributedInfo, rank_scope: RankScope, primary_rank: int, env: Env) -> bool:
    """Return whether a primary of the scope runs on the worker of `info`, as far as this is known."""
    return rank_scope == "worker" or local_rank_of(primary_rank, info, env) is not None


def local_rank_of(rank: int, info: DistributedInfo, env: Env) -> int | None:
    """Return the local rank of `rank`; None if it does not run on the worker of `info`, or if that is unknown.

    A worker's ranks are consecutive, except where Slurm distributes them otherwise: it lists them.
    """
    if rank == 0:
        return 0 if info.worker_index == 0 else None
    listed = env.get("SLURM_GTIDS") if info.launcher == "slurm" else None
    if listed is not None:
        ranks = sorted(int(text) for text in listed.split(",") if text.strip().isdecimal())
        return ranks.index(rank) if rank in ranks else None
    if rank == info.rank:
        return info.local_rank
    if info.local_rank is None or info.worker_index is None:
        return None
    local_rank = rank - (info.rank - info.local_rank)
    size = info.local_world_size if info.local_world_size is not None else info.world_size
    return local_rank if 0 <= local_rank < size else None
