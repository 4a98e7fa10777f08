"""Writes the table of costs from what the benchmarks have measured: `make includes`.

The figures, each single one and the benchmarks' own tables, are in `benchmarks/figures`.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "benchmarks" / "figures"


class Row(NamedTuple):
    """A line of the table: what is measured, how its figures read, and how the name of its goal begins."""

    what: str
    reads: Callable[[], str]
    goal: str


@functools.cache
def _benchmark(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def _median(name: str, kind: str, key: str) -> float:
    return statistics.median(one[key] for one in _benchmark(name)["figures"][kind])


def _more(name: str, key: str, ours: str, base: str, unit: str, scale: float = 1) -> str:
    """What this library adds: the difference of the medians, and both. Two runs differ by more than a negative time."""
    here, there = (_median(name, kind, key) * scale for kind in (ours, base))
    added = "0" if unit == "ms" and here < there else f"{here - there:+.0f}"
    return f"{added} {unit} ({here:.0f} instead of {there:.0f})"


_INERT = "a plain function, torch imported"
_START, _STARTED = "one process, ours", "one process, wandb.init without its reports"
ROWS = (
    Row(
        "A rank without a run: import, decorate and call, once",
        lambda: (
            f"{_median('inert_rank', f'{_INERT}, ours', 'cpu_ms'):.0f} ms of CPU, "
            f"{_median('inert_rank', f'{_INERT}, ours', 'rss_mib'):.1f} MiB; no process, thread or file"
        ),
        "a rank that logs nothing, a plain function, torch imported, over",
    ),
    Row(
        "The same with flyteplugins-wandb",
        lambda: f"{_median('inert_rank', f'{_INERT}, flyteplugins-wandb', 'cpu_ms'):.0f} ms of CPU",
        "a rank that logs nothing, a plain function, torch imported, against",
    ),
    Row(
        "The start of a run, to the first `log`",
        lambda: _more("primary_start", "total", _START, _STARTED, "ms"),
        "the primary's start, one process",
    ),
    Row(
        "A `log` of 5 keys, every 10 ms, over W&B's own",
        lambda: _more("log", "paced_median", "ours", "wandb.Run", "µs"),
        "`log` every 10 ms, against",
    ),
    Row(
        "The same with `step=`",
        lambda: _more("log", "paced_step_median", "ours", "wandb.Run", "µs"),
        "`log` every 10 ms, with `step=`, against",
    ),
    Row(
        "A `log` of 5 keys, as fast as it goes, over W&B's own",
        lambda: _more("log", "fast_median", "ours", "wandb.Run", "µs"),
        "`log` as fast as it goes, against",
    ),
    Row(
        "The same with `step=`",
        lambda: _more("log", "fast_step_median", "ours", "wandb.Run", "µs"),
        "`log` as fast as it goes, with `step=`, against",
    ),
    Row(
        "A training step of 25 ms that logs 5 keys, over one without tracking",
        lambda: "{:.1%} slower ({:.1%} with W&B's own)".format(
            *_slower("a training step that logs 5 keys, ours, auto")
        ),
        "a training step that logs 5 keys, ours, auto",
    ),
    Row(
        "The same in a run that two ranks share",
        lambda: "{:.1%} slower ({:.1%} with W&B's own, on one rank)".format(
            *_slower("a training step that logs 5 keys, ours, shared")
        ),
        "a training step that logs 5 keys, ours, shared",
    ),
    Row(
        "The end of a training after 10,000 rows, over W&B's own",
        lambda: _more("shutdown", "finish_s", "finish: ours", "finish: wandb", "ms", 1000),
        "the end of a training",
    ),
    Row(
        "SIGTERM to the end of the process, with all rows sent",
        lambda: f"{_median('shutdown', 'signal: ours', 'signal_s') * 1000:.0f} ms",
        "SIGTERM to the end",
    ),
    Row(
        "Opening a run after an attempt that left 100 MB of rows, over a new run",
        lambda: _more("opening", "open_ms", "behind 100 MB", "a new run", "ms"),
        "opening a W&B run",
    ),
    Row(
        "`should_stop()`, a call",
        lambda: f"{_median('stopping', 'job', 'in a job, whose board is looked at'):.0f} ns",
        "`should_stop()`",
    ),
    Row(
        "`pulse_s=15`: CPU of a training step",
        lambda: f"{_found('a training step with `pulse_s=15`').partition(' (')[0]} more",
        "a training step with `pulse_s=15`",
    ),
)


# The benchmarks' goals, as a reader understands them.
_AIMS = {
    "15 ms of CPU, 1 MiB; no process, thread, file or vendor": "15 ms, 1 MiB; none of these",
    "20x less CPU": "at least 20 times the first line",
    "1.03x": "at most 3% slower",
    "1.0x": "no slower",
    "at most 1.02x and 1.1x": "the step at most 2% slower",
    "at most 1.03x": "at most 3% slower",
    "at most 2 s, no row lost": "2 s, no row lost",
    "1000 ms": "1 s",
    "200 ns": "200 ns",
    "at most 0.5% slower": "0.5%",
}


def _goal(begin: str) -> Any:
    goals = [goal for path in sorted(FOLDER.glob("*.json")) for goal in _benchmark(path.stem)["goals"]]
    return next(goal for goal in goals if goal["what"].startswith(begin))


def _found(begin: str) -> str:
    return str(_goal(begin)["found"])


def _slower(begin: str) -> list[float]:
    """What a step takes more with this library, and with the vendor's client, as parts of it."""
    return [float(number) - 1 for number in re.findall(r"(?:^|: )([\d.]+)x", _found(begin))]


def table() -> str:
    """The lines of the page."""
    first, *_, last = sorted(_benchmark(path.stem)["about"] for path in FOLDER.glob("*.json"))
    (_, since, rest), until = first.split(" ", 2), last.split(" ")[1]
    dates = since if since == until else f"{since} to {until}"
    lines = [f"Measured {dates}, {rest}", "", "| What it costs | Measured | Goal | |", "|---|---|---|---|"]
    for row in ROWS:
        goal = _goal(row.goal)
        lines.append(
            f"| {row.what} | {row.reads()} | {_AIMS[goal['goal']]} | {'met' if goal['met'] else '**missed**'} |"
        )
    return "\n".join(lines)
