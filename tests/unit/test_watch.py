"""The thread that looks after the other ranks while a function runs."""

from __future__ import annotations

import os

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import watch
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._job.watch import Duty, Watch

INFO = DistributedInfo(1, 2, 1, 2, 0, 1, launcher="mpich")


class Noted(Duty):
    """Notes what is done, and raises what it is told to."""

    def __init__(self, topic: str = "topic", wait_s: float = 60.0) -> None:
        self.topic = topic
        self.wait_s = wait_s
        self.done: list[str] = []
        self.error: Exception | None = None

    def next_wait_s(self) -> float:
        return self.wait_s

    def begin(self, board: Board) -> None:
        super().begin(board)
        self._note("begin")

    def look(self) -> None:
        self._note("look")

    def end(self, has_failed: bool) -> None:
        self._note("failed" if has_failed else "returned")

    def _note(self, what: str) -> None:
        self.done.append(what)
        if self.error is not None:
            raise self.error


@pytest.fixture
def own(monkeypatch):
    """A watch, whose job has a store."""
    store = pytest.importorskip("torch.distributed").HashStore()
    monkeypatch.setattr(watch, "job_board", lambda *_: Board(store, "ranks"))
    return Watch()


@pytest.mark.parametrize("error", [RuntimeError("the store has gone"), ValueError("a damaged text")])
def test_an_error_of_a_duty_ends_no_other_and_without_its_board_it_looks_no_more(own, error):
    duty, other = Noted(wait_s=0.01), Noted(topic="", wait_s=0.01)
    duty.error = error
    own.add(INFO, duty, other, without="")
    wait_until(lambda: len(other.done) > 3 and (len(duty.done) > 3 or isinstance(error, RuntimeError)))
    own.remove(duty, other)
    assert isinstance(error, ValueError) or duty.done == ["begin", "returned"]
    assert own.add(INFO, other, without="")
    own.remove(other)


def test_a_board_that_cannot_be_reached_is_warned_of(own, monkeypatch, caplog):
    def unreachable(*_: object, **__: object) -> Board:
        raise RuntimeError("it does not answer")

    monkeypatch.setattr(watch, "job_board", unreachable)
    assert not own.add(INFO, Noted(), without="pulse_s is ignored")
    assert "pulse_s is ignored: the other ranks cannot be watched" in caplog.text
    other = Noted(topic="")
    assert own.add(INFO, other, without="")
    own.remove(other)


def test_a_forked_child_has_no_duty_and_a_pipe_of_its_own():
    duty = Noted(topic="")
    watch.WATCH.add(INFO, duty, without="")
    pid = os.fork()
    if pid == 0:
        own = Noted(topic="")
        is_idle = not watch.WATCH.does(Noted)
        watch.WATCH.add(INFO, own, without="")
        watch.WATCH.remove(own)
        os._exit(0 if is_idle and own.done[-1] == "returned" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    watch.WATCH.remove(duty)
    assert duty.done[-1] == "returned"
