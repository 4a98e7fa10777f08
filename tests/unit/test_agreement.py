"""The agreement of a job's ranks to stop: over a store of torch's, with the ranks in a random order."""

from __future__ import annotations

import math
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import agreement as module
from flyteplugins_tracking._job.agreement import Agreement, StopRequest
from flyteplugins_tracking._job.board import Board, OwnStore
from flyteplugins_tracking._job.watch import Duty

RANKS = 4


@pytest.fixture
def store():
    torch = pytest.importorskip("torch.distributed")
    return torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def info(rank: int, ranks: int = RANKS, local: int | None = None) -> DistributedInfo:
    return DistributedInfo(rank, ranks, rank, ranks if local is None else local, 0, 1, launcher="torchelastic")


class InTurn:
    """A job whose ranks and whose threads take turns in a random order. They meet in a collective in each step."""

    def __init__(self, store, seed: int, ranks: int = RANKS) -> None:
        self.random = random.Random(seed)
        self.board = Board(store, "monitor")
        self.ranks = [Agreement(info(rank, ranks), f"stop/{seed}") for rank in range(ranks)]
        self.stopped_at: dict[int, int] = {}
        self.weights = [self.random.choice((1, 3, 30)) for _ in range(2 * ranks)]

    def counts(self) -> list[int]:
        return [rank.counter.count for rank in self.ranks]

    def turn(self) -> None:
        number = self.random.choices(range(2 * len(self.ranks)), self.weights)[0]
        rank = self.ranks[number // 2]
        if number % 2 and rank.board is Duty.board:
            rank.begin(self.board)
        elif number % 2:
            rank.look()
        elif number // 2 not in self.stopped_at and not self._waits(rank) and rank.counter.next():
            self.stopped_at[number // 2] = rank.counter.count

    def _waits(self, rank: Agreement) -> bool:
        """In a collective; or in its call, for the decision of a round."""
        is_ahead = rank.counter.count > min(self.counts())
        return is_ahead or (rank.committed is None and rank.counter.count + 1 >= rank.counter.limit)


@pytest.mark.parametrize("requests", [1, 2])
def test_ranks_stop_at_the_same_step_whenever_they_are_asked(store, requests):
    for seed in range(20):
        job = InTurn(store, seed)
        moments = [job.random.randrange(200) for _ in range(requests)]
        for turn in range(20_000):
            for _ in range(moments.count(turn)):
                job.random.choice(job.ranks).request(StopRequest(f"turn {turn}"))
            job.turn()
            if len(job.stopped_at) == RANKS:
                break
        assert len(job.stopped_at) == RANKS, f"seed {seed}: {job.counts()}"
        assert len(set(job.stopped_at.values())) == 1, f"seed {seed}: {job.stopped_at}"
        assert len({rank.committed for rank in job.ranks}) == 1


def begun(store, ranks: int) -> list[Agreement]:
    """The ranks of a job, each of which has begun."""
    begun = [Agreement(info(rank, ranks), "stop/1") for rank in range(ranks)]
    for rank in begun:
        rank.begin(Board(store, "monitor"))
    return begun


def look(*ranks: Agreement, times: int = 1) -> None:
    for _ in range(times):
        for rank in ranks:
            rank.look()


def test_a_store_that_goes_away_holds_nobody_up(monkeypatch):
    class Gone(pytest.importorskip("torch.distributed").HashStore):  # type: ignore[misc]
        is_gone = False

        def add(self, key: str, amount: int) -> int:
            if self.is_gone:
                raise RuntimeError("connection reset by peer")
            return super().add(key, amount)

    monkeypatch.setattr(module, "ROUND_S", 0.3)
    store = Gone()
    one, other = begun(store, 2)
    one.request(StopRequest("a reason"))
    one.look()
    assert one.counter.limit == 0  # the next call waits
    store.is_gone = True
    assert not any(one.counter.next() for _ in range(10))
    with pytest.raises(RuntimeError):
        other.look()
    assert other.counter.limit == math.inf  # nobody will decide


def test_a_rank_that_dies_while_they_agree_holds_nobody_up_and_the_next_attempt_agrees(store, monkeypatch):
    monkeypatch.setattr(module, "ROUND_S", 0.3)
    failures: list[str] = []
    first, second, dead = begun(store, 3)
    first.request(StopRequest("a reason", otherwise=failures.append))
    dead.board.put("count/1/2", "7")
    look(first, second)
    assert first.counter.limit == second.counter.limit == 0
    time.sleep(0.35)
    look(first, second, first)
    assert not any(rank.committed or rank.counter.next() for rank in (first, second))
    assert failures == ["not all ranks have answered within 0.3 s"]
    again = begun(store, 3)
    again[1].request(StopRequest("again"))
    look(*again, times=4)
    assert {rank.committed for rank in again} == {again[0].committed}
    assert again[0].committed.reason == "again"


def test_a_rank_that_waits_for_the_decision_goes_on_to_the_step_of_the_others(store):
    ahead, behind = begun(store, 2)
    ahead.counter.count = 5
    behind.request(StopRequest("a reason"))
    behind.look()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(behind.counter.next)
        wait_until(lambda: behind.counter.count == 1)
        look(ahead, behind)
        assert not waiting.result(60)
    assert ahead.counter.next()
    while not behind.counter.next():
        pass
    assert behind.stopped_at == ahead.stopped_at == 6


def test_a_rank_that_moves_to_another_board_agrees_there(store):
    first, second = begun(store, 2)
    other = Board(sys.modules["torch.distributed"].PrefixStore("other", store), "monitor")
    first.request(StopRequest("a reason"))
    first.look()
    second.begin(other)  # before it has looked at the round
    first.look()
    assert first.counter.limit == math.inf
    first.begin(other)
    look(first, second, times=3)
    assert first.committed == second.committed is not None


def test_a_rank_whose_function_ends_before_it_has_seen_the_round_holds_nobody_up(store):
    failures: list[str] = []
    first, second = begun(store, 2)
    first.request(StopRequest("a reason", otherwise=failures.append))
    first.look()
    second.end(has_failed=False)
    first.look()
    assert failures == ["the function has ended on rank 1"]
    assert not first.counter.next()


@pytest.mark.parametrize("local", [4, 8])
def test_ranks_that_have_no_store_stop_alone(local):
    rank = Agreement(info(0, 8, local=local), "stop/1")
    rank.begin(Board(OwnStore(), "monitor"))
    assert not rank.counter.next()
    rank.request(StopRequest("a reason"))
    rank.request(StopRequest("another one"))
    rank.look()
    assert rank.counter.next()
    assert (rank.stopped_at, rank.committed.reason) == (2, "a reason")
