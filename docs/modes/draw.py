"""Draws who writes what, for each mode and scope: `python docs/modes/draw.py` makes the SVG files beside it.

Everything in a drawing comes from `plan()`, for 2 workers of 4 ranks. The background is part of it, so that it can be
read on a dark page too.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import get_args

from flyteplugins_tracking import DistributedInfo, RankScope, RunMode, RunPlan, plan
from flyteplugins_tracking._job.info import iter_ranks

WORKERS, RANKS_EACH = 2, 4
# Lengths are in pixels.
ROW, GAP, TOP = 34, 40, 46
RANK_X, RANK_WIDTH, RUN_X, RUN_WIDTH, WIDTH = 34, 150, 380, 260, 680
PAPER, INK, FAINT, ACCENT, FRAME = "#f7f8fa", "#1f2430", "#667085", "#3f51b5", "#c6cad4"


def main() -> None:
    """Write each drawing."""
    for name, drawing in drawings().items():
        (Path(__file__).parent / name).write_text(drawing)


def drawings() -> dict[str, str]:
    """The drawings, by the names of their files."""
    each = {f"{mode}-{scope}.svg": draw(mode, scope) for mode in get_args(RunMode) for scope in get_args(RankScope)}
    return {"overview.svg": overview(), **each}


def draw(mode: RunMode, scope: RankScope) -> str:
    """The drawing of one mode and scope."""
    plans = {info: plan(info, mode, scope, "{base}") for info in iter_ranks([RANKS_EACH] * WORKERS)}
    runs = {run_id: [info for info, planned in plans.items() if planned.run_id == run_id] for run_id in ids(plans)}
    height = rank_y(WORKERS * RANKS_EACH - 1) + ROW + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(f'{mode}, {scope}: {len(runs)} runs for {len(plans)} ranks')}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        *workers(),
        *groups(plans, runs),
        *(line(info, planned, runs) for info, planned in plans.items() if planned.opens),
        *(rank(info, planned) for info, planned in plans.items()),
        *(run(run_id, writers) for run_id, writers in runs.items()),
        *legend(height, list(plans.values())),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ids(plans: dict[DistributedInfo, RunPlan]) -> list[str]:
    """The runs' ids, each once, in the order of the ranks that open them."""
    return list(dict.fromkeys(planned.run_id for planned in plans.values() if planned.run_id is not None))


def rank_y(rank: int) -> int:
    """The upper edge of a rank's box."""
    return TOP + rank * ROW + rank // RANKS_EACH * GAP


def run_y(writers: list[DistributedInfo]) -> int:
    """The upper edge of a run's box: in the middle of its writers."""
    return (rank_y(writers[0].rank) + rank_y(writers[-1].rank)) // 2


def workers() -> Iterator[str]:
    """The frames around the ranks of each worker."""
    for worker in range(WORKERS):
        yield from frame(RANK_X, rank_y(worker * RANKS_EACH), RANK_WIDTH, RANKS_EACH, f"worker {worker}")


def groups(plans: dict[DistributedInfo, RunPlan], runs: dict[str, list[DistributedInfo]]) -> Iterator[str]:
    """The frames around the runs of each group."""
    of_group: dict[str, list[int]] = {}
    for writers in runs.values():
        group = plans[writers[0]].group
        if group is not None:
            of_group.setdefault(group, []).append(run_y(writers))
    for group, tops in of_group.items():
        yield from frame(RUN_X, tops[0], RUN_WIDTH, (tops[-1] - tops[0]) / ROW + 1, f"group {group}")


def frame(x: int, y: int, width: int, rows: float, title: str) -> Iterator[str]:
    """A dashed frame with its title above."""
    yield (
        f'<rect x="{x - 10}" y="{y - 6}" width="{width + 20}" height="{rows * ROW + 6:g}" rx="6" fill="none" '
        f'stroke="{FRAME}" stroke-dasharray="4 3"/>'
    )
    yield f'<text x="{x - 8}" y="{y - 13}" fill="{FAINT}">{escape(title)}</text>'


def line(info: DistributedInfo, planned: RunPlan, runs: dict[str, list[DistributedInfo]]) -> str:
    """From a rank to its run; thick where the rank's end is the run's end."""
    start, end = rank_y(info.rank) + ROW // 2 - 3, run_y(runs[planned.run_id or ""]) + ROW // 2 - 3
    left, right = RANK_X + RANK_WIDTH, RUN_X
    middle = (left + right) // 2
    return (
        f'<path d="M{left} {start} C{middle} {start} {middle} {end} {right} {end}" fill="none" '
        f'stroke="{ACCENT}" stroke-width="{4 if planned.primary else 1.5}"/>'
    )


def rank(info: DistributedInfo, planned: RunPlan) -> str:
    """A rank's box: pale where it has no run."""
    box = f'fill="#ffffff" stroke="{ACCENT}"' if planned.opens else f'fill="none" stroke="{FRAME}"'
    ink = INK if planned.opens else FAINT
    return (
        f'<rect x="{RANK_X}" y="{rank_y(info.rank)}" width="{RANK_WIDTH}" height="{ROW - 6}" rx="4" {box}/>'
        f'<text x="{RANK_X + 10}" y="{rank_y(info.rank) + 19}" fill="{ink}">rank {info.rank}'
        f'<tspan fill="{FAINT}"> · local rank {info.local_rank}</tspan></text>'
    )


def run(run_id: str, writers: list[DistributedInfo]) -> str:
    """A run's box, with its id."""
    y = run_y(writers)
    return (
        f'<rect x="{RUN_X}" y="{y}" width="{RUN_WIDTH}" height="{ROW - 6}" rx="4" fill="{ACCENT}"/>'
        f'<text x="{RUN_X + 10}" y="{y + 19}" fill="#ffffff" font-family="monospace">{escape(run_id)}</text>'
    )


def legend(height: int, plans: list[RunPlan]) -> Iterator[str]:
    """What is drawn how, of what there is."""
    x, y = RANK_X, height - 18
    yield f'<path d="M{x} {y - 4} h28" stroke="{ACCENT}" stroke-width="4"/>'
    yield f'<text x="{x + 36}" y="{y}">logs, and its end is the run\'s end</text>'
    x += 290
    if any(planned.opens and not planned.primary for planned in plans):
        yield f'<path d="M{x} {y - 4} h28" stroke="{ACCENT}" stroke-width="1.5"/>'
        yield f'<text x="{x + 36}" y="{y}">logs</text>'
    if not all(planned.opens for planned in plans):
        yield f'<rect x="{x}" y="{y - 12}" width="28" height="16" rx="4" fill="none" stroke="{FRAME}"/>'
        yield f'<text x="{x + 36}" y="{y}">has no run: get_run() is None</text>'


# The picture of all six cases: tiles, each with two workers of four ranks.
TILE_WIDTH, TILE_HEIGHT, TILE_GAP = 240, 132, 12
SQUARE, STRIDE, BETWEEN_WORKERS = 24, 26, 8
COLOURS = ("#3f51b5", "#c2185b", "#00897b", "#ef6c00", "#7b1fa2", "#5d8a00", "#0277bd", "#a15c2d")
STYLE = """\
<style>
  .ink { fill: #1f2430 } .faint { fill: #667085 } .frame { stroke: #c6cad4 } .tile { fill: #f7f8fa }
  @media (prefers-color-scheme: dark) {
    .ink { fill: #e6e9ef } .faint { fill: #9aa4b5 } .frame { stroke: #4a5263 } .tile { fill: #1c2029 }
  }
</style>"""


def overview() -> str:
    """The picture of all modes and scopes. A rank has the colour of the run that it logs to."""
    width, height = 3 * TILE_WIDTH + 2 * TILE_GAP, 2 * TILE_HEIGHT + TILE_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>Which ranks of 2 workers of 4 have a run, in each mode and scope. One colour is one run.</title>",
        STYLE,
    ]
    for row, scope in enumerate(get_args(RankScope)):
        for column, mode in enumerate(("auto", "shared", "new")):
            at = (column * (TILE_WIDTH + TILE_GAP), row * (TILE_HEIGHT + TILE_GAP))
            parts += tile(at, mode, scope)
    return "\n".join([*parts, "</svg>"]) + "\n"


def tile(at: tuple[int, int], mode: RunMode, scope: RankScope) -> Iterator[str]:
    """One mode and scope: its arguments, its ranks, and how many runs there are."""
    x, y = at
    plans = {info: plan(info, mode, scope, "llm-7b") for info in iter_ranks([RANKS_EACH] * WORKERS)}
    runs = ids(plans)
    yield f'<rect class="tile" x="{x}" y="{y}" width="{TILE_WIDTH}" height="{TILE_HEIGHT}" rx="8"/>'
    yield f'<text class="ink" x="{x + 12}" y="{y + 22}" font-weight="600">run_mode="{mode}"</text>'
    yield f'<text class="faint" x="{x + 12}" y="{y + 38}">rank_scope="{scope}"</text>'
    for info, planned in plans.items():
        left = x + 12 + info.rank * STRIDE + BETWEEN_WORKERS * info.worker_index
        colour = COLOURS[runs.index(planned.run_id)] if planned.run_id in runs and planned.opens else "none"
        yield (
            f'<rect class="frame" x="{left}" y="{y + 52}" width="{SQUARE}" height="{SQUARE + 4}" rx="4" '
            f'fill="{colour}"/>'
        )
        number = "#ffffff" if planned.opens else "#8a93a5"
        yield f'<text x="{left + 8}" y="{y + 71}" fill="{number}">{info.rank}</text>'
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    names = escape(", ".join(runs[:1] if len(runs) == 1 else [runs[0], "..."]))
    yield f'<text class="ink" x="{x + 12}" y="{y + 102}">{count}</text>'
    yield f'<text class="faint" x="{x + 12}" y="{y + 119}" font-family="monospace" font-size="11">{names}</text>'


if __name__ == "__main__":
    main()
