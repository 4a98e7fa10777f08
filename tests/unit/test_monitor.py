"""The thread that looks at the job's board while a function runs."""

from __future__ import annotations

import os
import threading

import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job.board import Board, DirectoryStore
from flyteplugins_tracking._runs import monitor
from flyteplugins_tracking._runs.monitor import Monitor

INFO = DistributedInfo(1, 2, 1, 2, 0, 1, launcher="torchelastic")


class Duty:
    """Notes its board."""

    def __init__(self, boards: list[Board], fails: bool) -> None:
        self.boards = boards
        self.fails = fails

    def next_wait_s(self) -> float:
        return 60.0

    def begin(self, board: Board) -> None:
        self.boards.append(board)
        if self.fails:
            raise RuntimeError("the store has gone")

    def look(self, board: Board) -> None:
        """There is nothing to see."""

    def end(self, board: Board, has_failed: bool) -> None:
        """Nobody is told."""

    def close(self) -> None:
        """There is nothing to free."""


@pytest.fixture
def boards(tmp_path, monkeypatch):
    """The boards that the calls of `call` have used."""
    monkeypatch.setattr(monitor, "_kept", None)
    monkeypatch.setattr(monitor, "nearest_board", lambda *_, **__: Board(DirectoryStore(tmp_path), "ranks"))
    return []


def call(boards: list[Board], fails: bool = False) -> None:
    def duty(_: threading.Event) -> Duty:
        return Duty(boards, fails)

    Monitor(INFO, [duty]).stop(has_failed=False)


def test_the_calls_of_a_process_use_one_connection(boards):
    for _ in range(3):
        call(boards)
    assert boards == [boards[0]] * 3


def test_a_connection_that_has_gone_is_not_used_again(boards):
    call(boards, fails=True)
    call(boards)
    assert boards[0] is not boards[1]


def test_a_forked_child_has_a_connection_of_its_own(boards):
    call(boards)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if monitor._kept_board() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
