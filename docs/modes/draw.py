"""Draws the modes and scopes, `send --watch`, jobs that log to one run, and SIGTERM: the SVG files beside this one.

The first has everything from `plan()`, for 2 workers of 4 ranks. They have their own background, light or dark as the
reader's system is. On a phone of 390 pixels the smallest text is at least 11 pixels high.
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
STYLE = """\
<style>
  .ink { fill: #1f2430 } .faint { fill: #5c6577 } .frame { stroke: #b9becb; fill: none } .paper { fill: #f7f8fa }
  .on { fill: #ffffff } .off { fill: #6b7486 } .id { font-family: ui-monospace, Menlo, Consolas, monospace }
  @media (prefers-color-scheme: dark) {
    .ink { fill: #e6e9ef } .faint { fill: #a3adbd } .frame { stroke: #566078 } .paper { fill: #252b37 }
    .off { fill: #9aa4b5 }
  }
</style>"""


def main() -> None:
    """Write each drawing."""
    for name, drawing in drawings().items():
        (Path(__file__).parent / name).write_text(drawing)


def drawings() -> dict[str, str]:
    """The drawings, by the names of their files."""
    return {"overview.svg": overview(), "live.svg": live(), "roles.svg": roles(), "sigterm.svg": sigterm()}


def svg(height: int, title: str, parts: Iterator[str]) -> str:
    """A drawing of this height."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * SCALE:g}" '
        f'height="{height * SCALE:g}" role="img" font-family="system-ui, sans-serif" font-size="{FONT}">'
    )
    return "\n".join([opening, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>"]) + "\n"


def ids(plans: dict[DistributedInfo, RunPlan]) -> list[str]:
    """The runs' ids, each once, in the order of the ranks that open them."""
    return list(dict.fromkeys(planned.run_id for planned in plans.values() if planned.run_id is not None))


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


# The places that a row passes on its way from a node without a network, and what passes it on.
PLACES = (
    ("compute node", "no network: train.py calls log()", "W&B's own file"),
    ("shared disk", "what is not sent yet", "each row within 30 s, and the state"),
    ("login node", "flyteplugins-tracking send --watch", "HTTPS"),
    ("W&B", "running, finished, failed, preempted", ""),
)
PLACE_HEIGHT, WAY = 54, 34


def live() -> str:
    """The picture of `send --watch`."""

    def parts() -> Iterator[str]:
        for row, (name, text, way) in enumerate(PLACES):
            y = row * (PLACE_HEIGHT + WAY)
            yield f'<rect class="paper" x="0" y="{y}" width="{WIDTH}" height="{PLACE_HEIGHT}" rx="8"/>'
            yield f'<text class="ink" x="{MARGIN}" y="{y + 23}" font-weight="600">{escape(name)}</text>'
            yield f'<text class="faint" x="{MARGIN}" y="{y + 42}">{escape(text)}</text>'
            if way:
                top, end = y + PLACE_HEIGHT + 4, y + PLACE_HEIGHT + WAY - 4
                yield f'<path class="frame" d="M{MARGIN * 2} {top}V{end}m-4 -5l4 5l4 -5"/>'
                yield f'<text class="faint" x="{MARGIN * 3}" y="{top + 17}">{escape(way)}</text>'

    title = "From a compute node without a network over the shared disk and the login node to the service"
    return svg(len(PLACES) * (PLACE_HEIGHT + WAY) - WAY, title, parts())


# The jobs that log to one run, with what each logs and the key that it gets there.
JOBS = (("trainer", "loss", "loss"), ("rollout-0", "reward", "rollout-0/reward"), ("eval", "accuracy", "eval/accuracy"))
JOB_HEIGHT, RUN_HEIGHT = 54, 38 + 19 * len(JOBS)


def roles() -> str:
    """The picture of jobs with roles: each with its row, and an arrow to the one run."""

    def parts() -> Iterator[str]:
        width, bottom = (WIDTH - 2 * TILE_GAP) // len(JOBS), JOB_HEIGHT + WAY
        for column, (name, value, _) in enumerate(JOBS):
            x = column * (width + TILE_GAP)
            yield f'<rect class="paper" x="{x}" y="0" width="{width}" height="{JOB_HEIGHT}" rx="8"/>'
            yield f'<text class="ink" x="{x + MARGIN}" y="23" font-weight="600">{name}</text>'
            yield f'<text class="faint id" x="{x + MARGIN}" y="42" font-size="{MONO}">{value}</text>'
            yield f'<path class="frame" d="M{x + width // 2} {JOB_HEIGHT + 4}V{bottom - 4}m-4 -5l4 5l4 -5"/>'
        yield f'<rect class="paper" x="0" y="{bottom}" width="{WIDTH}" height="{RUN_HEIGHT}" rx="8"/>'
        label = "one run, that the trainer ends"
        yield f'<text class="ink" x="{MARGIN}" y="{bottom + 23}" font-weight="600">{label}</text>'
        for row, (_, _, key) in enumerate(JOBS):
            y = bottom + 44 + 19 * row
            yield f'<text class="faint id" x="{MARGIN}" y="{y}" font-size="{MONO}">{key}</text>'

    title = "Three jobs log to one run: the trainer's keys are as it logs them, the others' begin with their role"
    return svg(JOB_HEIGHT + WAY + RUN_HEIGHT, title, parts())


# What happens after a SIGTERM, with kill_after_s=30: until when at the latest, in seconds, in turn.
LANES = (
    ("Python code", ((25, "finally blocks have run, and the run ends with 143"),)),
    ("in a collective, in C code", ((1, "the run ends with 143, and then the process"),)),
    ("your own handler", ((25, "the function ends, or the run"),)),
    ("should_stop()", ((10, "the ranks agree"), (25, "they have saved, the run ends"))),
)
KILL_S, LANE_HEIGHT = 30, 72


def sigterm() -> str:
    """The picture of the times after SIGTERM: a bar for each of the cases, over 30 s."""

    def parts() -> Iterator[str]:
        scale = (WIDTH - 2 * MARGIN) / KILL_S
        for row, (name, phases) in enumerate(LANES):
            y, at = row * (LANE_HEIGHT + TILE_GAP), 0
            yield f'<rect class="paper" x="0" y="{y}" width="{WIDTH}" height="{LANE_HEIGHT}" rx="8"/>'
            yield f'<text class="ink" x="{MARGIN}" y="{y + 20}" font-weight="600">{escape(name)}</text>'
            if row == 0:
                kill, right = f"{KILL_S} s: SIGKILL", WIDTH - MARGIN
                yield f'<text class="faint" x="{right}" y="{y + 20}" text-anchor="end">{kill}</text>'
            yield f'<path class="frame" d="M{MARGIN} {y + 36}H{WIDTH - MARGIN}m0 -5v10"/>'
            for number, (end, _) in enumerate(phases):
                x, width = MARGIN + at * scale, (end - at) * scale
                fill = f'style="fill: {COLOURS[number]}"'
                yield f'<rect {fill} x="{x:.1f}" y="{y + 30}" width="{width:.1f}" height="12" rx="2"/>'
                at = end
            said = "; ".join(f"{end} s: {text}" for end, text in phases)
            yield f'<text class="faint" x="{MARGIN}" y="{y + 61}" font-size="{MONO}">{escape(said)}</text>'

    title = "After a SIGTERM, until when at the latest what happens, in four cases. SIGKILL comes after 30 s."
    return svg(len(LANES) * (LANE_HEIGHT + TILE_GAP) - TILE_GAP, title, parts())


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
