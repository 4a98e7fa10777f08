"""Importing the package, after torch and in a bare interpreter: its CPU time and what it loads. And others, for scale.

make bench ROWS=import_time
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peers
from child import measured
from paired import Figures, Found, Goal, Result, in_turn, median, publish

PAIRS = 7
TORCH = "import torch, torch.distributed"
SCRIPT = """\
{before}
import sys, time
loaded, began = set(sys.modules), time.process_time()
{statement}
ms, new = (time.process_time() - began) * 1e3, set(sys.modules) - loaded
own = {{"flyteplugins_tracking", *sys.stdlib_module_names}}
foreign = sum(name.partition(".")[0] not in own for name in new)
open("figures.json", "w").write('{{"ms": %f, "modules": %d, "foreign": %d}}' % (ms, len(new), foreign))
"""


@dataclass(frozen=True)
class Import:
    """A statement, what was imported before it, the environment, and the CPU time that it may take, if it is ours."""

    statement: str
    before: str
    environment: str
    limit_ms: float | None = None

    @property
    def title(self) -> str:
        return f"`{self.statement}`, {'torch imported' if self.before else 'bare interpreter'}"


NAMES, ALL = "from flyteplugins_tracking import tracking_init, get_run", "from flyteplugins_tracking import *"
IMPORTS = (
    Import(NAMES, TORCH, "flyteplugins-wandb", 15),
    Import(ALL, TORCH, "flyteplugins-wandb"),
    Import("import wandb", TORCH, "flyteplugins-wandb"),
    Import("import flyteplugins.wandb", TORCH, "flyteplugins-wandb"),
    Import("import flytekitplugins.wandb", TORCH, "flytekitplugins-wandb"),
    Import(NAMES, "", "wandb", 40),
    Import(ALL, "", "wandb"),
    Import("import wandb", "", "wandb"),
)


def measure(python: Path, one: Import) -> Figures:
    return measured(python, "-c", SCRIPT.format(before=one.before, statement=one.statement))


def main() -> None:
    pythons = {environment: peers.python(environment) for environment in dict.fromkeys(i.environment for i in IMPORTS)}
    by_title = {one.title: one for one in IMPORTS}
    for one in IMPORTS:
        measure(pythons[one.environment], one)  # into the file cache
    found = in_turn(list(by_title), lambda title: measure(pythons[by_title[title].environment], by_title[title]), PAIRS)
    goals = [
        Goal(
            title,
            f"{one.limit_ms:.0f} ms of CPU, standard library only",
            f"{median(found, title, 'ms'):.1f} ms, {median(found, title, 'foreign'):.0f} other modules",
            median(found, title, "ms") <= one.limit_ms and not median(found, title, "foreign"),
        )
        for title, one in by_title.items()
        if one.limit_ms is not None
    ]
    publish("import_time", Result(f"{PAIRS} turns.\n\n{lines(found)}", goals, found))


def lines(found: Found) -> str:
    """A line for each statement: what is compared are these, and not one with another."""
    heads = ["| | CPU, ms | modules that it loads | neither its own nor the standard library's |"]
    shown = []
    for title, every in found.items():
        ms = [one["ms"] for one in every]
        counts = " | ".join(f"{median(found, title, key):.0f}" for key in ("modules", "foreign"))
        shown.append(f"| {title} | {median(found, title, 'ms'):.1f} ({min(ms):.1f}-{max(ms):.1f}) | {counts} |")
    return "\n".join([*heads, "|---|---:|---:|---:|", *shown])


if __name__ == "__main__":
    main()
