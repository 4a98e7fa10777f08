"""Which runs each mode and scope give in this world: `_job.plan.plan`, asked for every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flyteplugins_tracking._job.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._job.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, plan
from flyteplugins_tracking.doctor.report import PlanRow
from flyteplugins_tracking.errors import TopologyError

_BASE = "{base}"
# How many ranks are named.
_MOST_NAMED = 4
# No job has more: planning for what is a mistake would take all memory.
MOST_RANKS = 100_000


def plan_rows(
    info: DistributedInfo | None, base_id: str | None, ranks: Sequence[DistributedInfo | None] | None = None
) -> tuple[PlanRow, ...]:
    """One row for each mode and scope.

    Args:
        info: This rank.
        base_id: What stands for `{base}`, where that is known.
        ranks: All ranks, where they are known. Else the other workers are taken to have equal parts of the rest.

    Returns:
        Nothing for more than `MOST_RANKS`.
    """
    if info is not None and info.world_size > MOST_RANKS:
        return ()
    everyone = list(ranks or _world(info))
    rows = (_row(everyone, m, s) for m in RUN_MODES for s in RANK_SCOPES)
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
    """How many ranks each worker has: this one what it is told, the others equal parts of what is left."""
    here = min(info.local_world_size or math.ceil(info.world_size / (info.num_workers or 1)), info.world_size)
    others = (info.num_workers or math.ceil(info.world_size / here)) - 1
    if others == 0:
        return [info.world_size]
    each, more = divmod(info.world_size - here, others)
    sizes = [each + (index < more) for index in range(others)]
    return [size for size in (*sizes[:worker_index], here, *sizes[worker_index:]) if size > 0]


def _row(ranks: Sequence[DistributedInfo | None], run_mode: RunMode, rank_scope: RankScope) -> PlanRow:
    writers: dict[str, list[int]] = {}
    groups: dict[str, None] = {}
    try:
        for info in ranks:
            planned = plan(info, run_mode, rank_scope, _BASE)
            if planned.opens:
                writers.setdefault(planned.run_id or "", []).append(info.rank if info else 0)
            if planned.opens and planned.group:
                groups[planned.group] = None
    except TopologyError as error:
        return PlanRow(run_mode, rank_scope, 0, "-", None, "-", error=str(error))
    who = "this process" if ranks[0] is None else _who(list(writers.values()), len(ranks))
    return PlanRow(run_mode, rank_scope, len(writers), pattern(writers), pattern(groups) if groups else None, who)


def pattern(texts: Iterable[str]) -> str:
    """Texts that differ in their numbers as one: `a-{0..3}`."""
    split = [re.split(r"(\d+)", text) for text in texts]
    parts = []
    for column in zip(*split, strict=True):
        values = set(column)
        parts.append(column[0] if len(values) == 1 else f"{{{min(map(int, values))}..{max(map(int, values))}}}")
    return "".join(parts)


def _who(writers: Sequence[Sequence[int]], world_size: int) -> str:
    if len(writers) == world_size:
        return "each rank its own"
    if len(writers) == 1:
        return f"all {world_size} ranks" if len(writers[0]) == world_size else f"rank {writers[0][0]}"
    if sum(map(len, writers)) == world_size:
        sizes = sorted({len(ranks) for ranks in writers})
        return f"the {' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))} ranks of each worker"
    return f"ranks {named([ranks[0] for ranks in writers])}"


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `0-3` for those in a row, and not more than a few others."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MOST_NAMED - 1]))}, ..., {ranks[-1]}"
