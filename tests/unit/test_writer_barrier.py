"""Which writers of a run the primary waits for, through a store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyteplugins_tracking import DistributedInfo, RunPlan
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking.trackers import barrier
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import NoSigterm
from flyteplugins_tracking.trackers.ending import EndLimit


@pytest.fixture
def store():
    import torch

    return torch.distributed.HashStore()


def barriers(store):
    board = Board(store, "writers/run")
    return WriterBarrier(board, "other"), WriterBarrier(board, others=["other"])


def missing(primary, timeout_s=0.1):
    config = SimpleNamespace(finish_timeout_s=timeout_s, kill_after_s=2 * timeout_s, finish_limit="0.1 s")
    return primary.wait(EndLimit("A service", "run", config, NoSigterm()))


def test_a_writer_that_has_left_is_not_waited_for_even_if_the_primary_enters_later(store):
    for _ in range(3):  # attempts
        other, primary = barriers(store)
        other.enter(is_primary=False)
        other.leave()
        primary.enter(is_primary=True)
        assert missing(primary) == []


def test_a_writer_of_an_earlier_attempt_does_not_count(store):
    for _ in range(3):
        other, primary = barriers(store)
        primary.enter(is_primary=True)
        assert missing(primary) == ["other"]
        other.enter(is_primary=False)
        assert missing(primary) == ["other"]
        other.leave()
        assert missing(primary) == []


def test_rows_of_another_writer_of_this_attempt_are_no_earlier_attempts(store):
    """Nor does an attempt whose primary is new, on a node that has joined, take them for its own."""
    other, primary = barriers(store)
    other.enter(is_primary=False)
    assert not other.has_resumed(had_rows=False)
    primary.enter(is_primary=True)
    assert not primary.has_resumed(had_rows=True)
    other, primary = barriers(store)
    primary.enter(is_primary=True)
    other.enter(is_primary=False)
    assert primary.has_resumed(had_rows=True)
    assert other.has_resumed(had_rows=True)


def test_what_the_first_writer_finds_in_a_run_of_another_job_is_an_earlier_attempts(store):
    other, primary = barriers(store)
    other.enter(is_primary=False)
    assert other.has_resumed(had_rows=True)
    primary.enter(is_primary=True)
    assert primary.has_resumed(had_rows=True)


def test_a_store_that_does_not_answer_fails_no_training(monkeypatch, caplog):
    import torch

    def unreachable(*_: object) -> None:
        raise torch.distributed.DistNetworkError("timed out")

    monkeypatch.setattr(barrier, "job_board", unreachable)
    info = DistributedInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    plan = RunPlan(opens=True, run_id="run", primary=False, writers=2)
    config = SimpleNamespace(run_mode="shared", rank_scope="global")
    request = SimpleNamespace(info=info, plan=plan, config=config, planned_run_id="run", restart_count=0)
    WriterBarrier.of_ranks(request, "Pluto").leave()
    assert "the store that the ranks share does not answer (timed out)" in caplog.text
