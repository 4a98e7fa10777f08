"""Run the programs of the table both ways, and compare what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import jobs
from support.wandb_server import WandbServer

from parity import seen
from parity.differences import DIFFERENCES, EVERYWHERE
from parity.table import Program

TESTS = Path(__file__).parents[1]
WAYS = ("bare", "decorated")


@dataclass
class Side:
    """One of the two ways, and what came of it.

    Attributes:
        runs: Returns what the service has of a program's runs.
        faults: Returns what the service could not answer.
        codes: The processes' exit codes, by the program's name.
    """

    how: str
    tracker: str
    directory: Path
    environment: Mapping[str, str]
    runs: Callable[[str], list[seen.Seen]]
    faults: Callable[[], list[Any]] = list
    codes: dict[str, int] = field(default_factory=dict)

    def start(self, kind: str, name: str = "", launcher: Sequence[str] = (sys.executable,)) -> jobs.Process:
        words = [*launcher, "-m", "parity", self.tracker, self.how, kind, *([name] if name else [])]
        others = [self.environment["PYTHONPATH"]] if "PYTHONPATH" in self.environment else []
        path = os.pathsep.join([*others, jobs.search_path(TESTS)])
        return jobs.start(words, self.directory, {**self.environment, "PYTHONPATH": path})

    def seen(self, program: Program) -> seen.Seen:
        """What is left of a program."""
        runs = self.runs(program.name)
        answers = {path.name: json.loads(path.read_text()) for path in self.directory.glob(f"{program.name}*.json")}
        return {
            **(runs[0] if runs else {}),
            "runs": len(runs),
            "answers": answers,
            "process": self.codes.get(program.name),
        }


Sides = Sequence[Side]


@contextlib.contextmanager
def wandb_sides(directory: Path) -> Iterator[Sides]:
    """A W&B server for each way."""
    with WandbServer() as first, WandbServer() as second:
        yield [
            Side(
                how,
                "wandb",
                directory / how,
                server.environment,
                lambda name, server=server: [seen.wandb(run) for run in server.runs if run.id == name],
                lambda server=server: [*server.errors, *server.unknown_operations],
            )
            for how, server in zip(WAYS, (first, second), strict=True)
        ]


def run_both(sides: Sides, kind: str, name: str = "", **options: Any) -> None:
    """Run the programs of a kind, or the one named, both ways together."""
    processes = [side.start(kind, name, **options) for side in sides]
    for side, process in zip(sides, processes, strict=True):
        done = jobs.finish(process, side.directory)
        side.codes[name] = done.returncode
        assert name or done.returncode == 0, f"{side.how}: {done.output}"
        assert side.faults() == [], done.output


def check(sides: Sides, program: Program, by_chance: str = "") -> None:
    """Compare what a program has left: it differs where that is wanted, and there it does.

    Args:
        sides: Both ways.
        program: The program.
        by_chance: A regular expression for what may or may not be there, with the bare client too.
    """
    ignored = [*(one.where for one in EVERYWHERE.values()), by_chance]
    found = {
        where: pair
        for where, pair in seen.differences(*(side.seen(program) for side in sides)).items()
        if not any(re.fullmatch(one, where) for one in ignored)
    }
    wanted = DIFFERENCES.get(program.differs)
    unwanted = {where: pair for where, pair in found.items() if not (wanted and re.fullmatch(wanted.where, where))}
    told = [
        f"{where}: with the bare client {pair[0]!r:.500}, with the decorator {pair[1]!r:.500}"
        for where, pair in unwanted.items()
    ]
    assert not told, "\n".join(told)
    assert bool(found) == bool(wanted), f"{program.differs!r} is wanted, and no difference is there"
