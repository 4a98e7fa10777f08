"""When a rank calls the roll, and what it answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.board import Board, DirectoryStore
from flyteplugins_tracking._job.hang import RollCall, RollCallDuty

TIMEOUT_S = 1000.0


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(progress, "_last_s", -1e9)  # also before a machine has been up for as long as the timeout
    return Board(DirectoryStore(tmp_path / "board"), "ranks")


class Rank:
    """A rank of two with a run of its own, which has begun."""

    def __init__(self, rank: int, board: Board) -> None:
        self.board = board
        self.reports: list[RollCall] = []
        info = DistributedInfo(rank, 2, rank, 2, 0, 1)
        self.duty = RollCallDuty(info, TIMEOUT_S, self.reports.append, has_run=True, stopped=threading.Event())
        self.duty.begin(board)

    def hang(self) -> None:
        self.duty._started_s = time.monotonic() - 2 * TIMEOUT_S

    def look(self) -> None:
        self.duty.look(self.board)


def test_one_roll_is_called_for_all_ranks_that_hang(board, tmp_path):
    ranks = [Rank(rank, board) for rank in range(2)]
    ranks[1].duty._report = None  # it is not the primary
    try:
        for rank in ranks:
            rank.hang()
        for _ in range(3):
            for rank in reversed(ranks):
                rank.look()
        assert len(ranks[0].reports) == 1
        assert board.of_topic("hang").count("episodes") == 1
    finally:
        for rank in ranks:
            rank.duty.close()


def test_stacks_of_an_earlier_block_for_which_nobody_has_asked_are_not_the_answer(board):
    rank = Rank(1, board)
    rank.duty._report = None
    try:
        rank.duty._file.write(b"as faulthandler's thread, while somebody held the GIL")
        rank.look()
        rank.hang()
        rank.look()
        answer = board.of_topic("hang").get("stacks/1/1")
        assert answer is not None
        assert "faulthandler's thread" not in answer
        assert "test_hang_duty.py" in answer
    finally:
        rank.duty.close()


def test_a_process_that_is_ended_leaves_no_file(board, tmp_path):
    rank = Rank(0, board)
    try:
        assert [path for path in Path(tmp_path).iterdir() if path.is_file()] == []
    finally:
        rank.duty.close()
