"""The ledger of the package's weight: `tests/weights.csv`. Growth is decided, not found out later."""

from __future__ import annotations

import ast
import csv
import functools
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from support.jobs import PACKAGE

LEDGER = Path(__file__).parent.parent / "weights.csv"
ROOT = PACKAGE.parent
# How far a room may be above its entry: room for a mend, and none for a mechanism.
LINES, WORDS = 20, 300


def lines_of_code(source: str) -> int:
    """The lines that have code: no blank lines, comments and docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docs for number, line in lines)


def room_of(path: Path) -> str:
    """The folder or file below the package. Each tracker's folder is a room of its own."""
    parts = path.relative_to(PACKAGE).parts
    return "/".join(parts[:2]) if parts[0] == "trackers" and len(parts) > 2 else parts[0]


@functools.cache
def weighed() -> Counter[str]:
    """The lines of code of each room, and the words of the README and the docs."""
    weights: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        weights[room_of(path)] += lines_of_code(path.read_text())
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    weights["docs (words)"] = sum(len(page.read_text().split()) for page in pages)
    return weights


def ledger() -> dict[str, list[tuple[int, str]]]:
    """The entries of each room: its weight, and then what it was raised by, with for whom."""
    entries: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    with LEDGER.open(newline="") as file:
        for row in csv.DictReader(file):
            entries[row["room"]].append((int(row["weight"]), row["for whom"]))
    return dict(entries)


def test_every_room_has_an_entry_and_no_entry_is_without_a_room():
    assert ledger().keys() == weighed().keys()


@pytest.mark.parametrize("room", sorted(ledger()))
def test_no_room_is_heavier_than_its_entry_says(room):
    allowed = sum(weight for weight, _ in ledger()[room])
    most = allowed + (WORDS if "words" in room else LINES)
    assert weighed()[room] <= most, (
        f"{room} has {weighed()[room]}, and its entry says {allowed}. Make it lighter; or add a line with what it is "
        f"raised by, and for whom: which users, how many of 1,000, and what they would lose"
    )


def test_whoever_raises_an_entry_says_for_whom():
    raised = [entry for entries in ledger().values() for entry in entries[1:]]
    assert all(len(for_whom.split()) >= 5 for _, for_whom in raised), raised
