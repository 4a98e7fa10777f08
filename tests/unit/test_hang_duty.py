"""When a rank calls the roll, and what it answers."""

from __future__ import annotations

import sysconfig
import time
from types import SimpleNamespace

import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job.board import Board, OwnStore
from flyteplugins_tracking._job.hang import Frame, RollCallDuty, place_of, verdict_of

TIMEOUT_S = 1000.0


@pytest.fixture
def hang(monkeypatch):
    """Lets twice the timeout pass without progress."""
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * TIMEOUT_S)
    return lambda: monkeypatch.setattr("flyteplugins_tracking._job.hang.time", later)


@pytest.fixture
def board():
    return Board(pytest.importorskip("torch.distributed").HashStore(), "ranks")


class Rank:
    """A rank of two with a run of its own, which has begun. Rank 0 is the primary."""

    def __init__(self, rank: int, board: Board) -> None:
        self.reports: list[str] = []
        info = DistributedInfo(rank, 2, rank, 2, 0, 1)
        show = None if rank else lambda verdict, _: self.reports.append(verdict)
        self.duty = RollCallDuty(info, TIMEOUT_S, show, has_run=True)
        self.duty.begin(board)


def test_a_rank_of_a_job_without_a_store_says_where_it_is_itself(hang):
    rank = Rank(0, Board(OwnStore(), "ranks"))
    try:
        hang()
        for _ in range(2):
            rank.duty.look()
        (report,) = rank.reports
        assert report.startswith("no progress for 1000 s: rank 0 at ")
        assert "does not answer" not in report
    finally:
        rank.duty.end(has_failed=False)


def test_the_primary_says_which_rank_does_not_answer(board, hang):
    rank = Rank(0, board)
    hang()
    rank.duty.look()
    rank.duty.end(has_failed=False)
    assert rank.reports[0].endswith("; rank 1 does not answer")


LIBRARY = f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py"


def test_a_place_is_the_users_line_and_the_innermost_function():
    users = Frame("/home/me/train.py", 88, "train")
    assert (
        place_of([Frame(LIBRARY, 2500, "all_reduce"), Frame(LIBRARY, 80, "wrapper"), users]) == "train.py:88 all_reduce"
    )
    assert place_of([Frame("/home/me/data.py", 40, "next_batch"), users]) == "data.py:40 next_batch"
    assert place_of([Frame(LIBRARY, 1, "wait")]) == "distributed_c10d.py:1 wait"
    assert place_of([]) == "an unknown place"


def test_ranks_of_equal_places_are_named_together_the_most_first():
    places = dict.fromkeys([0, 2, 3, 4, 6], "at train.py:88 all_reduce") | {
        1: "at data.py:40 next_batch",
        5: "has ended",
    }
    assert verdict_of(places) == (
        "ranks 0, 2-4, 6 at train.py:88 all_reduce; rank 1 at data.py:40 next_batch; rank 5 has ended"
    )
