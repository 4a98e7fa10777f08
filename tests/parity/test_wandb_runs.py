"""A program that works with W&B's bare client works under the decorator, and leaves the same: shown by a table.

A run that differs is a fault, and so is a difference in `differences.py` that no program meets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import include
import pytest

from parity.compare import Kinds, check, wandb_sides
from parity.differences import DIFFERENCES, table
from parity.table import TABLES, table_of

GUARANTEES = Path(__file__).parents[2] / "docs" / "about" / "matrix.md"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Kinds(lambda: stack.enter_context(wandb_sides(tmp_path_factory.mktemp("kind"))))


@pytest.mark.sampled_full(1)
@pytest.mark.parametrize("kind", ["log", "more rows", "use", "open", "config"])
def test_a_run_has_what_the_bare_client_gives_it(kinds, kind, subtests):
    for program in table_of("wandb").of(kind):
        with subtests.test(program.name):
            check(kinds[kind], program)


def test_the_docs_have_the_list_of_differences():
    text = GUARANTEES.read_text()
    assert table() in text
    assert include.with_files(text) == text


def test_each_difference_is_met_by_a_program():
    met = {program.differs for tracker in TABLES for program in table_of(tracker).programs.values()}
    assert met - {""} == {*DIFFERENCES}
