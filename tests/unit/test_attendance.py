"""Who has written all that it has to a run, told through a store."""

from __future__ import annotations

import pytest

from flyteplugins_tracking.trackers.peers.attendance import Attendance

torch = pytest.importorskip("torch")


@pytest.fixture
def store():
    return torch.distributed.HashStore()


def missing(primary):
    return primary.wait(["other"], timeout_s=0.1, until=lambda: False)


def test_a_writer_that_has_left_is_not_waited_for_also_where_the_primary_came_later(store):
    for _ in range(3):  # attempts
        other, primary = Attendance(store, "run"), Attendance(store, "run")
        other.enter("other")
        other.leave("other")
        primary.enter_as_primary()
        assert missing(primary) == []


def test_a_writer_of_an_earlier_attempt_is_not_taken_for_this_ones(store):
    for _ in range(3):
        primary, other = Attendance(store, "run"), Attendance(store, "run")
        primary.enter_as_primary()
        assert missing(primary) == ["other"]
        other.enter("other")
        assert missing(primary) == ["other"]
        other.leave("other")
        assert missing(primary) == []


def test_a_writer_that_was_not_there_in_an_earlier_attempt_is_waited_for(store):
    Attendance(store, "run").enter_as_primary()
    primary, other = Attendance(store, "run"), Attendance(store, "run")
    primary.enter_as_primary()
    assert other.enter("other")
    assert missing(primary) == ["other"]
    other.leave("other")
    assert missing(primary) == []
