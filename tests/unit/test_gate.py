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


class GoneError(Exception):
    """The process of a service has died."""


class Run:
    """A run that notes what happens to it, behind a gate. Rows that do not pass are kept."""

    def __init__(self, **options: Any) -> None:
        self.events: list[Any] = []
        self.kept: list[Any] = []
        options = {"deaths": lambda: (GoneError,), "on_death": lambda _: self.events.append("died"), **options}
        self.gate = Gate("A service", "run-1", **options)
        self.ends, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def log(self, row: object) -> None:
        self.gate.call(lambda: self.events.append(row), lambda: self.kept.append(row))

    def finish(self) -> None:
        self.ends.set()
        assert self.may_end.wait(LONGEST_S)
        self.events.append("end")

    def end(self, **options: Any) -> None:
        self.gate.end(self.finish, lambda: self.events.append([*self.kept]), **options)

    def ending(self, **options: Any) -> threading.Thread:
        """A thread that ends the run, and waits for `may_end`."""
        self.may_end.clear()
        thread = in_thread(lambda: self.gate.end(self.finish, **options))
        assert self.ends.wait(LONGEST_S)
        return thread


def in_thread(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(LONGEST_S)
    assert not thread.is_alive()


def test_rows_pass_until_the_run_ends_and_each_end_sends_those_that_are_kept():
    run = Run()
    run.log(1)
    assert run.gate.call(lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        run.gate.call(lambda: 1 / 0)
    ending = run.ending()
    run.log(2)
    assert (run.events, run.kept) == ([1], [2])
    run.may_end.set()
    joined(ending)
    assert run.gate.call(lambda: "result", lambda: "instead") == "instead"
    run.log(3)
    run.end()
    run.log(4)
    run.end(is_last=True)
    assert (run.gate.state, run.events) == ("finished", [1, "end", [2, 3], [2, 3, 4]])
    assert run.gate.call(lambda: "result") is None


def gone() -> None:
    raise GoneError


@pytest.mark.parametrize(("is_last", "state"), [(False, "ended"), (True, "finished")])
def test_an_error_and_a_death_at_the_end_leave_the_run_ended_and_what_is_kept_is_sent(is_last, state):
    run = Run()
    with pytest.raises(ZeroDivisionError):
        run.gate.end(lambda: 1 / 0, lambda: run.events.append("sent"), is_last=is_last)
    assert (run.gate.state, run.events, run.gate.is_ender) == (state, ["sent"], False)
    run = Run()
    run.gate.end(gone, lambda: run.events.append("sent"), is_last=is_last)
    assert (run.gate.state, run.events) == (state, ["died", "sent"])


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_slow_call_holds_up_others_only_if_one_at_a_time_passes(one_at_a_time):
    run, may_return, is_in = Run(one_at_a_time=one_at_a_time), threading.Event(), threading.Event()

    def slow() -> None:
        is_in.set()
        assert may_return.wait(LONGEST_S)
        run.events.append("slow")

    threads = [in_thread(run.gate.call, slow)]
    assert is_in.wait(LONGEST_S)
    threads.append(in_thread(run.log, 1))
    threads[1].join(0.05 if one_at_a_time else LONGEST_S)
    assert run.events == ([] if one_at_a_time else [1])
    threads.append(in_thread(run.gate.end, run.finish))
    may_return.set()
    for thread in threads:
        joined(thread)
    assert {*run.events, *run.kept} == {"slow", 1, "end"}
    assert run.events.index("slow") < run.events.index("end")


def test_the_end_waits_for_a_call_of_another_thread_and_not_for_one_that_hangs(monkeypatch):
    run, may_return, is_in = Run(), threading.Event(), threading.Event()

    def hangs() -> None:
        is_in.set()
        may_return.wait(LONGEST_S)

    logging = in_thread(run.gate.call, hangs)
    assert is_in.wait(LONGEST_S)
    ending = in_thread(run.gate.end, run.finish)
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

    run.gate.end(finish)
    assert run.events == ["its own", "its helper's"]
    assert not run.gate.is_ender


def test_a_call_of_a_call_passes_while_another_thread_ends_the_run():
    run = Run()

    def outer() -> None:
        ending.append(in_thread(run.gate.end, run.finish))
        while run.gate.state != "ending":
            pass
        run.gate.call(lambda: run.events.append("inner"))
        run.events.append("outer")

    ending: list[threading.Thread] = []
    run.gate.call(outer)
    joined(ending[0])
    assert run.events == ["inner", "outer", "end"]


def test_a_signal_handler_may_log_whatever_the_gate_is_doing():
    run = Run()
    before = signal.signal(signal.SIGUSR1, lambda *_: run.log("of the handler"))
    try:
        with run.gate._changing:
            signal.raise_signal(signal.SIGUSR1)
        run.gate.call(lambda: signal.raise_signal(signal.SIGUSR1))
        run.gate.end(lambda: signal.raise_signal(signal.SIGUSR1))
        run.gate.call(lambda: None, lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (run.events, run.kept) == (["of the handler"] * 3, ["of the handler"])


def test_a_forked_child_is_refused_and_takes_no_lock(caplog):
    run = Run()
    with run.gate._changing, warnings.catch_warnings():  # as another thread of the parent may hold them
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


def test_a_death_in_a_call_ends_the_run_without_its_service_and_the_row_is_kept():
    run = Run()
    run.gate.call(gone, lambda: run.kept.append("row"))
    run.log("next")
    assert (run.gate.state, run.events, run.kept) == ("ended", ["died"], ["row", "next"])
    run.end(is_last=True)
    assert run.events == ["died", ["row", "next"]]
