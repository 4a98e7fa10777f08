"""Draws who writes what, for each mode and scope: `python docs/modes/draw.py` makes the SVG files beside it.

Everything in a drawing comes from `plan()`, for 2 workers of 4 ranks. A drawing has its own background, light or dark
as the reader's system is. On a phone of 390 pixels its smallest text is at least 11 pixels high.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import get_args

from flyteplugins_tracking import DistributedInfo, RankScope, RunMode, RunPlan, plan
from flyteplugins_tracking._rank.info import iter_ranks

WORKERS, RANKS_EACH = 2, 4
ID = "llm-7b"
# Lengths are in units of the drawing, which is WIDTH units wide. A phone shows about 0.9 pixels for a unit.
WIDTH, SCALE, FONT, MONO = 400, 1.35, 13, 12.5
ROW, GAP, TOP = 32, 36, 42
RANK_X, RANK_WIDTH, RUN_X, RUN_WIDTH = 22, 112, 200, 178
STYLE = """\
<style>
  .ink { fill: #1f2430 } .faint { fill: #5c6577 } .frame { stroke: #b9becb; fill: none } .paper { fill: #f7f8fa }
  .box { fill: #ffffff; stroke: #3f51b5 } .run { fill: #3f51b5 } .line { stroke: #3f51b5; fill: none }
  .on { fill: #ffffff } .off { fill: #6b7486 } .id { font-family: ui-monospace, Menlo, Consolas, monospace }
  @media (prefers-color-scheme: dark) {
    .ink { fill: #e6e9ef } .faint { fill: #a3adbd } .frame { stroke: #566078 } .paper { fill: #252b37 }
    .box { fill: #303849; stroke: #8c9eff } .run { fill: #4f63d2 } .line { stroke: #8c9eff } .off { fill: #9aa4b5 }
  }
</style>"""


def main() -> None:
    """Write each drawing."""
    for name, drawing in drawings().items():
        (Path(__file__).parent / name).write_text(drawing)


def drawings() -> dict[str, str]:
    """The drawings, by the names of their files."""
    each = {f"{mode}-{scope}.svg": draw(mode, scope) for mode in get_args(RunMode) for scope in get_args(RankScope)}
    return {"overview.svg": overview(), **each}


def svg(height: int, title: str, parts: Iterator[str]) -> str:
    """A drawing of this height."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * SCALE:g}" '
        f'height="{height * SCALE:g}" role="img" font-family="system-ui, sans-serif" font-size="{FONT}">'
    )
    return "\n".join([opening, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>"]) + "\n"


def draw(mode: RunMode, scope: RankScope) -> str:
    """The drawing of one mode and scope."""
    plans = {info: plan(info, mode, scope, ID) for info in iter_ranks([RANKS_EACH] * WORKERS)}
    runs = {run_id: [info for info, planned in plans.items() if planned.run_id == run_id] for run_id in ids(plans)}
    keys = list(legend(list(plans.values())))
    top = rank_y(WORKERS * RANKS_EACH - 1) + ROW + 22
    height = top + len(keys) * 22 + 4

    def parts() -> Iterator[str]:
        yield f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>'
        yield from workers()
        yield from groups(plans, runs)
        yield from (line(info, planned, runs) for info, planned in plans.items() if planned.opens)
        yield from (rank(info, planned) for info, planned in plans.items())
        yield from (run(run_id, writers) for run_id, writers in runs.items())
        for number, (mark, text) in enumerate(keys):
            yield f'<g transform="translate({RANK_X} {top + number * 22})">{mark}'
            yield f'<text class="ink" x="36" y="4">{escape(text)}</text></g>'

    return svg(height, f"{mode}, {scope}: {len(runs)} runs for {len(plans)} ranks", parts())


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
        f'<rect class="frame" x="{x - 10}" y="{y - 6}" width="{width + 20}" height="{rows * ROW + 6:g}" rx="6" '
        'stroke-dasharray="4 3"/>'
    )
    yield f'<text class="faint" x="{x - 8}" y="{y - 12}">{escape(title)}</text>'


def line(info: DistributedInfo, planned: RunPlan, runs: dict[str, list[DistributedInfo]]) -> str:
    """From a rank to its run; thick where the rank's end is the run's end."""
    start, end = rank_y(info.rank) + ROW // 2 - 3, run_y(runs[planned.run_id or ""]) + ROW // 2 - 3
    left, right = RANK_X + RANK_WIDTH, RUN_X
    middle = (left + right) // 2
    return (
        f'<path class="line" d="M{left} {start} C{middle} {start} {middle} {end} {right} {end}" '
        f'stroke-width="{4 if planned.primary else 1.5}"/>'
    )


def rank(info: DistributedInfo, planned: RunPlan) -> str:
    """A rank's box: pale where it has no run."""
    y, box, ink = rank_y(info.rank), *(("box", "ink") if planned.opens else ("frame", "off"))
    return (
        f'<rect class="{box}" x="{RANK_X}" y="{y}" width="{RANK_WIDTH}" height="{ROW - 6}" rx="4"/>'
        f'<text class="{ink}" x="{RANK_X + 8}" y="{y + 18}">rank {info.rank}'
        f'<tspan class="{"faint" if planned.opens else "off"}"> · local {info.local_rank}</tspan></text>'
    )


def run(run_id: str, writers: list[DistributedInfo]) -> str:
    """A run's box, with its id."""
    y = run_y(writers)
    return (
        f'<rect class="run" x="{RUN_X}" y="{y}" width="{RUN_WIDTH}" height="{ROW - 6}" rx="4"/>'
        f'<text class="on id" x="{RUN_X + 7}" y="{y + 17}" font-size="{MONO}">{escape(run_id)}</text>'
    )


def legend(plans: list[RunPlan]) -> Iterator[tuple[str, str]]:
    """The marks that the drawing has, with their meanings."""
    yield '<path class="line" d="M0 0 h28" stroke-width="4"/>', "logs, and its end is the run's end"
    if any(planned.opens and not planned.primary for planned in plans):
        yield '<path class="line" d="M0 0 h28" stroke-width="1.5"/>', "logs"
    if not all(planned.opens for planned in plans):
        yield '<rect class="frame" y="-8" width="28" height="16" rx="4"/>', "has no run: get_run() is None"


# The picture of all six cases: a row for each mode, a column for each scope.
TILE_HEIGHT, TILE_GAP, MARGIN = 126, 8, 11
TILE_WIDTH = (WIDTH - TILE_GAP) // 2
SQUARE, STRIDE, BETWEEN_WORKERS = 19, 21, 7
COLOURS = ("#3f51b5", "#c2185b", "#00796b", "#c75300", "#7b1fa2", "#4d7300", "#01669e", "#8a5024")


def overview() -> str:
    """The picture of all modes and scopes. A rank has the colour of the run that it logs to."""
    modes, scopes = ("auto", "shared", "new"), get_args(RankScope)

    def parts() -> Iterator[str]:
        for row, mode in enumerate(modes):
            for column, scope in enumerate(scopes):
                yield from tile((column * (TILE_WIDTH + TILE_GAP), row * (TILE_HEIGHT + TILE_GAP)), mode, scope)

    title = "Which ranks of 2 workers of 4 have a run, in each mode and scope. One colour is one run."
    return svg(len(modes) * (TILE_HEIGHT + TILE_GAP) - TILE_GAP, title, parts())


def tile(at: tuple[int, int], mode: RunMode, scope: RankScope) -> Iterator[str]:
    """One mode and scope: its arguments, its ranks, and how many runs there are."""
    x, y = at
    plans = {info: plan(info, mode, scope, ID) for info in iter_ranks([RANKS_EACH] * WORKERS)}
    runs = ids(plans)
    left = x + MARGIN
    yield f'<rect class="paper" x="{x}" y="{y}" width="{TILE_WIDTH}" height="{TILE_HEIGHT}" rx="8"/>'
    yield f'<text class="ink" x="{left}" y="{y + 21}" font-weight="600">run_mode="{mode}"</text>'
    yield f'<text class="faint" x="{left}" y="{y + 38}">rank_scope="{scope}"</text>'
    for info, planned in plans.items():
        yield square(
            left + info.rank * STRIDE + BETWEEN_WORKERS * (info.worker_index or 0), y + 50, info, planned, runs
        )
    count = "1 run:" if len(runs) == 1 else f"{len(runs)} runs, the first:"
    yield f'<text class="ink" x="{left}" y="{y + 97}">{count}</text>'
    yield f'<text class="faint id" x="{left}" y="{y + 114}" font-size="{MONO}">{escape(runs[0])}</text>'


def square(x: int, y: int, info: DistributedInfo, planned: RunPlan, runs: list[str]) -> str:
    """A rank, with its number."""
    is_writer = planned.opens and planned.run_id in runs
    fill = f' style="fill: {COLOURS[runs.index(planned.run_id or "")]}"' if is_writer else ""
    return (
        f'<rect class="frame"{fill} x="{x}" y="{y}" width="{SQUARE}" height="{SQUARE + 7}" rx="4"/>'
        f'<text class="{"on" if is_writer else "off"}" x="{x + SQUARE / 2:g}" y="{y + 18}" text-anchor="middle">'
        f"{info.rank}</text>"
    )


if __name__ == "__main__":
    main()
