"""The start of a run: from the start of the process to its first `log`, ours against that of `wandb.init`.

make bench ROWS=primary_start
"""

from __future__ import annotations

import functools
from pathlib import Path

import peers
from child import measured, rank_of_eight
from paired import Figures, Found, Goal, Quantity, Result, in_turn, median, publish, ratio, table
from support.wandb_server import WandbServer

PAIRS = 12
OURS, QUIET, BARE = KINDS = ("ours", "wandb.init without its reports", "wandb.init")
# Ours keeps wandb from loading OpenTelemetry and sending reports on itself: the goal is against one that does so too.
VARIABLES = {OURS: {}, QUIET: {"WANDB_ERROR_REPORTING": "false"}, BARE: {}}
LIMIT = 1.03
# Texts and no modules of the benchmarks: a child imports what its script does, and nothing else. Both import wandb
# first, so that its part can be told.
BEFORE = """\
import time
times = [time.time()]
import wandb
times.append(time.time())
"""
BARE_SCRIPT = """\
times.append(time.time())
with wandb.init({arguments}) as run:
    times.append(time.time())
    run.log({{"loss": 1.0}})
    times.append(time.time())
"""
SCRIPTS = {
    QUIET: BARE_SCRIPT,
    BARE: BARE_SCRIPT,
    OURS: """\
from flyteplugins_tracking import get_run, tracking_init
times.append(time.time())
@tracking_init({arguments})
def train():
    times.append(time.time())
    get_run().log({{"loss": 1.0}})
    times.append(time.time())
train()
""",
}
AFTER = """
import json, os
open("figures.json", "w").write(json.dumps(dict(enumerate([float(os.environ["STARTED"]), *times]))))
"""
PARTS = ("python", "wandb", "own", "open", "log")
QUANTITIES = (
    Quantity("total", "process start to the first `log`, ms", "{:.0f}"),
    Quantity("python", "of it: the interpreter's start", "{:.0f}"),
    Quantity("wandb", "of it: `import wandb`", "{:.0f}"),
    Quantity("own", "of it: importing the package"),
    Quantity("open", "of it: opening the run", "{:.0f}"),
    Quantity("log", "of it: `log`"),
    Quantity("cpu", "CPU to the process's end, with its helpers', ms", "{:.0f}"),
)


def measure(python: Path, job: dict[str, str], arguments: dict[str, str], kind: str) -> Figures:
    script = BEFORE + SCRIPTS[kind].format(arguments=arguments[kind]) + AFTER
    with WandbServer() as server:
        found = measured(python, "-c", script, variables={**server.environment, **job, **VARIABLES[kind]})
    times = [found[str(n)] * 1e3 for n in range(len(PARTS) + 1)]
    # What is not there shall be 0.
    parts = {part: round(until - since, 1) for part, since, until in zip(PARTS, times, times[1:], strict=False)}
    return {**parts, "total": times[-1] - times[0], "cpu": found["cpu_s"] * 1e3}


def goal(what: str, found: Found) -> Goal:
    of_medians, of_pairs = (
        median(found, OURS, "total") / median(found, QUIET, "total"),
        ratio(found, "total", OURS, QUIET),
    )
    return Goal(
        f"the primary's start, {what}, against {QUIET}",
        f"{LIMIT}x",
        f"{of_medians:.3f}x (ratio of the medians), {of_pairs:.3f}x (median of the pairs' ratios)",
        of_medians <= LIMIT,
    )


def main() -> None:
    python = peers.python("wandb")
    plain = dict.fromkeys(KINDS, 'project="bench"')
    # With an id, since ranks without one agree on one. Ours goes on with the run that has it, and so shall the other.
    named = {**dict.fromkeys(KINDS, 'project="bench", id="bench", resume="allow"'), OURS: 'project="bench", id="bench"'}
    results = {}
    for what, job, arguments in (("one process", {}, plain), ("rank 0 of 8", rank_of_eight(0), named)):
        measure_one = functools.partial(measure, python, job, arguments)
        for kind in KINDS:
            measure_one(kind)  # into the file cache
        results[what] = in_turn(KINDS, measure_one, PAIRS)
    tables = [table(what, QUANTITIES, found) for what, found in results.items()]
    figures = {f"{what}, {kind}": found[kind] for what, found in results.items() for kind in KINDS}
    publish(
        "primary_start",
        Result("\n\n".join([f"{PAIRS} pairs each.", *tables]), [goal(*one) for one in results.items()], figures),
    )


if __name__ == "__main__":
    main()
