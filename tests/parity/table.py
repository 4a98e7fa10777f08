"""The table of parity: what a program of it is, and how a module writes its own down."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Body = Callable[[Any], Any]


@dataclass(frozen=True)
class Program:
    """What a training script does with its run, without the lines that open and end it.

    Attributes:
        kind: Programs of one kind run one after another in one process. Those of "end" have a process each.
        name: The name, and the run's id.
        body: Gets the run. What it returns or raises is compared too.
        options: Returns arguments of the vendor's opening, which are in the same words those of `tracking_init`.
        differs: The key of the difference that is wanted, in `differences.py`; empty for none.
        is_full: Whether only `make test-wide` runs it.
    """

    kind: str
    name: str
    body: Body
    options: Callable[[], Mapping[str, Any]] = dict
    differs: str = ""
    is_full: bool = False


class Table:
    """The programs of one tracker, in the order in which they are written down."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def program(
        self,
        kind: str,
        differs: str = "",
        is_full: bool = False,
        options: Callable[[], Mapping[str, Any]] = dict,
    ) -> Callable[[Body], Body]:
        """Add the decorated function."""

        def add(body: Body) -> Body:
            self.add(Program(kind, body.__name__, body, options, differs, is_full))
            return body

        return add

    def add(self, program: Program) -> None:
        assert program.name not in self.programs, f"two programs are named {program.name}"
        self.programs[program.name] = program

    def of(self, kind: str) -> list[Program]:
        return [program for program in self.programs.values() if program.kind == kind]


TABLES = {name: Table() for name in ("wandb", "mlflow", "trackio", "pluto")}


def table_of(tracker: str) -> Table:
    """The tracker's programs. Those with W&B are in modules that import it."""
    for module in ("of_wandb", "wandb_ends") if tracker == "wandb" else ("of_others",):
        importlib.import_module(f"parity.{module}")
    return TABLES[tracker]


def refusal(act: Callable[[], object]) -> str:
    """The type of what `act` raises."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "accepted"
