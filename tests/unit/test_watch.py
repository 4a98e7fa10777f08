"""The thread that looks after the other ranks while a function runs."""

from __future__ import annotations

import math
import os
import threading

import pytest
from support.stores import SharedStore
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import watch
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._job.watch import ALONE, Duty, Watch

INFO = DistributedInfo(1, 2, 1, 2, 0, 1, launcher="mpich")


class Noted(Duty):
    """Notes what is done, and raises what it is told to."""

    def __init__(self, topic: str = "topic", wait_s: float = 60.0) -> None:
        self.topic = topic
        self.wait_s = wait_s
        self.done: list[tuple[str, Board]] = []
        self.error: Exception | None = None
        self.gone: object = None  # a store

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
        self.done.append((what, self.board))
        if self.error is not None:
            raise self.error
        if self.board.store is self.gone:
            raise RuntimeError("the store has gone")

    def names(self) -> list[str]:
        return [what for what, _ in self.done]


@pytest.fixture
def group(monkeypatch):
    """The store of the process group that the function has made; empty if there is none."""
    stores: list[SharedStore] = []
    monkeypatch.setattr(watch, "connected_store", lambda *_: stores[0] if stores else None)
    return stores


@pytest.fixture
def own(monkeypatch, group):
    """A watch, whose job has a store."""
    monkeypatch.setattr(watch, "job_board", lambda *_: Board(SharedStore(), "ranks"))
    return Watch()


def test_there_is_one_thread_from_the_first_duty_to_the_last(own):
    before = threading.active_count()
    first, second = Noted(), Noted(topic="")
    for duty in (first, second):
        assert own.add(INFO, duty, without="")
    assert threading.active_count() == before + 1
    wait_until(lambda: first.done and second.done)
    own.remove(first, has_failed=True)
    assert (first.names(), second.names()) == (["begin", "failed"], ["begin"])
    assert threading.active_count() == before + 1
    own.remove(second)
    assert second.names() == ["begin", "returned"]
    assert threading.active_count() == before
    assert own.add(INFO, first, without="")
    own.remove(first)
    assert threading.active_count() == before


def test_a_duty_is_looked_at_when_it_is_due_and_when_somebody_wakes_the_thread(own):
    often, seldom = Noted(wait_s=0.01), Noted(wait_s=math.inf)
    own.add(ALONE, often, seldom, without="")
    wait_until(lambda: len(often.done) > 3 and seldom.done)
    assert seldom.names() == ["begin"]
    own.wake(seldom)
    wait_until(lambda: seldom.names() == ["begin", "look"])
    own.remove(often, seldom)


def test_it_moves_to_the_store_of_a_process_group_and_back_when_that_ends(own, group):
    duty, alone = Noted(wait_s=0.01), Noted(topic="", wait_s=0.01)
    own.add(INFO, duty, alone, without="")
    wait_until(lambda: duty.done)
    group.append(SharedStore())
    wait_until(lambda: duty.names().count("begin") == 2)
    assert duty.done[-1][1].store is group[0]
    duty.gone = group[0]
    wait_until(lambda: duty.names().count("begin") == 3)
    wait_until(lambda: duty.names()[-1] == "look")
    assert duty.done[-1][1].store is not group[0]
    own.remove(duty, alone)
    assert duty.names()[-1] == "returned"


@pytest.mark.parametrize("error", [RuntimeError("the store has gone"), ValueError("a damaged text")])
def test_an_error_of_a_duty_ends_no_other_and_without_its_board_it_looks_no_more(own, error):
    duty, other = Noted(wait_s=0.01), Noted(topic="", wait_s=0.01)
    duty.error = error
    own.add(INFO, duty, other, without="")
    wait_until(lambda: len(other.done) > 3 and (len(duty.done) > 3 or isinstance(error, RuntimeError)))
    own.remove(duty, other)
    assert isinstance(error, ValueError) or duty.names() == ["begin", "returned"]
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
        os._exit(0 if is_idle and own.names()[-1] == "returned" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    watch.WATCH.remove(duty)
    assert duty.names()[-1] == "returned"
