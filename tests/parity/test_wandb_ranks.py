"""Programs of two ranks with W&B, under torchrun: with the bare client, and under the decorator."""

from __future__ import annotations

import contextlib

import pytest
from support import jobs

from parity.compare import Kinds, check, run_both, wandb_sides
from parity.table import table_of

pytestmark = pytest.mark.full

TORCHRUN = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Kinds(lambda: stack.enter_context(wandb_sides(tmp_path_factory.mktemp("ranks"))), launcher=TORCHRUN)


def test_a_run_of_two_ranks_has_what_the_bare_client_gives_it(kinds, subtests):
    for program in table_of("wandb").of("ranks"):
        with subtests.test(program.name):
            check(kinds["ranks"], program)


def test_a_job_of_two_ranks_ends_as_with_the_bare_client(tmp_path, subtests):
    with wandb_sides(tmp_path) as sides:
        for program in table_of("wandb").of("ranks end"):
            with subtests.test(program.name):
                run_both(sides, "ranks end", program.name, launcher=TORCHRUN)
                check(sides, program)
