"""What it takes to plan jobs of many ranks, and to simulate them in one process, in each mode and scope.

Each round is a fresh interpreter for all plans, and one for each simulation, whose peak memory is its own.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

KINDS = [(mode, scope) for mode in ("auto", "shared", "new") for scope in ("global", "worker")]
PLANNED, SIMULATED, PER_NODE = (1_000, 10_000, 100_000), (64, 1_024, 8_192), 8
PLAN_ROUNDS, SIMULATION_ROUNDS = 5, 3
MOST_PLAN_S, MOST_SIMULATION_S, MOST_EXPONENT = 1.0, 10.0, 1.15


# In a fresh interpreter


def plan_all() -> None:
    """Print the seconds that all plans of a job take, by kind and number of ranks."""
    from flyteplugins_tracking import plan
    from flyteplugins_tracking._rank.info import iter_ranks

    found = {}
    for ranks in PLANNED:
        infos = list(iter_ranks([PER_NODE] * (ranks // PER_NODE)))
        for mode, scope in KINDS:
            began = time.perf_counter()
            for info in infos:
                plan(info, mode, scope, "job")
            found[key(mode, scope, ranks)] = time.perf_counter() - began
    print(json.dumps(found))


def simulate_one(mode: str, scope: str, ranks: int) -> None:
    """Print the seconds that one simulation takes, and the MiB that it adds to the interpreter's peak."""
    from flyteplugins_tracking import get_run, tracking_init
    from flyteplugins_tracking.testing import simulate

    @tracking_init(project="bench", run_mode=mode, rank_scope=scope)
    def train() -> None:
        run = get_run()
        if run is not None:
            run.log({"loss": 1.0})

    simulate(train, 1, 2)
    before = peak_mib()
    began = time.perf_counter()
    simulation = simulate(train, ranks // PER_NODE, PER_NODE)
    seconds = time.perf_counter() - began
    rows = sum(len(run.rows) for run in simulation.runs)
    assert rows == (ranks if mode != "auto" else 1 if scope == "global" else ranks // PER_NODE)
    print(json.dumps({"s": seconds, "mib": peak_mib() - before}))


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# In the one who measures


def key(mode: str, scope: str, ranks: int) -> str:
    return f"{mode} {scope} {ranks}"


def child(python: Path, *arguments: str) -> dict[str, float]:
    command = [python, __file__, *arguments]
    done = subprocess.run(command, env={}, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def simulations(python: Path) -> dict[str, float]:
    """The seconds and MiB of one simulation of each kind and size."""
    found = {}
    for mode, scope in KINDS:
        for ranks in SIMULATED:
            one = child(python, "simulate", mode, scope, str(ranks))
            found |= {f"{key(mode, scope, ranks)} {name}": value for name, value in one.items()}
    return found


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def exponent(small: float, large: float, sizes: Sequence[int]) -> float:
    """1 where what it takes is proportional to the number of ranks, from the second size to the last."""
    return math.log(large / small) / math.log(sizes[-1] / sizes[-2])


def exponents(found: Mapping[str, float], sizes: Sequence[int], unit: str = "") -> list[float]:
    return [exponent(*(found[key(*kind, ranks) + unit] for ranks in sizes[-2:]), sizes) for kind in KINDS]


def plan_table(found: Mapping[str, float]) -> str:
    heads = " | ".join(f"{ranks:,} ranks, ms | us a rank" for ranks in PLANNED)
    lines = [f"| `plan()` | {heads} |", f"|---|{'---:|' * 2 * len(PLANNED)}"]
    for mode, scope in KINDS:
        seconds = [(found[key(mode, scope, ranks)], ranks) for ranks in PLANNED]
        cells = " | ".join(f"{s * 1e3:.1f} | {s / ranks * 1e6:.2f}" for s, ranks in seconds)
        lines.append(f"| {mode}, {scope} | {cells} |")
    return "\n".join(lines)


def simulation_table(found: Mapping[str, float]) -> str:
    heads = " | ".join(f"{ranks:,} ranks, s | us a rank | MiB" for ranks in SIMULATED)
    lines = [f"| `simulate` | {heads} |", f"|---|{'---:|' * 3 * len(SIMULATED)}"]
    for mode, scope in KINDS:
        taken = [(found[f"{key(mode, scope, n)} s"], found[f"{key(mode, scope, n)} mib"], n) for n in SIMULATED]
        cells = " | ".join(f"{s:.2f} | {s / ranks * 1e6:.0f} | {mib:.1f}" for s, mib, ranks in taken)
        lines.append(f"| {mode}, {scope} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    import paired
    import peers

    python = peers.python("wandb")
    planned = [child(python, "plan") for _ in range(PLAN_ROUNDS)]
    simulated = [simulations(python) for _ in range(SIMULATION_ROUNDS)]
    plans, runs = medians(planned), medians(simulated)
    slowest = max(plans[key(*kind, PLANNED[-1])] for kind in KINDS)
    longest = max(runs[f"{key(*kind, SIMULATED[-1])} s"] for kind in KINDS)
    steepest = max(*exponents(plans, PLANNED), *exponents(runs, SIMULATED, " s"))
    text = (
        f"{plan_table(plans)}\n\n{simulation_table(runs)}\n\n"
        f"Medians of {PLAN_ROUNDS} and {SIMULATION_ROUNDS} rounds. Between the last two sizes time grows as the number "
        f"of ranks to the power of {', '.join(f'{one:.2f}' for one in exponents(plans, PLANNED))} (`plan()`, from the "
        f"first line to the last) and {', '.join(f'{one:.2f}' for one in exponents(runs, SIMULATED, ' s'))} "
        "(`simulate`)."
    )
    goals = [
        paired.Goal(
            f"`plan()` for {PLANNED[-1]:,} ranks, in the slowest mode and scope",
            f"at most {MOST_PLAN_S:.0f} s",
            f"{slowest:.2f} s",
            slowest <= MOST_PLAN_S,
        ),
        paired.Goal(
            f"`simulate` of {SIMULATED[-1]:,} ranks, in the slowest mode and scope",
            f"at most {MOST_SIMULATION_S:.0f} s",
            f"{longest:.1f} s",
            longest <= MOST_SIMULATION_S,
        ),
        paired.Goal(
            "both, as the ranks become more",
            f"linear: to the power of at most {MOST_EXPONENT}",
            f"{steepest:.2f}",
            steepest <= MOST_EXPONENT,
        ),
    ]
    paired.publish("planning", paired.Result(text, goals, {"plan": planned, "simulate": simulated}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        plan_all()
    elif sys.argv[1:2] == ["simulate"]:
        simulate_one(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
