"""The runs of each mode and scope in this world: `_rank.plan.plan`, called for every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, plan
from flyteplugins_tracking.errors import TopologyError

# How many ranks are listed one by one.
_MOST_NAMED = 4
# No job has more. A larger number is a mistake, and planning for it would take all memory.
MOST_RANKS = 100_000


def plan_rows(
    info: DistributedInfo | None,
    base_id: str | None,
    primary_rank: int = 0,
    ranks: Sequence[DistributedInfo | None] = (),
) -> list[dict[str, Any]]:
    """Return one row for each mode and scope; none for more than `MOST_RANKS` ranks.

    Args:
        info: This rank; None outside a distributed job.
        base_id: The base id; None if it is unknown.
        primary_rank: As for `tracking_init`.
        ranks: All ranks; empty if they are unknown. The other workers then count as equal in size.
    """
    if info is not None and info.world_size > MOST_RANKS:
        return []
    world = ranks or ([None] if info is None else _world(info))
    return [_row(world, m, s, base_id or "{base}", primary_rank) for m in RUN_MODES for s in RANK_SCOPES]


def _world(info: DistributedInfo) -> list[DistributedInfo]:
    """Return all ranks. The number of ranks of this one's worker is known: the other workers share the rest equally."""
    if info.worker_index is None or info.local_rank is None:
        return [DistributedInfo(rank, info.world_size, launcher=info.launcher) for rank in range(info.world_size)]
    own_size = min(info.local_world_size or math.ceil(info.world_size / (info.num_workers or 1)), info.world_size)
    others = (info.num_workers or math.ceil(info.world_size / own_size)) - 1
    if others == 0:
        return list(iter_ranks([info.world_size], launcher=info.launcher))
    size, remainder = divmod(info.world_size - own_size, others)
    sizes = [size + (index < remainder) for index in range(others)]
    sizes.insert(info.worker_index, own_size)
    return list(iter_ranks([size for size in sizes if size > 0], launcher=info.launcher))


def _row(
    ranks: Sequence[DistributedInfo | None], run_mode: RunMode, rank_scope: RankScope, base_id: str, primary_rank: int
) -> dict[str, Any]:
    row = {"run_mode": run_mode, "rank_scope": rank_scope}
    writers: dict[str, list[int]] = {}
    groups: dict[str, None] = {}
    try:
        for info in ranks:
            planned = plan(info, run_mode, rank_scope, base_id, primary_rank=primary_rank)
            if planned.opens:
                writers.setdefault(planned.run_id or "", []).append(info.rank if info else 0)
            if planned.opens and planned.group:
                groups[planned.group] = None
    except TopologyError as error:
        return {**row, "runs": 0, "ids": "-", "groups": None, "writers": "-", "error": str(error)}
    return {
        **row,
        "runs": len(writers),
        "ids": _pattern(writers),
        "groups": _pattern(groups) if groups else None,
        "writers": "this process" if ranks[0] is None else _writers(list(writers.values()), len(ranks)),
        "error": None,
    }


def _pattern(texts: Iterable[str]) -> str:
    """Return one pattern for texts that differ in their numbers, such as `a-{0..3}`."""
    parts = []
    for column in zip(*(re.split(r"(\d+)", text) for text in texts), strict=True):
        values = set(column)
        parts.append(column[0] if len(values) == 1 else f"{{{min(map(int, values))}..{max(map(int, values))}}}")
    return "".join(parts)


def _writers(writers: Sequence[Sequence[int]], world_size: int) -> str:
    if len(writers) == world_size:
        return "each rank its own"
    if len(writers) == 1:
        return f"all {world_size} ranks" if len(writers[0]) == world_size else f"rank {writers[0][0]}"
    if sum(map(len, writers)) == world_size:
        sizes = sorted({len(ranks) for ranks in writers})
        return f"the {' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))} ranks of each worker"
    return f"ranks {named([ranks[0] for ranks in writers])}"


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: `0-3` for a range, and at most four numbers otherwise."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MOST_NAMED - 1]))}, ..., {ranks[-1]}"
