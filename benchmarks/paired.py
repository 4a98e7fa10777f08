"""What every benchmark shares: kinds measured in turn, their medians and ratios, and the files that keep them.

`docs/figures.py` writes the table of docs/about/how-it-works.md from these files.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = Path(__file__).parent / "figures"
ROWS = (
    "inert_rank",
    "import_time",
    "primary_start",
    "get_run",
    "log",
    "opening",
    "shared_node",
    "elastic_node",
    "planning",
    "training_step",
    "shutdown",
    "pulse",
    "node_load",
    "stopping",
    "growth",
)

Figures = dict[str, float]
Found = Mapping[str, Sequence[Figures]]


@dataclass(frozen=True)
class Quantity:
    """One line of a table: the key of a figure, what it is called, with its unit, and how it is written."""

    key: str
    title: str
    form: str = "{:.1f}"


@dataclass(frozen=True)
class Goal:
    """What a row has to reach, and what it has reached, both as text with units."""

    what: str
    goal: str
    found: str
    met: bool


@dataclass
class Result:
    """What a benchmark has found: its tables in Markdown, the goals, and every single figure."""

    text: str
    goals: list[Goal]
    figures: dict[str, list[Figures]] = field(default_factory=dict)


def in_turn(kinds: Sequence[str], measure: Callable[[str], Figures], pairs: int) -> dict[str, list[Figures]]:
    """Measure each kind `pairs` times: A B, B A, A B, so that a drift of the machine meets all of them."""
    found: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for pair in range(pairs):
        for kind in kinds if pair % 2 == 0 else reversed(kinds):
            found[kind].append(measure(kind))
    return found


def median(found: Found, kind: str, key: str) -> float:
    return statistics.median(one[key] for one in found[kind])


def ratio(found: Found, key: str, kind: str, base: str) -> float:
    """The median of the pairs' own ratios of `kind` to `base`."""
    return statistics.median(a[key] / b[key] for a, b in zip(found[kind], found[base], strict=True))


def difference(found: Found, key: str, kind: str, base: str) -> float:
    """The median of the pairs' own differences of `kind` and `base`."""
    return statistics.median(a[key] - b[key] for a, b in zip(found[kind], found[base], strict=True))


def table(title: str, quantities: Sequence[Quantity], found: Found) -> str:
    """Medians with their ranges; and for all kinds but the first one, the ratio of the first one to it."""
    first, *others = found
    heads = [*found, *(f"{first} / {other}" for other in others)]
    lines = [f"| {' | '.join([title, *heads])} |", f"|---|{'---:|' * len(heads)}"]
    for one in quantities:
        values = [[figures[one.key] for figures in found[kind]] for kind in found]
        cells = [f"{_shown(one, statistics.median(v))} ({_shown(one, min(v))}-{_shown(one, max(v))})" for v in values]
        lines.append(f"| {' | '.join([one.title, *cells, *_ratios(found, one.key, first, others)])} |")
    return "\n".join(lines)


def _shown(quantity: Quantity, value: float) -> str:
    return quantity.form.format(value)


def _ratios(found: Found, key: str, first: str, others: Sequence[str]) -> list[str]:
    measurable = [all(one[key] for one in found[other]) for other in others]
    return [
        f"{ratio(found, key, first, other):.2f}" if can else "" for other, can in zip(others, measurable, strict=True)
    ]


def publish(row: str, result: Result) -> None:
    """Keep the figures."""
    import wandb

    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, wandb {wandb.__version__}"
    )
    about = f"Measured {time.strftime('%F')} on {machine}."
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{row}.json").write_text(json.dumps({"about": about, **asdict(result)}, indent=1) + "\n")
    print(result.text, *result.goals, sep="\n", flush=True)
