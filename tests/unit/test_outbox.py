"""The outbox of a run: what reaches a service that is away, rejects or is slow, and what is kept of the rest."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import get_run, tracking_init
from flyteplugins_tracking._commands import send
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers import outbox as outboxes
from flyteplugins_tracking.trackers.base import Handle, NoSigterm, RunRequest, Tracker
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.journal import Journal, Line, encode, stored
from flyteplugins_tracking.trackers.kept import OutboxHandle, open_or_keep
from flyteplugins_tracking.trackers.outbox import AwayError, Outbox, RejectedError

LONGEST_S = 60


class Service:
    """A service that takes lines unless a test has it do something else."""

    def __init__(self) -> None:
        self.taken: list[Line] = []
        self.calls = 0
        self.is_away = threading.Event()
        self.enough = float("inf")  # how many lines it takes
        self.rejects: Any = lambda line: False

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        self.calls += 1
        if self.is_away.is_set() or len(self.taken) >= self.enough:
            raise AwayError("it is away")
        if any(map(self.rejects, lines)):
            raise RejectedError("it is not right")
        self.taken += lines

    @property
    def numbers(self) -> list[int]:
        return [line["row"]["n"] for line in self.taken if "row" in line]


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(outboxes, "_WAIT_S", 0.01)
    for name in ("_SHORTEST_PAUSE_S", "_LONGEST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(outboxes, name, 0.01)


names = itertools.count()


def end_within(timeout_s: float) -> EndLimit:
    config = SimpleNamespace(finish_timeout_s=timeout_s, kill_after_s=2 * timeout_s, finish_limit="")
    return EndLimit("A service", "x", config, NoSigterm())


def new_outbox(directory: Path, service: Service | None, earlier: Any = ()) -> Outbox:
    journal = Journal(directory, f"writer-{next(names):04}", {"id": "x"})
    return Outbox("A service", "x", journal, service, earlier)


def row(number: int) -> Line:
    return {"row": {"n": number}, "step": number, "time": 1.0}


def put(outbox: Outbox, numbers: Any) -> None:
    for number in numbers:
        outbox.put(row(number))


def test_lines_are_sent_in_their_order_and_nothing_is_left(tmp_path):
    service = Service()
    outbox = new_outbox(tmp_path / "run", service)
    put(outbox, range(10))
    outbox.put({"exit_code": 0})
    assert outbox.close(end_within(LONGEST_S))
    outbox.remove()
    assert service.numbers == list(range(10))
    assert [(line["step"], line["time"]) for line in service.taken[:3]] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert len({line["id"] for line in service.taken}) == 11
    assert (outbox.rows, outbox.lost_rows) == (0, 0)
    assert not (tmp_path / "run").exists()


def test_the_runs_end_is_kept_until_the_run_has_it(tmp_path):
    """Whoever is killed between the last row and the run's status leaves the status to the next one."""
    outbox = new_outbox(tmp_path / "run", Service())
    put(outbox, range(10))
    outbox.put({"exit_code": 3})
    assert outbox.close(end_within(LONGEST_S))
    outbox.keep()
    (left,) = stored(tmp_path / "run")
    lines = list(left.lines())
    assert [line["exit_code"] for line in lines] == [3]


def test_an_outbox_with_nothing_to_send_starts_no_thread_and_makes_no_file(tmp_path):
    before = threading.active_count()
    outbox = new_outbox(tmp_path / "run", Service())
    assert threading.active_count() == before
    assert outbox.close(end_within(LONGEST_S))
    assert not (tmp_path / "run").exists()


def test_an_outage_is_told_once_and_loses_nothing(tmp_path, caplog):
    service = Service()
    outbox = new_outbox(tmp_path, service)
    for attempt in range(2):
        service.is_away.set()
        calls = service.calls
        put(outbox, range(5 * attempt, 5 * attempt + 5))
        while service.calls < calls + 3:
            pass
        service.is_away.clear()
        outbox.wait(LONGEST_S)
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == list(range(10))
    assert (
        caplog.messages
        == [
            "A service: run x: it is away. Rows are kept, and sent when it answers",
            "A service: run x: the service answers again",
        ]
        * 2
    )


def test_what_a_service_has_not_taken_in_time_is_sent_before_the_next_attempts_lines(tmp_path, caplog):
    service = Service()
    service.is_away.set()
    first = new_outbox(tmp_path, service)
    put(first, range(5))
    assert not first.close(end_within(0.1))
    first.keep()
    assert (first.rows, first.lost_rows) == (5, 0)
    service.is_away.clear()
    second = new_outbox(tmp_path, service, stored(tmp_path))
    put(second, range(5, 8))
    assert second.close(end_within(LONGEST_S))
    second.remove()
    assert service.numbers == list(range(8))
    assert "A service: run x: sent 5 rows again that an earlier attempt had logged" in caplog.text
    assert not list(tmp_path.glob("*"))


def test_a_line_has_the_same_id_whenever_it_is_sent(tmp_path):
    service = Service()

    def fails_half_way(lines: Sequence[Line], timeout_s: float | None) -> None:
        service.taken += lines[:2]
        raise AwayError("half of it")

    outbox = new_outbox(tmp_path, service)
    service.send = fails_half_way  # type: ignore[method-assign]
    put(outbox, range(4))
    assert not outbox.close(end_within(0.1))
    outbox.keep()
    del service.send
    again = new_outbox(tmp_path, service, stored(tmp_path))
    assert again.close(end_within(LONGEST_S))
    assert sorted({(line["id"][-2:], line["row"]["n"]) for line in service.taken}) == [(f"-{n}", n) for n in range(4)]
    assert len({line["id"] for line in service.taken}) == 4


def test_a_rejected_line_costs_no_other_line(tmp_path, caplog):
    service = Service()
    service.rejects = lambda line: line["row"]["n"] == 3
    outbox = new_outbox(tmp_path, service)
    put(outbox, range(6))
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [0, 1, 2, 4, 5]
    assert caplog.messages == ["A service: run x: n is rejected, and lost: it is not right"]


def test_a_service_that_rejects_all_lines_is_not_asked_for_each(tmp_path, caplog):
    service = Service()
    service.rejects = lambda line: True
    outbox = new_outbox(tmp_path, service)
    with outbox._changed:  # so that they are one batch
        put(outbox, range(100))
    assert outbox.close(end_within(LONGEST_S))
    assert service.calls == 1 + 5
    assert "95 more rows are not sent, and lost" in caplog.text


def test_an_error_of_the_sink_costs_its_lines_and_no_others(tmp_path, caplog):
    service = Service()
    service.rejects = lambda line: 1 / line["row"]["n"] < 0
    outbox = new_outbox(tmp_path, service)
    put(outbox, [0])
    outbox.wait(LONGEST_S)
    put(outbox, [1])
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [1]
    assert caplog.messages == ["A service: run x: n is rejected, and lost: division by zero"]


def test_an_error_of_the_sink_in_a_batch_costs_the_line_that_is_its_cause(tmp_path):
    service = Service()
    service.rejects = lambda line: 1 / line["row"]["n"] < 0
    outbox = new_outbox(tmp_path, service)
    with outbox._changed:  # so that they are one batch
        put(outbox, range(6))
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [1, 2, 3, 4, 5]
    assert outbox.rejected_rows == 1


def test_what_an_earlier_attempt_left_is_called_sent_if_it_was_and_kept_if_not(tmp_path, caplog):
    left = new_outbox(tmp_path, None)
    put(left, range(6))
    left.keep()
    service = Service()
    service.rejects = lambda line: line["row"]["n"] in (2, 3)
    outbox = new_outbox(tmp_path, service, stored(tmp_path))
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [0, 1, 4, 5]
    assert "sent 4 rows again" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]


def test_what_memory_has_no_room_for_is_left_to_the_next_attempt_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(outboxes, "MEMORY_BYTES", 2000)
    service = Service()
    service.is_away.set()
    outbox = new_outbox(tmp_path, service)
    put(outbox, range(500))
    assert "What is logged from now on is in files" in caplog.text
    service.is_away.clear()
    outbox.wait(LONGEST_S)
    put(outbox, range(500, 1000))
    outbox.put({"exit_code": 0})
    limit = end_within(LONGEST_S)
    assert not outbox.close(limit)
    assert limit.left_s > LONGEST_S / 2  # it does not wait for what it does not send
    outbox.keep()
    sent = len(service.numbers)
    assert 0 < sent < 20
    assert service.numbers == [*range(sent)]
    assert (outbox.rows, outbox.lost_rows) == (1000 - sent, 0)
    (left,) = stored(tmp_path)
    lines = list(left.lines())
    assert [line["row"]["n"] for line in lines if "row" in line] == [*range(sent, 1000)]
    assert lines[-1]["exit_code"] == 0
    monkeypatch.undo()
    later = new_outbox(tmp_path, service, stored(tmp_path))
    assert later.close(end_within(LONGEST_S))
    assert service.numbers == [*range(1000)]


def test_a_full_disk_costs_no_line_that_the_service_takes(tmp_path, monkeypatch):
    service = Service()
    outbox = new_outbox(tmp_path, service)
    put(outbox, [0])
    monkeypatch.setattr("flyteplugins_tracking.trackers.journal.os.write", lambda *_: 1)
    put(outbox, range(1, 10))
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == list(range(10))
    assert (outbox.rows, outbox.lost_rows) == (0, 0)


@pytest.mark.parametrize(("taken", "left", "lost"), [(0, 10, 7), (2, 8, 7), (5, 5, 5)])
def test_lines_that_are_neither_sent_nor_kept_are_counted(tmp_path, monkeypatch, taken, left, lost):
    monkeypatch.setattr(outboxes, "_MOST_AT_ONCE", 1)
    service = Service()
    service.enough = taken
    outbox = new_outbox(tmp_path, service)
    put(outbox, range(3))
    with monkeypatch.context() as full:
        full.setattr("flyteplugins_tracking.trackers.journal.os.write", lambda *_: 1)
        put(outbox, range(3, 10))
    wait_until(lambda: len(service.taken) == taken)
    assert not outbox.close(end_within(0.05))
    outbox.keep()
    assert (outbox.rows, outbox.lost_rows) == (left, lost)
    assert len(service.numbers) == taken
    kept = [line["row"]["n"] for journal in stored(tmp_path) for line in journal.lines()]
    assert kept[-3:] == [0, 1, 2][-len(kept) :]


def test_lines_beyond_memory_and_a_full_disk_are_lost_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(outboxes, "MEMORY_BYTES", 500)
    service = Service()
    service.is_away.set()
    outbox = new_outbox(tmp_path, service)
    put(outbox, range(5))
    monkeypatch.setattr("flyteplugins_tracking.trackers.journal.os.write", lambda *_: 1)
    put(outbox, range(5, 20))
    service.is_away.clear()
    assert not outbox.close(end_within(LONGEST_S))
    sent = len(service.numbers)
    assert 0 < sent < 5
    assert service.numbers == list(range(sent))
    assert (outbox.rows, outbox.lost_rows) == (20 - sent, 15)
    outbox.keep()
    (left,) = stored(tmp_path)
    assert [line["row"]["n"] for line in left.lines()][sent - 5 :] == [*range(sent, 5)]


def test_without_a_service_everything_is_kept_and_nobody_waits(tmp_path):
    outbox = new_outbox(tmp_path, None)
    put(outbox, range(3))
    outbox.put({"exit_code": 0})
    assert not outbox.close(end_within(LONGEST_S))
    outbox.keep()
    (journal,) = stored(tmp_path)
    assert [line.get("exit_code", line.get("step")) for line in journal.lines()] == [0, 1, 2, 0]


class Away(Tracker):
    """A tracker whose service takes what it is given, or cannot be used."""

    name, title = "away", "Away"

    def __init__(self, service: Service | None) -> None:
        self.service = service

    def open(self, request: RunRequest) -> Handle:
        return open_or_keep(request, self, lambda: self.open_at_service(request))

    def open_at_service(self, request: RunRequest) -> OutboxHandle:
        if self.service is None:
            raise TrackerUnavailableError("Away does not answer.")
        return OutboxHandle(request, self, self.service)


def test_what_the_service_does_not_take_from_send_is_told_and_stays(tmp_path, monkeypatch):
    arguments = {"arguments": {"project": "p", "kill_after_s": 6}, "run_metadata": {}, "group": None}
    journal = Journal(
        tmp_path / "run", "0000", {"tracker": "trackio", "id": "x", "primary": True, "attempt": 0, **arguments}
    )
    for number in range(3):
        journal.add(encode(row(number)))
    journal.close()
    service = Service()
    tracker = Away(service)
    tracker.name = "trackio"
    monkeypatch.setattr(send, "find_tracker", lambda _: tracker)
    service.is_away.set()
    with pytest.raises(TrackerUnavailableError, match="a part of the run could not be sent"):
        send.send_directory(tmp_path / "run")
    service.is_away.clear()
    assert send.send_directory(tmp_path / "run") == f"sent {tmp_path / 'run'} as run x"
    assert service.numbers == [0, 1, 2]
    assert stored(tmp_path / "run") == []


def test_any_step_of_a_run_in_files_can_be_sent(tmp_path, monkeypatch):
    @tracking_init(tracker=Away(None), project="p", id="train", if_unavailable="degrade")
    def train() -> None:
        for step in (1, "2", 3.0, None, "x", float("inf"), {}):
            get_run().log({"n": 1}, step)

    monkeypatch.chdir(tmp_path)
    train()
    (left,) = stored(tmp_path / "tracking-offline" / "away-train")
    assert [line["step"] for line in left.lines() if "row" in line] == [1, 2, 3, None, 4, 5, 6]


def test_a_run_sends_the_journals_of_its_own_earlier_attempts_alone(tmp_path, monkeypatch):
    """Whatever these say: another user of a working directory may have linked it to another run's."""
    directory, arguments = tmp_path / "tracking-offline" / "away-train", {"arguments": {"project": "p"}}
    others = [{"id": "train-2"}, {"tracker": "trackio"}, {"arguments": {"project": "q"}}, {"arguments": []}, {"id": 1}]
    for number, changed in enumerate([{}, *others]):
        header = {"tracker": "away", "id": "train", **arguments, **changed}
        journal = Journal(directory, f"{number:04}", header)
        for step in (number, "x", float("inf"), {}):
            journal.add(encode({**row(number), "step": step}))
        journal.close()
    service = Service()

    @tracking_init(tracker=Away(service), project="p", id="train")
    def train() -> None:
        get_run().log({"n": 9})

    monkeypatch.chdir(tmp_path)
    train()
    assert service.numbers == [0, 9]
    assert [left.name for left in stored(directory)] == [f"{number:04}" for number in range(1, 6)]


def test_the_end_of_a_run_tells_what_memory_had_no_room_for_and_the_next_attempt_sends_it(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(outboxes, "MEMORY_BYTES", 2000)
    monkeypatch.chdir(tmp_path)
    service = Service()

    @tracking_init(tracker=Away(service), project="p", id="train")
    def train(numbers: range) -> None:
        for number in numbers:
            get_run().log({"n": number})
        service.is_away.clear()

    service.is_away.set()
    train(range(100))
    sent = len(service.numbers)
    assert 0 < sent < 20
    directory = tmp_path / "tracking-offline" / "away-train"
    assert f"Away: run train: Away has not taken {100 - sent} rows. They are kept in files." in caplog.text
    assert f"flyteplugins-tracking send {directory}" in caplog.text
    monkeypatch.setattr(outboxes, "MEMORY_BYTES", 256_000_000)
    train(range(100, 103))
    assert service.numbers == [*range(103)]
    assert not directory.exists()


def test_who_waits_gives_up_when_nothing_is_taken_anymore(tmp_path):
    service = Service()
    outbox = new_outbox(tmp_path, service)
    put(outbox, range(3))
    outbox.wait(LONGEST_S)
    assert service.numbers == [0, 1, 2]
    service.is_away.set()
    put(outbox, [3])
    outbox.wait(0.1)
    assert service.numbers == [0, 1, 2]
    outbox.close(end_within(0))


def test_a_signal_handler_may_put_a_line_while_one_is_put(tmp_path, monkeypatch):
    service = Service()
    outbox = new_outbox(tmp_path, service)
    write, during = os.write, []

    def interrupted(file: int, data: bytes) -> int:
        if not during and b'"n":1}' in data:
            during.append(1)
            signal.raise_signal(signal.SIGUSR1)
        return write(file, data)

    before = signal.signal(signal.SIGUSR1, lambda *_: put(outbox, [100]))
    monkeypatch.setattr("flyteplugins_tracking.trackers.journal.os.write", interrupted)
    try:
        put(outbox, range(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [0, 1, 100, 2]  # in the order of the journal, which is acknowledged by it


def test_a_forked_child_puts_nothing_and_waits_for_no_lock(tmp_path):
    service = Service()
    outbox = new_outbox(tmp_path, service)
    put(outbox, [0])
    with outbox._changed, warnings.catch_warnings():  # as another thread of the parent may hold it
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            put(outbox, [1])
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert outbox.close(end_within(LONGEST_S))
    assert service.numbers == [0]


def test_a_close_goes_on_as_long_as_rows_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(outboxes, "_MOST_AT_ONCE", 1)
    service, limit = Service(), end_within(LONGEST_S)
    outbox, begun = new_outbox(tmp_path, service), limit.until
    service.is_away.set()
    put(outbox, range(5))
    closing = threading.Thread(target=outbox.close, args=(limit,))
    closing.start()
    wait_until(lambda: outbox._limit is limit)  # rows that are taken before that give an end no time
    service.is_away.clear()
    closing.join()
    assert service.numbers == [*range(5)]
    assert limit.until > begun  # each row has given more time


def test_a_sigterm_ends_a_close_that_waits(tmp_path):
    service = Service()
    service.is_away.set()
    limit, sigterm = end_within(LONGEST_S), NoSigterm()
    limit._sigterm = sigterm
    outbox, results = new_outbox(tmp_path, service), list[bool]()
    put(outbox, range(3))
    closing = threading.Thread(target=lambda: results.append(outbox.close(limit)))
    closing.start()
    sigterm.terminated_at = limit.until - 2.6 * LONGEST_S  # so long ago that SIGKILL is due
    closing.join(LONGEST_S / 2)
    assert results == [False]
    outbox.keep()
    assert len(stored(tmp_path)) == 1


# The pauses between tries


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.mark.parametrize("limit_s", [15, 20, 30, 60])
@pytest.mark.parametrize("takes_s", [0.0, 2.0])
def test_who_waits_asks_at_most_ten_times_and_last_at_the_deadline(monkeypatch, limit_s, takes_s):
    clock, asked = Clock(), []
    monkeypatch.setattr(outboxes, "time", clock)

    def ask() -> bool:
        asked.append(clock.now - 100)
        clock.sleep(takes_s)
        return False

    assert outboxes.until(100.0 + limit_s, ask) is False
    assert len(asked) <= 10
    assert limit_s - takes_s - 0.5 <= asked[-1] <= limit_s
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert waits[:-1] == sorted(waits[:-1])


@pytest.mark.parametrize(("patience", "until_s"), [(0.0, 0.0), (0.5, 15.0), (1.0, 30.0)])
def test_an_error_is_raised_after_its_part_of_the_time(monkeypatch, patience, until_s):
    clock, asked = Clock(), []
    monkeypatch.setattr(outboxes, "time", clock)

    def ask() -> bool:
        asked.append(clock.now - 100)
        raise AwayError("away", patience)

    with pytest.raises(AwayError):
        outboxes.until(130.0, ask)
    assert asked[-1] == pytest.approx(until_s, abs=0.5)
