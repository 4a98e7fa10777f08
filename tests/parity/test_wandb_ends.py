"""The ends of programs with W&B: each is a process, and the run says how it ended."""

from __future__ import annotations

import pytest

from parity.compare import check, programs, run_both, wandb_sides
from parity.table import table_of

TABLE = table_of("wandb")
# Their process is gone at once: wandb-core may or may not have sent the last summary.
CUT_SHORT = ("sigkill", "os_exit", "abort")


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    with wandb_sides(tmp_path_factory.mktemp("ends")) as sides:
        yield sides


@programs(TABLE, "end")
def test_a_run_ends_as_with_the_bare_client(sides, program):
    run_both(sides, "end", program.name)
    check(sides, program, by_chance="summary/.*" if program.name in CUT_SHORT else "")
