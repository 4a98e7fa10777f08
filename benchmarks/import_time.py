"""Importing the package, in a fresh interpreter: how long it takes, and what it loads. And the vendor's, for scale.

make bench ROWS=import_time
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import peers
from child import alone
from paired import Figures, Found, Goal, Result, in_turn, median, publish

PAIRS = 9
OURS, NAMES = "import flyteplugins_tracking", "from flyteplugins_tracking import tracking_init, get_run"
# Each with the environment that it is measured in.
STATEMENTS = {
    NAMES: "wandb",
    OURS: "wandb",
    "import wandb": "wandb",
    "import flyteplugins.wandb": "flyteplugins-wandb",
    "import flytekitplugins.wandb": "flytekitplugins-wandb",
}
LIMIT_MS = 15


def measure(python: Path, statement: str) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [python, "-X", "importtime", "-c", f"{statement}; import sys; print(*sys.modules)"],
            cwd=name,
            env=alone(Path(name), {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    # Each line has a module's own microseconds, those with what it imports, and its name; `site` is the interpreter's.
    lines = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if line.count("|") == 2]
    names = [name.strip() for _, _, name in lines]
    after_start = names.index("site") + 1
    # Without those that were looked for and are not there: `copy` asks for one of Jython's.
    loaded = {*names[after_start:]}.intersection(done.stdout.split())
    own = statement.split()[1].partition(".")[0]
    foreign = [name for name in loaded if name.partition(".")[0] not in {own, *sys.stdlib_module_names}]
    ms = sum(int(microseconds) for microseconds, _, _ in lines[after_start:]) / 1e3
    return {"ms": ms, "modules": len(loaded), "foreign": len(foreign)}


def main() -> None:
    pythons = {environment: peers.python(environment) for environment in dict.fromkeys(STATEMENTS.values())}
    kinds = list(STATEMENTS)
    for statement, environment in STATEMENTS.items():
        measure(pythons[environment], statement)  # into the file cache
    found = in_turn(kinds, lambda statement: measure(pythons[STATEMENTS[statement]], statement), PAIRS)
    goals = [
        Goal(
            f"`{statement}`",
            f"{LIMIT_MS} ms, standard library only",
            f"{median(found, statement, 'ms'):.1f} ms, {median(found, statement, 'foreign'):.0f} other modules",
            median(found, statement, "ms") <= LIMIT_MS and not median(found, statement, "foreign"),
        )
        for statement in (OURS, NAMES)
    ]
    publish("import_time", Result(f"{PAIRS} turns.\n\n{lines(found)}", goals, found))


def lines(found: Found) -> str:
    """A line for each statement: what is compared are these, and not one with another."""
    heads = ["| a fresh interpreter | ms | modules that it loads | neither its own nor the standard library's |"]
    shown = []
    for statement, every in found.items():
        ms = [one["ms"] for one in every]
        counts = " | ".join(f"{median(found, statement, key):.0f}" for key in ("modules", "foreign"))
        shown.append(
            f"| `{statement}` | {median(found, statement, 'ms'):.1f} ({min(ms):.1f}-{max(ms):.1f}) | {counts} |"
        )
    return "\n".join([*heads, "|---|---:|---:|---:|", *shown])


if __name__ == "__main__":
    main()
