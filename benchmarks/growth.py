"""How processes, connections and bytes grow with a job: measured on one node, and simulated on many; with a plot."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paired import FIGURES, Figures, Found, Quantity, Result, in_turn, median, publish, table
from shared_node import interpreter, measure

PLOT = FIGURES / "growth.svg"
KINDS = {"auto": "auto", "ours": "shared"}
ON_A_NODE, ROUNDS = (1, 2, 4, 8), 2
# Ranks of a node, and nodes.
NODE, NODES = 8, (8, 128, 1024)
PACED = 100

QUANTITIES = (
    Quantity("helpers", "helper processes", "{:.0f}"),
    Quantity("connections", "connections to the service", "{:.0f}"),
    Quantity("helpers_rank", "helper processes a rank", "{:.2f}"),
    Quantity("connections_rank", "connections a rank", "{:.2f}"),
    Quantity("helpers_pss_rank", "helpers' memory a rank, PSS, MiB", "{:.1f}"),
    Quantity("all_pss_rank", "memory a rank, PSS, with its own process, MiB", "{:.0f}"),
)


# In a process of its own


def simulated(run_mode: Any, rank_scope: Any, nodes: int) -> dict[str, Any]:
    """One simulated job, in which each rank logs a row: a second time for its memory, which takes longer."""
    from flyteplugins_tracking import get_run, tracking_init
    from flyteplugins_tracking.testing import simulate

    @tracking_init(project="bench", run_mode=run_mode, rank_scope=rank_scope)
    def train() -> None:
        run = get_run()
        if run is not None:
            run.log({"loss": 1.0})

    began = time.perf_counter()
    runs = simulate(train, nodes, NODE).runs
    seconds = time.perf_counter() - began
    clients = sum(len(run.ranks) for run in runs)
    kept = len(runs)
    del runs
    tracemalloc.start()
    simulate(train, nodes, NODE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ranks = nodes * NODE
    what = {"mode": run_mode, "scope": rank_scope, "ranks": ranks, "runs": kept, "clients": clients}
    return {**what, "seconds": seconds, "bytes_rank": peak / ranks}


def simulate_all() -> None:
    jobs = itertools.product(("auto", "shared", "new"), ("global", "worker"), NODES)
    print(json.dumps([simulated(*job) for job in jobs]))


# In the one who measures


def on_a_node(kind: str, ranks: int) -> Figures:
    found = measure(kind, ranks, paced=PACED, fast=0)
    kept = {key: found[key] for key in ("helpers", "connections")}
    a_rank = {f"{key}_rank": value / ranks for key, value in kept.items()}
    memory = {"helpers_pss_rank": found["paced_pss"] / ranks, "all_pss_rank": found["all_pss"] / ranks}
    return {**kept, **a_rank, **memory}


def on_many() -> list[dict[str, Any]]:
    command = [str(interpreter()), __file__, "simulate"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True, env={"PYTHONPATH": ""})
    simulated: list[dict[str, Any]] = json.loads(done.stdout)
    return simulated


def table_of(jobs: Sequence[Mapping[str, Any]]) -> str:
    heads = "mode | scope | ranks | runs | wandb-cores, and connections | to simulate, s | its memory a rank, KiB"
    lines = [f"| {heads} |", "|---|---|---:|---:|---:|---:|---:|"]
    for job in jobs:
        sizes = f"{job['ranks']:,} | {job['runs']:,} | {job['clients']:,}"
        cost = f"{job['seconds']:.2f} | {job['bytes_rank'] / 1024:.1f}"
        lines.append(f"| {job['mode']} | {job['scope']} | {sizes} | {cost} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Panel:
    """One plot over the number of ranks: what a rank takes."""

    title: str
    key: str
    clients: int | None  # how many of these a client comes with, for jobs that are simulated; None: not known there


PANELS = (
    Panel("helper processes a rank", "helpers_rank", 2),
    Panel("connections a rank", "connections_rank", 1),
    Panel("memory a rank (PSS), MiB", "all_pss_rank", None),
)
COLOURS = {"auto": "#0072b2", "ours": "#d55e00"}
MARKS = {"auto": "o", "ours": "^"}


def plot(by_ranks: Mapping[int, Found], jobs: Sequence[Mapping[str, Any]]) -> None:
    """Draw it, the same file for the same figures. White, so that it can be read on a dark page."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 3.6), layout="constrained")
    for panel, axis in zip(PANELS, axes, strict=True):
        for kind in KINDS:
            _line(axis, panel, kind, by_ranks, jobs)
        axis.set(title=panel.title, xlabel="ranks", xscale="log")
        many = () if panel.clients is None else [NODE * nodes for nodes in NODES]
        ticks = [*ON_A_NODE, *many]
        axis.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
        if panel.clients is None:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(PLOT, metadata={"Date": None, "Creator": None}, facecolor="white")
    # Its lines end in blanks, which a check of the text would not have.
    PLOT.write_text("\n".join(line.rstrip() for line in PLOT.read_text().splitlines()) + "\n")


def _line(axis: Any, panel: Panel, kind: str, by_ranks: Mapping[int, Found], jobs: Sequence[Mapping[str, Any]]) -> None:
    """Measured: filled marks; and simulated: hollow ones, on a dashed line."""
    colour, mark = COLOURS[kind], MARKS[kind]
    measured = [(ranks, median(found, kind, panel.key)) for ranks, found in by_ranks.items()]
    axis.plot(*zip(*measured, strict=True), color=colour, marker=mark, label=KINDS[kind])
    if panel.clients is None:
        return
    many = [
        (job["ranks"], job["clients"] * panel.clients / job["ranks"])
        for job in jobs
        if (job["mode"], job["scope"]) == (KINDS[kind], "global")
    ]
    axis.plot(
        *zip(measured[-1], *many, strict=True), color=colour, marker=mark, linestyle="--", markerfacecolor="white"
    )
    axis.plot(*measured[-1], color=colour, marker=mark)


def main() -> None:
    by_ranks = {ranks: in_turn(tuple(KINDS), functools.partial(on_a_node, ranks=ranks), ROUNDS) for ranks in ON_A_NODE}
    jobs = on_many()
    plot(by_ranks, jobs)
    tables = [table(f"{ranks} on a node", QUANTITIES, found) for ranks, found in by_ranks.items()]
    figures = {f"{kind}, {ranks} ranks": one for ranks, found in by_ranks.items() for kind, one in found.items()}
    figures["simulated"] = jobs
    publish("growth", Result("\n\n".join([*tables, table_of(jobs)]), [], figures))


if __name__ == "__main__":
    simulate_all() if sys.argv[1:] else main()
