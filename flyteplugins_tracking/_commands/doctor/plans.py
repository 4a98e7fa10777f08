"""The runs of each mode and scope in this world: `_job.plan.plan`, called for every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flyteplugins_tracking._commands.doctor.report import PlanRow
from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, plan
from flyteplugins_tracking.errors import TopologyError

_BASE = "{base}"
# How many ranks are listed one by one.
_MOST_NAMED = 4
# No job has more. A larger number is a mistake, and planning for it would take all memory.
MOST_RANKS = 100_000


def plan_rows(
    info: DistributedInfo | None,
    base_id: str | None,
    ranks: Sequence[DistributedInfo | None] | None = None,
    primary_rank: int = 0,
) -> tuple[PlanRow, ...]:
    """Return one row for each mode and scope.

    Args:
        info: This rank; None outside a distributed job.
        base_id: The base id; None if it is unknown.
        ranks: All ranks; None if they are unknown. The other workers then count as equal in size.
        primary_rank: As for `tracking_init`.

    Returns:
        No rows for more than `MOST_RANKS` ranks.
    """
    if info is not None and info.world_size > MOST_RANKS:
        return ()
    all_ranks = list(ranks or _world(info))
    rows = (_row(all_ranks, m, s, primary_rank) for m in RUN_MODES for s in RANK_SCOPES)
    return tuple(
        replace(
            row,
            ids=row.ids.replace(_BASE, base_id or _BASE),
            groups=row.groups and row.groups.replace(_BASE, base_id or _BASE),
        )
        for row in rows
    )


def _world(info: DistributedInfo | None) -> Iterator[DistributedInfo | None]:
    if info is None:
        yield None
    elif info.worker_index is None or info.local_rank is None:
        for rank in range(info.world_size):
            yield DistributedInfo(rank, info.world_size, launcher=info.launcher)
    else:
        yield from iter_ranks(_sizes(info, info.worker_index), launcher=info.launcher)


def _sizes(info: DistributedInfo, worker_index: int) -> list[int]:
    """Return the number of ranks of each worker: this one's is known, the others share the rest equally."""
    own_size = min(info.local_world_size or math.ceil(info.world_size / (info.num_workers or 1)), info.world_size)
    others = (info.num_workers or math.ceil(info.world_size / own_size)) - 1
    if others == 0:
        return [info.world_size]
    size, remainder = divmod(info.world_size - own_size, others)
    sizes = [size + (index < remainder) for index in range(others)]
    return [size for size in (*sizes[:worker_index], own_size, *sizes[worker_index:]) if size > 0]


def _row(
    ranks: Sequence[DistributedInfo | None], run_mode: RunMode, rank_scope: RankScope, primary_rank: int
) -> PlanRow:
    writers: dict[str, list[int]] = {}
    groups: dict[str, None] = {}
    try:
        for info in ranks:
            planned = plan(info, run_mode, rank_scope, _BASE, primary_rank=primary_rank)
            if planned.opens:
                writers.setdefault(planned.run_id or "", []).append(info.rank if info else 0)
            if planned.opens and planned.group:
                groups[planned.group] = None
    except TopologyError as error:
        return PlanRow(run_mode, rank_scope, 0, "-", None, "-", error=str(error))
    who = "this process" if ranks[0] is None else _writers(list(writers.values()), len(ranks))
    return PlanRow(run_mode, rank_scope, len(writers), pattern(writers), pattern(groups) if groups else None, who)


def pattern(texts: Iterable[str]) -> str:
    """Return one pattern for texts that differ in their numbers, such as `a-{0..3}`."""
    split = [re.split(r"(\d+)", text) for text in texts]
    parts = []
    for column in zip(*split, strict=True):
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
