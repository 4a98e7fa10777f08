"""The agreement of a job's ranks to stop: over a store of torch's, with the ranks as threads or in a random order."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from support.stores import SharedStore

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


def other_store(store):
    return sys.modules["torch.distributed"].PrefixStore("other", store)


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


class Ranks:
    """Ranks as threads, each with a thread that looks at the board."""

    def __init__(self, store, ranks: int = RANKS, topic: str = "stop/1") -> None:
        self.board = Board(store, "monitor")
        self.agreements = [Agreement(info(rank, ranks), topic) for rank in range(ranks)]
        self.steps: dict[int, int] = {}
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def watch(self, *ranks: int) -> None:
        for rank in ranks:
            self._start(self._watch, self.agreements[rank])

    def train(self, steps_s: Sequence[float], barrier: threading.Barrier | None = None) -> None:
        for rank, step_s in enumerate(steps_s):
            self._start(self._train, rank, step_s, barrier)

    def wait_for(self, holds: Callable[[], object], timeout_s: float = 60) -> None:
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, (self.steps, [one.committed for one in self.agreements])
            time.sleep(0.005)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _watch(self, agreement: Agreement) -> None:
        with suppress(RuntimeError):
            agreement.begin(self.board)
            while not self._ended.wait(agreement.next_wait_s()):
                agreement.look()
            agreement.end(has_failed=False)

    def _train(self, rank: int, step_s: float, barrier: threading.Barrier | None) -> None:
        while not self._ended.is_set():
            if self.agreements[rank].counter.next():
                self.steps[rank] = self.agreements[rank].counter.count
                return
            time.sleep(step_s)
            if barrier is not None:
                with suppress(threading.BrokenBarrierError):
                    barrier.wait(60)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.02)


@pytest.fixture
def impatient(monkeypatch, fast):
    monkeypatch.setattr(module, "ROUND_S", 0.3)
    monkeypatch.setattr(module, "_LATER_S", 0.2)


def test_ranks_of_uneven_speeds_that_meet_in_collectives_stop_at_the_same_step(store, fast):
    with Ranks(store) as job:
        job.watch(*range(RANKS))
        job.train([0.001, 0.005, 0.05, 0.0], threading.Barrier(RANKS))
        time.sleep(0.2)
        job.agreements[1].request(StopRequest("a reason"))
        job.wait_for(lambda: len(job.steps) == RANKS)
        assert len(set(job.steps.values())) == 1
        assert {(one.committed.reason, one.committed.rank) for one in job.agreements} == {("a reason", 1)}


def test_ranks_that_never_meet_stop_at_the_next_step_of_the_fastest(store, fast):
    with Ranks(store) as job:
        job.watch(*range(RANKS))
        job.train([0.001, 0.003, 0.003, 0.003])
        time.sleep(0.1)
        job.agreements[3].request(StopRequest("a reason"))
        job.wait_for(lambda: len(job.steps) == RANKS)
        assert len(set(job.steps.values())) == 1


def test_an_urgent_request_fails_without_a_rank_that_never_calls(store, impatient, caplog):
    failures: list[str] = []
    with Ranks(store) as job:
        job.watch(0, 1, 2)
        job.train([0.001] * 3)
        job.agreements[0].request(StopRequest("SIGTERM", 0.3, failures.append))
        job.wait_for(lambda: failures)
        assert failures == ["rank 3 does not call should_stop()"]
        assert job.agreements[0].has_failed
        counts = [one.counter.count for one in job.agreements[:3]]
        job.wait_for(lambda: all(one.counter.count > 10 + n for one, n in zip(job.agreements, counts, strict=False)))
        assert job.steps == {}
    assert "have not agreed on a step at which to stop (SIGTERM): rank 3 does not call" in caplog.text


def test_a_request_without_a_deadline_waits_for_a_late_rank(store, impatient, caplog):
    with Ranks(store) as job:
        job.watch(0, 1, 2)
        job.train([0.001] * RANKS)
        job.agreements[0].request(StopRequest("a reason"))
        job.wait_for(lambda: "rank 3 does not call should_stop(); waiting" in caplog.text)
        job.watch(3)
        job.wait_for(lambda: len(job.steps) == RANKS)
        assert len(set(job.steps.values())) == 1


def test_a_store_that_goes_away_holds_nobody_up(impatient):
    class Gone(SharedStore):
        is_gone = False

        def add(self, key: str, amount: int) -> int:
            if self.is_gone:
                raise RuntimeError("connection reset by peer")
            return super().add(key, amount)

    store = Gone()
    board = Board(store, "monitor")
    one, other = (Agreement(info(rank, 2), "stop/1") for rank in range(2))
    one.begin(board)
    other.begin(board)
    one.request(StopRequest("a reason"))
    one.look()
    assert one.counter.limit == 0  # the next call waits
    store.is_gone = True
    assert not any(one.counter.next() for _ in range(10))
    with pytest.raises(RuntimeError):
        other.look()
    assert other.counter.limit == math.inf  # nobody will decide


def test_a_round_of_ranks_that_have_ended_is_void(store, fast):
    """The rank's name on the board is still that of the last attempt."""
    board = Board(store, "monitor")
    Agreement(info(1, 2), "stop/1").begin(board)
    first, second = Agreement(info(0, 2), "stop/1"), Agreement(info(1, 2), "stop/1")
    first.begin(board)
    first.request(StopRequest("a reason"))
    first.look()
    assert first.counter.limit == 0  # it has answered
    second.begin(board)
    for _ in range(6):
        second.look()
        first.look()
    assert first.committed == second.committed is not None


@pytest.mark.parametrize("phase", ["opened the round", "put its count"])
def test_a_rank_that_dies_between_the_phases_holds_nobody_up_and_the_next_attempt_agrees(store, impatient, phase):
    board, failures = Board(store, "monitor"), []
    first, second, dead = ranks = [Agreement(info(rank, 3), "stop/1") for rank in range(3)]
    for rank in ranks:
        rank.begin(board)
    if phase == "opened the round":
        dead.request(StopRequest("a reason"))
        dead._open_round(time.monotonic())
    else:
        first.request(StopRequest("a reason", otherwise=failures.append))
        dead.board.put("count/1/2", "7")
    first.look()
    second.look()
    assert first.counter.limit == second.counter.limit == 0
    time.sleep(0.35)
    for rank in (first, second, first):
        rank.look()
    assert not any(rank.committed or rank.counter.next() for rank in (first, second))
    assert failures == ([] if phase == "opened the round" else ["not all ranks have answered within 0.3 s"])
    again = [Agreement(info(rank, 3), "stop/1") for rank in range(3)]
    for rank in again:
        rank.begin(board)
    again[1].request(StopRequest("again"))
    for rank in again * 4:
        rank.look()
    assert {rank.committed for rank in again} == {again[0].committed}
    assert again[0].committed.reason == "again"


def test_a_rank_that_has_answered_and_died_is_not_needed_for_the_decision(store, fast):
    board = Board(store, "monitor")
    first, second, dead = ranks = [Agreement(info(rank, 3), "stop/1") for rank in range(3)]
    for rank in ranks:
        rank.begin(board)
    first.request(StopRequest("a reason"))
    for rank in (first, dead, second, first):
        rank.look()
    assert first.committed == second.committed is not None


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"nothing": 7}', '{"rank": "a", "members": []}', "null"])
@pytest.mark.parametrize("key", ["round/1", "decision/1"])
def test_a_text_that_another_program_has_put_on_the_board_stops_nobody(store, fast, key, text):
    ranks = [Agreement(info(rank, 2), "stop/1") for rank in range(2)]
    for rank in ranks:
        rank.begin(Board(store, "monitor"))
    ranks[0].board.put(key, text)
    for _ in range(3):
        for rank in ranks:
            rank.look()
    assert not any(rank.counter.next() for rank in ranks)
    ranks[0].request(StopRequest("dropped if it is decided", otherwise=lambda _: ranks[0].request(StopRequest("more"))))
    for _ in range(6):
        for rank in ranks:
            rank.look()
    assert ranks[0].committed == ranks[1].committed is not None
    assert ranks[0].committed.step == 2


def test_a_rank_that_moves_to_another_board_agrees_there(store, fast):
    boards = Board(store, "monitor"), Board(other_store(store), "monitor")
    ranks = [Agreement(info(rank, 2), "stop/1") for rank in range(2)]
    for rank in ranks:
        rank.begin(boards[0])
    ranks[0].request(StopRequest("a reason"))
    ranks[0].look()
    ranks[1].begin(boards[1])  # before it has looked at the round
    ranks[0].look()
    assert ranks[0].counter.limit == math.inf
    ranks[0].begin(boards[1])
    for _ in range(3):
        for rank in ranks:
            rank.look()
    assert ranks[0].committed == ranks[1].committed is not None


def test_a_rank_whose_function_ends_before_it_has_seen_the_round_holds_nobody_up(store, fast):
    failures: list[str] = []
    ranks = [Agreement(info(rank, 2), "stop/1") for rank in range(2)]
    for rank in ranks:
        rank.begin(Board(store, "monitor"))
    ranks[0].request(StopRequest("a reason", otherwise=failures.append))
    ranks[0].look()
    ranks[1].end(has_failed=False)
    ranks[0].look()
    assert failures == ["the function has ended on rank 1"]
    assert not ranks[0].counter.next()


def test_a_decision_that_was_made_while_a_rank_moved_holds(store, fast):
    boards = Board(store, "monitor"), Board(other_store(store), "monitor")
    ranks = [Agreement(info(rank, 2), "stop/1") for rank in range(2)]
    for rank in ranks:
        rank.begin(boards[0])
    ranks[0].request(StopRequest("a reason"))
    for rank in ranks:
        rank.look()
    ranks[0].begin(boards[1])
    assert ranks[0].committed == ranks[1].committed is not None
    assert ranks[0].counter.next()


@pytest.mark.parametrize("number", [128, pytest.param(1024, marks=pytest.mark.full)])
def test_many_ranks_agree_in_one_round(number):
    torch = pytest.importorskip("torch.distributed")
    board = Board(torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "monitor")
    ranks, rng = [Agreement(info(rank, number), "stop/1") for rank in range(number)], random.Random(7)
    for rank in ranks:
        rank.begin(board)
        rank.counter.count = rng.randrange(1000)  # they do not meet
    ranks[77].request(StopRequest("a reason"))
    stopped: dict[Agreement, int] = {}
    while len(stopped) < number:
        for rank in rng.sample(ranks, number):
            rank.look()
            while rank not in stopped and (rank.committed or rank.counter.limit == math.inf):  # it need not wait
                if rank.counter.next():
                    stopped[rank] = rank.counter.count
                elif rank.committed is None:
                    break
        assert all(rank._number <= 2 for rank in ranks), "more than one round"
    assert len(set(stopped.values())) == 1


@pytest.mark.parametrize("local", [4, 8])
def test_ranks_that_have_no_store_stop_alone(local):
    rank = Agreement(info(0, 8, local=local), "stop/1")
    rank.begin(Board(OwnStore(), "monitor"))
    assert not rank.counter.next()
    rank.request(StopRequest("a reason"))
    rank.look()
    assert rank.counter.next()
    assert rank.stopped_at == 2


def test_one_process_stops_at_its_next_call():
    own = Agreement(info(0, 1), "stop/1")
    assert not own.counter.next()
    own.request(StopRequest("a reason"))
    own.request(StopRequest("another one"))
    assert own.counter.next()
    assert own.counter.next()
    assert (own.stopped_at, own.committed.reason) == (2, "a reason")
