"""How long the end of a run may last: while something moves, and after a SIGTERM for a limited time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flyteplugins_tracking.trackers import ending
from flyteplugins_tracking.trackers.base import NoSigterm
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.ending import EndLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    return clock


def limit_of(watch: NoSigterm | None = None, kill_after_s: float = 30) -> EndLimit:
    return EndLimit("A service", "x", TrackingConfig(kill_after_s=kill_after_s), watch or NoSigterm())


def test_an_ordinary_end_lasts_as_long_as_something_moves(clock):
    limit = limit_of()
    for _ in range(1000):
        clock.now += 24
        assert limit.lasts()
        limit.moved()
    clock.now += 26
    assert not limit.lasts()
    assert limit.why == "nothing has moved for 25 s (kill_after_s=30)"


@pytest.mark.parametrize(
    ("began", "terminated", "until"),
    [
        (0, 100, 125),  # it goes on when the signal comes
        (100, 100, 125),
        (102, 100, 127),  # the function has unwound
        (110, 100, 128),  # it has used some of its grace: the rest, less what the process needs
        (127.5, 100, 128.5),  # all of it
        (140, 100, 165),  # the signal was a notice: nobody has killed
    ],
)
def test_a_sigterm_bounds_an_end_that_has_begun_and_one_that_begins(clock, began, terminated, until):
    watch, start = NoSigterm(), clock.now
    clock.now = start + began
    limit = limit_of(watch)
    watch.terminated_at = start + terminated
    clock.now = start + until - 0.5
    limit.moved()  # which gives no more time
    assert limit.lasts()
    assert limit.left_s == pytest.approx(0.5)
    clock.now = start + until + 0.5
    assert not limit.lasts()
    assert limit.why.startswith("SIGTERM has come")


def test_ctrl_c_in_an_end_bounds_it_and_is_told_once(clock, caplog):
    watch, start = NoSigterm(), clock.now
    limit = limit_of(watch)
    watch.interrupted_at = start + 20
    clock.now = start + 21
    for _ in range(2):
        limit.moved()
        assert limit.lasts()
    assert [record.message for record in caplog.records] == [
        "A service: run x: its end may take 24 s from here on. To stop it at once, press Ctrl-C again"
    ]
    clock.now = start + 46
    limit.moved()
    assert not limit.lasts()
    assert limit.why.startswith("Ctrl-C has come")


def test_an_upload_that_stands_still_is_waited_for_while_the_service_answers(clock, monkeypatch):
    at_once = lambda target, **_: SimpleNamespace(start=target, is_alive=bool)  # noqa: E731
    monkeypatch.setattr(ending, "threading", SimpleNamespace(Thread=at_once, Condition=threading.Condition))
    limit, asked = limit_of(), []
    limit.asks = lambda: asked.append(clock.now) or True
    start = clock.now
    while limit.lasts():
        clock.now += 5
    assert 600 < clock.now - start < 640  # then it is given up
    assert asked[0] == start + 10  # an end that is usual asks nothing
    limit, start = limit_of(), clock.now
    limit.asks = lambda: 1 / 0  # a service that does not answer gives no more time
    while limit.lasts():
        clock.now += 5
    assert clock.now - start == 25


def test_a_long_end_says_every_30_s_what_is_left(clock, caplog):
    limit = limit_of()
    limit.left = lambda: "7 rows"
    for _ in range(100):
        clock.now += 1
        limit.moved()
        assert limit.lasts()
    said = [record.getMessage() for record in caplog.records]
    text = "A service: run x: the end has waited {} s for the service to take what is left: 7 rows"
    assert said == [text.format(31), text.format(62), text.format(93)]
