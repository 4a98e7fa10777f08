"""`run.log` on the primary: what a call takes, ours against that of a bare `wandb.Run`.

make bench ROWS=log

Both runs are open in one process and logged to in turn, block by block: what the machine does besides meets both.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESSES = 6
LIMIT = 1.03
OURS, BARE = KINDS = ("ours", "wandb.Run")
# Blocks of each kind, rows of a block, the seconds from one row to the next, and the first `step=`, if they have one.
PHASES: dict[str, tuple[int, int, float, int | None]] = {
    "paced": (20, 10, 0.01, None),
    "paced_step": (20, 10, 0.01, 100_000),
    "fast": (30, 200, 0.0, None),
    "fast_step": (30, 200, 0.0, 200_000),
}
TITLES = {
    "paced": "every 10 ms",
    "paced_step": "every 10 ms, with `step=`",
    "fast": "as fast as it goes",
    "fast_step": "as fast as it goes, with `step=`",
}


# In a rank. The rest of the benchmarks is not there.


def rank() -> None:
    import wandb

    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench")
    def train() -> dict[str, dict[str, float]]:
        with wandb.init(project="bench", reinit="create_new") as bare:
            assert type(bare) is wandb.Run is not type(get_run())
            return in_blocks({OURS: get_run(), BARE: bare})

    Path("figures.json").write_text(json.dumps(train()))


def in_blocks(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {kind: {} for kind in runs}
    log_block(runs, found, "warm", 2, 10, 0.01, None)  # what the first rows load is the start's
    for phase, of_phase in PHASES.items():
        log_block(runs, found, phase, *of_phase)
    return found


def log_block(
    runs: dict[str, Any],
    found: dict[str, dict[str, float]],
    phase: str,
    blocks: int,
    rows: int,
    pace_s: float,
    first_step: int | None,
) -> None:
    taken: dict[str, list[float]] = {kind: [] for kind in runs}
    for block in range(blocks):
        for kind in runs if block % 2 else reversed(runs):
            calls = []
            for n in range(rows):
                more: dict[str, Any] = {} if first_step is None else {"step": first_step + block * rows + n}
                calls.append(timed(runs[kind].log, n, more))
                time.sleep(pace_s)
            began = time.perf_counter()
            _ = runs[kind].step  # wandb-core answers when it has all rows: what a call leaves to a thread counts too
            rest = 0.0 if pace_s else (time.perf_counter() - began) * 1e6 / rows
            taken[kind] += [call + rest for call in calls]
    for kind, values in taken.items():
        found[kind][f"{phase}_median"] = statistics.median(values)
        found[kind][f"{phase}_p99"] = statistics.quantiles(values, n=100)[98]


def timed(log: Callable[..., object], n: int, more: dict[str, Any]) -> float:
    row = {"n": n, "loss": 1 / (n + 1), "accuracy": n / 1000, "lr": 3e-4, "norm": 0.5}
    began = time.perf_counter()
    log(row, **more)
    return (time.perf_counter() - began) * 1e6


# In the one who measures


def main() -> None:
    import peers
    from child import measured
    from paired import Goal, Quantity, Result, median, publish, ratio, table
    from support.wandb_server import WandbServer

    python = peers.python("wandb")
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    for _ in range(PROCESSES):
        with WandbServer() as server:
            of_both: dict[str, Any] = measured(python, __file__, "rank", variables=server.environment)
        for kind in KINDS:
            found[kind].append(of_both[kind])
    quantities = [
        Quantity(f"{phase}_{which}", f"{title}: {which}, us", "{:.0f}")
        for phase, title in TITLES.items()
        for which in ("median", "p99")
    ]
    goals = []
    for phase, title in TITLES.items():
        key = f"{phase}_median"
        of_medians, of_pairs = median(found, OURS, key) / median(found, BARE, key), ratio(found, key, OURS, BARE)
        times = f"{of_medians:.3f}x (ratio of the medians), {of_pairs:.3f}x (median of the processes' ratios)"
        goals.append(Goal(f"`log` {title}, against {BARE}.log", "1.0x", times, of_pairs <= LIMIT))
    text = f"{PROCESSES} processes, each with both.\n\n{table('one `log` of 5 keys', quantities, found)}"
    publish("log", Result(text, goals, found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank()
    else:
        main()
