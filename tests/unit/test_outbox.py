"""What of a run reaches a service that is away, rejects or is slow, and what is kept of the rest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.away import LEFT, Away, Service, log
from support.waiting import wait_until

from flyteplugins_tracking import get_run, tracking_init
from flyteplugins_tracking._commands import send
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers import ending, kept
from flyteplugins_tracking.trackers import outbox as outboxes
from flyteplugins_tracking.trackers.journal import stored
from flyteplugins_tracking.trackers.outbox import AwayError


@pytest.fixture(autouse=True)
def service(tmp_path, monkeypatch) -> Service:
    """A service whose runs end in 0.1 s if nothing moves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outboxes, "_WAIT_S", 0.01)
    for name in ("_SHORTEST_PAUSE_S", "_LONGEST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(outboxes, name, 0.01)
    return Service()


def kept_in(directory: Path = LEFT) -> list[int]:
    return [line["row"]["n"] for left in stored(directory) for line in left.lines() if "row" in line]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(**{**vars(os), "write": lambda *_: 1})
    monkeypatch.setattr("flyteplugins_tracking.trackers.journal.os", full)


def test_rows_are_sent_in_their_order_and_nothing_is_left(service):
    log(service, range(10))
    assert service.numbers == [*range(10)]
    assert [line["step"] for line in service.taken if "row" in line] == [*range(10)]
    assert len({line["id"] for line in service.taken}) == len(service.taken)
    log(service, [])
    assert not LEFT.exists()


def test_an_outage_is_told_once_and_loses_nothing(service, caplog):
    def outages() -> Iterator[int]:
        for attempt in range(2):
            calls = service.calls
            service.is_away.set()
            yield from range(5 * attempt, 5 * attempt + 5)
            wait_until(lambda calls=calls: service.calls > calls + 3)
            service.is_away.clear()
            wait_until(lambda attempt=attempt: len(service.numbers) == 5 * attempt + 5)

    log(service, outages())
    assert service.numbers == [*range(10)]
    assert caplog.messages == 2 * [
        "Away: run train: it is away. Rows are kept, and sent when it answers",
        "Away: run train: the service answers again",
    ]


def test_what_a_service_has_not_taken_in_time_is_sent_before_the_next_attempts_rows(service, caplog):
    service.is_away.set()
    log(service, range(5), kill_after_s=0.2)
    why = "nothing has moved for 0.1 s (kill_after_s=0.2)"
    assert f"Away has not taken 5 rows: {why}. They are kept in files." in caplog.text
    assert f"flyteplugins-tracking send {LEFT.absolute()}" in caplog.text
    service.is_away.clear()
    log(service, range(5, 8))
    assert service.numbers == [*range(8)]
    assert "Away: run train: sent 5 rows again that an earlier attempt had logged" in caplog.text
    assert not LEFT.exists()


def test_a_row_has_the_same_id_whenever_it_is_sent(service, monkeypatch):
    def fails_half_way(lines, timeout_s) -> None:
        service.taken += lines[:2]
        raise AwayError("half of it")

    with monkeypatch.context() as patched:
        patched.setattr(service, "send", fails_half_way)
        log(service, range(4), kill_after_s=0.2)
    log(service, [])
    ids = {(line["id"], line["row"]["n"]) for line in service.taken if "row" in line}
    assert sorted(number for _, number in ids) == [*range(4)]


@pytest.mark.parametrize(
    ("rejects", "why"),
    [(lambda number: number == 3, "it is not right"), (lambda number: 1 / (number - 3) < -1, "division by zero")],
    ids=["rejected", "an error of the sink"],
)
def test_a_row_that_cannot_be_sent_costs_no_other_row(service, caplog, rejects, why):
    service.rejects = rejects
    log(service, range(3, 9))
    assert service.numbers == [*range(4, 9)]
    assert caplog.messages == [f"Away: run train: n is rejected, and lost: {why}"]


def test_a_service_that_rejects_all_rows_is_not_asked_for_each(service, caplog):
    asked, service.rejects = [], lambda number: asked.append(number) or True
    service.is_away.set()

    def numbers() -> Iterator[int]:
        yield from range(100)
        service.is_away.clear()  # they are one batch

    log(service, numbers())
    assert len(asked) == 1 + 5
    assert "95 more rows are not sent, and lost" in caplog.text


def test_what_an_earlier_attempt_left_is_called_sent_if_it_was_and_kept_if_not(service, caplog):
    log(None, range(6))
    service.rejects = lambda number: number in (2, 3)
    log(service, [])
    assert service.numbers == [0, 1, 4, 5]
    assert "sent 4 rows again" in caplog.text
    assert [path.suffix for path in LEFT.iterdir()] == [".bad"]


def test_what_memory_has_no_room_for_is_told_and_the_next_attempt_sends_it(service, monkeypatch, caplog):
    with monkeypatch.context() as small:
        small.setattr(outboxes, "MEMORY_BYTES", 2000)
        service.is_away.set()

        def numbers() -> Iterator[int]:
            yield from range(100)
            service.is_away.clear()

        began = time.monotonic()
        log(service, numbers(), kill_after_s=600)
    assert time.monotonic() - began < 300  # it does not wait for what it does not send
    sent = len(service.numbers)
    assert 0 < sent < 20
    assert (service.numbers, kept_in()) == ([*range(sent)], [*range(sent, 100)])
    assert "What is logged from now on is in files" in caplog.text
    why = "more waited than memory has room for"
    assert f"run train has ended, and Away has not taken {100 - sent} rows: {why}. They are kept in" in caplog.text
    log(service, range(100, 103))
    assert service.numbers == [*range(103)]
    assert not LEFT.exists()


def test_a_full_disk_costs_no_row_that_the_service_takes_and_the_others_are_counted(service, monkeypatch, caplog):
    monkeypatch.setattr(outboxes, "_MOST_AT_ONCE", 1)

    def numbers(before: int) -> Iterator[int]:
        yield from range(before)
        with monkeypatch.context() as full:
            fill_the_disk(full)
            yield from range(before, 10)
        wait_until(lambda: len(service.numbers) == min(10, service.enough))

    log(service, numbers(1))
    assert service.numbers == [*range(10)]
    service.taken, service.enough = [], 2
    log(service, numbers(3), kill_after_s=0.2)
    assert "Away has not taken 8 rows: nothing has moved for 0.1 s" in caplog.text
    assert "1 of them are kept in files, and 7 are lost" in caplog.text


def test_a_run_in_files_is_sent_whatever_its_steps_are_and_called_sent_when_it_is(service, monkeypatch):
    steps = (1, "2", 3.0, None, "x", float("inf"), {})
    tracker = Away()

    @tracking_init(tracker=tracker, project="p", id="train", if_unavailable="degrade", kill_after_s=1)
    def train() -> None:
        for number, step in enumerate(steps):
            get_run().log({"n": number}, step)

    train()
    tracker.service = service
    monkeypatch.setattr(send, "find_tracker", lambda _: tracker)
    monkeypatch.setitem(send.SENT_LATER, "away", ())
    service.is_away.set()
    with pytest.raises(TrackerUnavailableError, match="a part of the run could not be sent"):
        send.send_directory(LEFT)
    assert kept_in() == [*range(len(steps))]
    service.is_away.clear()
    assert send.send_directory(LEFT) == f"sent {LEFT} as run train"
    assert (service.numbers, stored(LEFT)) == ([*range(len(steps))], [])


def test_a_run_sends_what_its_own_earlier_attempts_have_left_alone(service):
    """Another user of a working directory may have linked it to another run's."""
    log(None, [0])
    for number, arguments in enumerate([{"id": "other"}, {"project": "q"}], 1):
        log(None, [number], **arguments)
    for path in Path("tracking-offline", "away-other").iterdir():
        shutil.copy(path, LEFT)
    log(service, [9])
    assert (service.numbers, sorted(kept_in())) == ([0, 9], [1, 2])


def test_a_runs_end_that_the_service_has_not_taken_is_left_to_who_sends_it(service, monkeypatch):
    def fail(*_: object) -> None:
        raise AwayError("it is away")

    monkeypatch.setattr(kept.OutboxHandle, "end_run", fail)
    log(service, [0, 1])
    (left,) = stored(LEFT)
    assert (service.numbers, [line["exit_code"] for line in left.lines()]) == ([0, 1], [0])


def test_what_another_process_writes_is_left_to_it(service):
    log(None, [0])
    (journal,) = LEFT.iterdir()
    code = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-u", "-c", code, journal], **pipes) as writer:
        writer.stdout.readline()
        log(service, [9])
        assert (service.numbers, kept_in()) == ([9], [0])
        writer.communicate(b"\n")
    log(service, [10])
    assert (service.numbers, kept_in()) == ([9, 0, 10], [])


def test_a_signal_handler_may_log_while_a_row_is_logged(service, monkeypatch):
    write, during = os.write, []

    def interrupted(file: int, data: bytes) -> int:
        if not during and b'"n":1}' in data:
            during.append(1)
            signal.raise_signal(signal.SIGUSR1)
        return write(file, data)

    before = signal.signal(signal.SIGUSR1, lambda *_: get_run().log({"n": 100}))
    monkeypatch.setattr("flyteplugins_tracking.trackers.journal.os.write", interrupted)
    try:
        log(service, range(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert service.numbers == [0, 1, 100, 2]  # in the order of the journal, which is acknowledged by it


class Clock:
    """Time that passes while somebody sleeps."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def test_the_end_of_a_run_goes_on_as_long_as_rows_are_taken(service, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(outboxes, "_MOST_AT_ONCE", 1)
    monkeypatch.setattr(ending, "time", clock)
    # 500 of the 595 s in which something must move; and a moment in which the end could be given up.
    service.rejects = lambda _: clock.sleep(500) or time.sleep(0.1)
    service.is_away.set()

    def numbers() -> Iterator[int]:
        yield from range(5)
        service.is_away.clear()

    log(service, numbers(), kill_after_s=600)
    assert service.numbers == [*range(5)]
