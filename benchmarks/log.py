"""`run.log` on the primary: what a call takes, ours against that of a bare `wandb.Run`.

make bench ROWS=log
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAIRS = 6
LIMIT = 1.03
OURS, QUIET, BARE = KINDS = ("ours", "wandb without its reports", "wandb")
# Ours keeps wandb from loading OpenTelemetry and sending reports on itself: the goal is against one that does so too.
VARIABLES = {OURS: {}, QUIET: {"WANDB_ERROR_REPORTING": "false"}, BARE: {}}
# Rows of each phase, the seconds from one to the next, and whether they have a `step=`.
PHASES = {
    "paced": (200, 0.01, False),
    "paced_step": (100, 0.01, True),
    "fast": (3000, 0.0, False),
    "fast_step": (3000, 0.0, True),
}
TITLES = {
    "paced": "every 10 ms",
    "paced_step": "every 10 ms, with `step=`",
    "fast": "as fast as it goes",
    "fast_step": "as fast as it goes, with `step=`",
}


# In a rank. The rest of the benchmarks is not there.


def rank(kind: str) -> None:
    if kind == OURS:
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(project="bench")
        def train() -> dict[str, float]:
            return log_rows(get_run().log)

        found = train()
    else:
        import wandb

        with wandb.init(project="bench") as run:
            found = log_rows(run.log)
    Path("figures.json").write_text(json.dumps(found))


def log_rows(log: Callable[..., object]) -> dict[str, float]:
    for n in range(20):  # what the first ones load is the start's
        log({"warm": n})
        time.sleep(0.01)
    found = {}
    step = 100_000
    for phase, (rows, pace_s, has_step) in PHASES.items():
        taken = []
        for n in range(rows):
            step += 1
            more: dict[str, Any] = {"step": step} if has_step else {}
            row = {"n": n, "loss": 1 / (n + 1), "accuracy": n / rows, "lr": 3e-4, "norm": 0.5}
            began = time.perf_counter()
            log(row, **more)
            taken.append((time.perf_counter() - began) * 1e6)
            if pace_s:
                time.sleep(pace_s)
        found |= {f"{phase}_median": statistics.median(taken), f"{phase}_p99": statistics.quantiles(taken, n=100)[98]}
    return found


# In the one who measures


def main() -> None:
    import peers
    from child import measured
    from paired import Figures, Goal, Quantity, Result, in_turn, median, publish, ratio, table
    from support.wandb_server import WandbServer

    python = peers.python("wandb")

    def measure(kind: str) -> Figures:
        with WandbServer() as server:
            return measured(python, __file__, "rank", kind, variables={**server.environment, **VARIABLES[kind]})

    measure(QUIET)  # into the file cache
    found = in_turn(KINDS, measure, PAIRS)
    figures = [
        (f"{phase}_{which}", f"{title}: {which}, us") for phase, title in TITLES.items() for which in ("median", "p99")
    ]
    goals = []
    for phase, title in TITLES.items():
        key = f"{phase}_median"
        of_medians = median(found, OURS, key) / median(found, QUIET, key)
        of_pairs = ratio(found, key, OURS, QUIET)
        times = f"{of_medians:.3f}x (ratio of the medians), {of_pairs:.3f}x (median of the pairs' ratios)"
        goals.append(Goal(f"`log` {title}, against {QUIET}", "1.0x", times, of_medians <= LIMIT))
    publish(
        "log",
        Result(
            f"{PAIRS} pairs.\n\n"
            + table("one `log` of 5 keys", [Quantity(key, title, "{:.0f}") for key, title in figures], found),
            goals,
            found,
        ),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2])
    else:
        main()
