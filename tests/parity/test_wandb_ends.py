"""The ends of programs with W&B: each is a process, and the run says how it ended."""

from __future__ import annotations

import pytest

from parity.compare import check, run_both, wandb_sides
from parity.table import table_of

# Their process is gone at once: wandb-core may or may not have sent the last summary.
CUT_SHORT = ("sigkill", "os_exit", "abort")


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    with wandb_sides(tmp_path_factory.mktemp("ends")) as sides:
        yield sides


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_a_run_ends_as_with_the_bare_client(sides, is_full, subtests):
    for program in table_of("wandb").of("end"):
        if program.is_full == is_full:
            with subtests.test(program.name):
                run_both(sides, "end", program.name)
                check(sides, program, by_chance="summary/.*" if program.name in CUT_SHORT else "")
