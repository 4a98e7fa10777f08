"""The gate of a run: each change of its state, with threads, signal handlers and forked children."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from flyteplugins_tracking.trackers import gate as gates
from flyteplugins_tracking.trackers.gate import Gate

LONGEST_S = 60


class Watch:
    """A watch for SIGTERM whose user's handler has something to do before a run is opened again."""

    terminated = False

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def before_row(self) -> None:
        pass

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        self.events.append("handler")


class GoneError(Exception):
    """The process of a service has died."""


class Run:
    """A run that notes what happens to it, behind a gate."""

    def __init__(self, reopen: Callable[[], object] | None = None, **options: Any) -> None:
        self.events: list[Any] = []
        self.reopen = reopen or (lambda: None)
        options = {"deaths": lambda: (GoneError,), "on_death": lambda _: self.events.append("died"), **options}
        self.gate = Gate("A service", "run-1", Watch(self.events), self._reopen, **options)
        self.ends, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def _reopen(self) -> object:
        self.events.append("reopen")
        return self.reopen()

    @property
    def happened(self) -> list[Any]:
        """What has happened, without the waits for the user's handler."""
        return [event for event in self.events if event != "handler"]

    def log(self, row: object) -> None:
        self.gate.row(lambda: self.events.append(row))

    def finish(self) -> None:
        self.ends.set()
        assert self.may_end.wait(LONGEST_S)
        self.events.append("end")

    def ending(self) -> threading.Thread:
        """A signal's thread that ends the run, and waits for `may_end`."""
        self.may_end.clear()
        thread = in_thread(self.gate.end_early, self.finish)
        assert self.ends.wait(LONGEST_S)
        return thread


def in_thread(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(LONGEST_S)
    assert not thread.is_alive()


def test_an_open_run_lets_rows_and_calls_pass():
    run = Run()
    run.log(1)
    assert run.gate.call(lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        run.gate.call(lambda: 1 / 0)
    run.log(2)
    assert (run.gate.state, run.events) == ("open", [1, 2])


def test_a_row_opens_a_run_again_that_a_signal_has_ended_when_the_users_handler_has_run():
    run = Run()
    run.gate.end_early(run.finish)
    assert run.gate.state == "ended"
    run.log(1)
    assert run.gate.state == "open"
    run.gate.end_early(run.finish)
    assert run.gate.call(lambda: "result") == "result"
    assert run.events == ["end", "handler", "reopen", 1, "end", "handler", "reopen"]


def test_a_run_ends_once_for_several_signals():
    run = Run()
    for _ in range(2):
        run.gate.end_early(run.finish)
    run.gate.finish(run.finish)
    assert (run.gate.state, run.events) == ("finished", ["end"])


def test_rows_are_held_while_the_run_ends_and_pass_first_when_it_is_open_again():
    run = Run()
    ending = run.ending()
    assert run.gate.state == "ending"
    for row in range(3):
        run.log(row)
    assert run.happened == []
    run.may_end.set()
    joined(ending)
    run.log(3)
    assert run.happened == ["end", "reopen", 0, 1, 2, 3]


def test_a_row_is_held_when_the_users_handler_has_run_which_may_end_the_process():
    run = Run()
    ending = run.ending()
    run.log(1)
    assert run.events == ["handler"]
    run.may_end.set()
    joined(ending)
    assert run.events == ["handler", "end"]


@pytest.mark.parametrize("last", ["end_early", "finish"])
def test_rows_that_are_held_are_logged_before_the_next_end(last):
    run = Run()
    ending = run.ending()
    run.log(1)
    run.may_end.set()
    joined(ending)
    getattr(run.gate, last)(run.finish)
    assert run.happened == ["end", "reopen", 1, "end"]


def test_rows_that_come_while_the_function_has_ended_are_lost_with_one_warning(caplog):
    run = Run()
    run.may_end.clear()
    finishing = in_thread(run.gate.finish, run.finish)
    assert run.ends.wait(LONGEST_S)
    run.log(1)
    run.may_end.set()
    joined(finishing)
    run.log(2)
    assert run.gate.call(lambda: "result") is None
    assert (run.gate.state, run.happened) == ("finished", ["end"])
    assert caplog.messages == [f"A service: run run-1 {gates.NOT_OPEN}"]


def test_a_call_waits_for_the_end_and_one_that_may_pass_meanwhile_does_not():
    run = Run()
    ending = run.ending()
    assert run.gate.call(lambda: "at once", while_ending=True) == "at once"
    waiting = in_thread(run.gate.call, lambda: run.events.append("call"))
    waiting.join(0.05)
    assert run.events == ["handler"]
    run.may_end.set()
    joined(ending)
    joined(waiting)
    assert run.events == ["handler", "end", "reopen", "call"]


def test_an_error_of_the_end_leaves_the_run_ended():
    run = Run()
    with pytest.raises(ZeroDivisionError):
        run.gate.end_early(lambda: 1 / 0)
    assert run.gate.state == "ended"


def test_a_run_that_cannot_be_opened_again_is_lost_with_one_warning(caplog):
    run = Run(reopen=lambda: 1 / 0, hint=lambda: "Send it.")
    ending = run.ending()
    run.log("held")
    run.may_end.set()
    joined(ending)
    for row in range(3):
        run.log(row)
    run.gate.finish(run.finish)
    assert (run.gate.state, run.happened) == ("lost", ["end", "reopen"])
    assert caplog.messages == [
        "A service: run run-1 has ended and cannot be opened again. Rows are lost from now on. Send it."
    ]


def test_a_held_row_that_fails_costs_no_other_row(caplog):
    run = Run()
    ending = run.ending()
    run.gate.row(lambda: 1 / 0)
    run.log(1)
    run.may_end.set()
    joined(ending)
    run.gate.finish(run.finish)
    assert run.happened == ["end", "reopen", 1, "end"]
    assert caplog.messages == ["A service: run run-1 could not be logged to. A row is lost"]


def test_a_slow_call_of_one_thread_does_not_hold_up_another():
    run, may_return, is_in = Run(), threading.Event(), threading.Event()

    def slow() -> None:
        is_in.set()
        assert may_return.wait(LONGEST_S)
        run.events.append("slow")

    logging = in_thread(run.gate.row, slow)
    assert is_in.wait(LONGEST_S)
    run.log(1)
    may_return.set()
    joined(logging)
    assert run.events == [1, "slow"]


def test_one_at_a_time_passes_if_the_gate_says_so():
    run, may_return, is_in = Run(one_at_a_time=True), threading.Event(), threading.Event()

    def slow() -> None:
        is_in.set()
        assert may_return.wait(LONGEST_S)
        run.events.append("slow")

    threads = [in_thread(run.gate.row, slow)]
    assert is_in.wait(LONGEST_S)
    threads += [in_thread(run.log, 1), in_thread(run.gate.end_early, run.finish)]
    for thread in threads[1:]:
        thread.join(0.05)
    assert run.events == []
    may_return.set()
    for thread in threads:
        joined(thread)
    run.gate.finish(run.finish)
    assert run.events[0] == "slow"
    assert 1 in run.events  # before the end, or held until the next one


def test_the_end_waits_for_a_call_of_another_thread_and_not_for_one_that_hangs(monkeypatch):
    run, may_return, is_in = Run(), threading.Event(), threading.Event()

    def hangs() -> None:
        is_in.set()
        may_return.wait(LONGEST_S)

    logging = in_thread(run.gate.row, hangs)
    assert is_in.wait(LONGEST_S)
    ending = in_thread(run.gate.end_early, run.finish)
    ending.join(gates._CALLERS_S / 2)
    assert run.events == []
    joined(ending)
    assert run.events == ["end"]
    may_return.set()
    joined(logging)


def test_calls_of_the_ending_thread_and_of_a_thread_that_it_starts_pass():
    run = Run()

    def finish() -> None:
        run.log("its own")
        assert run.gate.is_ender

        def help_it() -> None:
            assert not run.gate.is_ender
            run.gate.join_enders()
            run.log("its helper's")

        joined(in_thread(help_it))

    run.gate.end_early(finish)
    assert run.events == ["its own", "its helper's"]
    assert not run.gate.is_ender


def test_a_call_of_a_call_passes_while_another_thread_ends_the_run():
    run = Run()

    def outer() -> None:
        ending.append(in_thread(run.gate.end_early, run.finish))
        while run.gate.state != "ending":
            pass
        run.gate.call(lambda: run.events.append("inner"))
        run.events.append("outer")

    ending: list[threading.Thread] = []
    run.gate.row(outer)
    joined(ending[0])
    assert run.events == ["inner", "outer", "end"]


def test_a_signal_handler_may_log_whatever_the_gate_is_doing():
    run = Run()
    before = signal.signal(signal.SIGUSR1, lambda *_: run.log("of the handler"))
    try:
        for held in (run.gate._lock, run.gate._changing):
            with held:
                signal.raise_signal(signal.SIGUSR1)
        run.gate.row(lambda: signal.raise_signal(signal.SIGUSR1))
        run.gate.end_early(lambda: signal.raise_signal(signal.SIGUSR1))
        run.reopen = lambda: signal.raise_signal(signal.SIGUSR1)
        run.log("the last")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert run.events == [*["of the handler"] * 4, "handler", "reopen", "of the handler", "the last"]


def test_a_forked_child_is_refused_and_takes_no_lock(caplog):
    run = Run()
    with run.gate._lock, run.gate._changing, warnings.catch_warnings():  # as another thread of the parent may hold them
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            logging = in_thread(run.log, 1)
            logging.join(LONGEST_S)
            is_refused = not logging.is_alive() and run.gate.call(lambda: 1) is None and not run.events
            os._exit(0 if is_refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    run.log(1)
    assert run.events == [1]


def test_a_death_in_a_call_opens_the_run_again_and_repeats_the_call():
    run, alive = Run(), []
    run.reopen = lambda: alive.append(True)

    def call() -> str:
        if not alive:
            raise GoneError
        return "result"

    assert run.gate.call(call) == "result"
    assert run.events == ["died", "handler", "reopen"]
    assert (run.gate.state, run.gate.openings) == ("open", 2)


def test_a_death_that_two_threads_see_counts_once():
    run, both = Run(), threading.Barrier(2)
    calls: list[int] = []

    def dies_once() -> None:
        calls.append(1)
        if len(calls) <= 2:
            both.wait(LONGEST_S)
            raise GoneError
        run.events.append("row")

    threads = [in_thread(run.gate.row, dies_once) for _ in range(2)]
    for thread in threads:
        joined(thread)
    assert [event for event in run.events if event != "handler"] == ["died", "reopen", "row", "row"]


def test_a_death_at_the_end_is_followed_by_another_end():
    run, ends = Run(), []

    def finish() -> None:
        ends.append(1)
        if len(ends) < 3:
            raise GoneError
        run.events.append("end")

    run.gate.end_early(finish, LONGEST_S)
    assert run.events == ["died", "reopen", "died", "reopen", "end"]
    assert run.gate.state == "ended"


def test_a_death_at_the_end_is_not_repaired_for_longer_than_the_end_may_take(caplog):
    run = Run()

    def finish() -> None:
        raise GoneError

    run.gate.finish(finish)
    assert (run.gate.state, run.events) == ("lost", ["died"])
    assert "has ended and cannot be opened again" in caplog.text


def test_a_run_whose_service_has_died_is_ended_by_its_finish():
    run = Run()
    run.gate.mark_dead(GoneError())
    assert run.gate.state == "ended"
    run.gate.finish(run.finish)
    assert run.events == ["died", "reopen", "end"]


def test_a_service_that_dies_at_each_opening_is_given_up(caplog):
    run = Run()

    def reopen() -> None:
        raise GoneError

    run.reopen = reopen
    run.gate.end_early(run.finish)
    run.log(1)
    assert run.events == ["end", "handler", *["reopen", "died"] * 3]
    assert run.gate.state == "lost"
    assert len(caplog.messages) == 1


def test_a_run_that_another_process_opens_again_holds_rows_until_then():
    answers = [False, False, False, True]
    run = Run(reopen=lambda: answers.pop(0))
    run.gate.end_early(run.finish)
    for row in range(2):
        run.log(row)
    assert (run.gate.state, run.gate.open_again()) == ("ended", False)
    assert run.gate.open_again()
    run.log(2)
    assert [event for event in run.events if event not in ("handler", "reopen")] == ["end", 0, 1, 2]
