"""A program that works with W&B's bare client works under the decorator, and leaves the same: shown by a table.

A run that differs is a fault, and so is a difference in `differences.py` that no program meets.
"""

from __future__ import annotations

from pathlib import Path

import include
import pytest
from support import jobs

from parity.compare import check, run_both, wandb_sides
from parity.differences import DIFFERENCES, table
from parity.table import TABLES, table_of

PAGE = Path(__file__).parents[2] / "docs" / "about" / "matrix.md"
TORCHRUN = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
# Their process is gone at once: wandb-core may or may not have sent the last summary.
CUT_SHORT = ("sigkill", "os_exit")


@pytest.mark.sampled_full(1)
@pytest.mark.parametrize("kind", ["log", "more rows", "use", "open", "config"])
def test_a_run_has_what_the_bare_client_gives_it(tmp_path, kind, subtests):
    with wandb_sides(tmp_path) as sides:
        run_both(sides, kind)
        for program in table_of("wandb").of(kind):
            with subtests.test(program.name):
                check(sides, program)


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_a_run_ends_as_with_the_bare_client(tmp_path, is_full, subtests):
    """Each is a process, and the run says how it ended."""
    with wandb_sides(tmp_path) as sides:
        for program in table_of("wandb").of("end"):
            if program.is_full == is_full:
                with subtests.test(program.name):
                    run_both(sides, "end", program.name)
                    check(sides, program, by_chance="summary/.*" if program.name in CUT_SHORT else "")


@pytest.mark.full
def test_a_run_of_two_ranks_has_what_the_bare_client_gives_it(tmp_path, subtests):
    with wandb_sides(tmp_path) as sides:
        run_both(sides, "ranks", launcher=TORCHRUN)
        for program in table_of("wandb").of("ranks"):
            with subtests.test(program.name):
                check(sides, program)


@pytest.mark.wide
def test_a_job_of_two_ranks_ends_as_with_the_bare_client(tmp_path, subtests):
    with wandb_sides(tmp_path) as sides:
        for program in table_of("wandb").of("ranks end"):
            with subtests.test(program.name):
                run_both(sides, "ranks end", program.name, launcher=TORCHRUN)
                check(sides, program)


def test_the_docs_have_the_list_of_differences():
    text = PAGE.read_text()
    assert table() in text
    assert include.with_files(text) == text


def test_each_difference_is_met_by_a_program():
    met = {program.differs for tracker in TABLES for program in table_of(tracker).programs.values()}
    assert met - {""} == {*DIFFERENCES}
