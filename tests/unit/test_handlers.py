"""The program's signal handlers are put off in a section, and nothing of them is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from flyteplugins_tracking._util.handlers import HANDLERS, behind

USED = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCHLD)


class Late(Exception):  # noqa: N818 what a watchdog raises
    """What a handler raises."""


@pytest.fixture(autouse=True)
def handlers_are_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in USED}
    yield
    after = {number: signal.getsignal(number) for number in USED}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not any(behind(handler) is not handler for handler in after.values()), after


@pytest.fixture
def called() -> list[int]:
    return []


@pytest.fixture
def notes(called: list[int]) -> Callable[..., None]:
    def handler(signum: int, _: FrameType | None) -> None:
        called.append(signum)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
    return handler


def raises(signum: int, _: FrameType | None) -> None:
    raise Late(signum)


def put_off(section: object = "section", *, keeps_errors: bool = True) -> BaseException | None:
    return HANDLERS.put_off(section, 5.0, keeps_errors=keeps_errors)


def put_back(section: object = "section", **how: Any) -> None:
    HANDLERS.put_back(section, **how)


def test_signals_are_delivered_behind_the_section_each_once_in_their_order(called, notes):
    put_off()
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
        signal.raise_signal(number)
    assert called == []
    put_back()
    assert called == [signal.SIGUSR2, signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert called == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1]


def test_all_handlers_run_though_several_raise(called, notes):
    signal.signal(signal.SIGALRM, raises)
    signal.signal(signal.SIGCHLD, raises)
    put_off()
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
        signal.raise_signal(number)
    with pytest.raises(Late) as raised:
        put_back()
    assert raised.value.args == (signal.SIGCHLD,)  # as Python has it: the last one, with the first as its context
    assert isinstance(raised.value.__context__, Late)
    assert called == [signal.SIGUSR1]


def test_nothing_is_delivered_where_a_signal_ends_the_process(called, notes):
    put_off()
    signal.raise_signal(signal.SIGUSR1)
    put_back(drops=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGUSR2)  # that of a worker that ends later: its handler would replace the exit
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert called == []
    put_off()  # the program goes on all the same
    put_back()
    assert called == []
    signal.raise_signal(signal.SIGUSR2)
    assert called == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is notes


def test_the_second_ctrl_c_is_delivered_at_once():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    put_off()
    assert HANDLERS.interrupted_at is None
    signal.raise_signal(signal.SIGINT)
    assert HANDLERS.interrupted_at is not None
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        put_back()
    assert HANDLERS.interrupted_at is None


@pytest.mark.parametrize("keeps_errors", [True, False])
def test_handlers_run_when_their_signals_have_waited_long_enough(called, notes, keeps_errors):
    signal.signal(signal.SIGALRM, raises)
    put_off(keeps_errors=keeps_errors)
    signal.raise_signal(signal.SIGUSR1)
    HANDLERS.hurry()
    assert called == [signal.SIGUSR1]
    if keeps_errors:
        signal.raise_signal(signal.SIGALRM)
    else:
        with pytest.raises(Late):  # which a client may drop
            signal.raise_signal(signal.SIGALRM)
    with pytest.raises(Late):
        put_back()
    HANDLERS.hurry()  # too late
    assert called == [signal.SIGUSR1]


def test_a_section_in_another_one_ends_nothing(called, notes):
    put_off("outer")
    put_off("inner")
    signal.raise_signal(signal.SIGUSR1)
    put_back("inner")
    assert called == []
    put_back("outer")
    assert called == [signal.SIGUSR1]


def test_a_handler_that_is_installed_in_the_section_stays_and_may_call_the_one_before(called, notes):
    """As W&B's and Lightning's do."""
    put_off()
    before = signal.getsignal(signal.SIGUSR1)

    def vendors(signum: int, frame: FrameType | None) -> None:
        called.append(-signum)
        before(signum, frame)

    signal.signal(signal.SIGUSR1, vendors)
    put_back()
    assert signal.getsignal(signal.SIGUSR1) is vendors
    signal.raise_signal(signal.SIGUSR1)
    assert called == [-signal.SIGUSR1, signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)  # what it took for the old handler is one
    put_off()
    signal.raise_signal(signal.SIGUSR1)
    put_back()
    assert called == [-signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is notes


def test_what_is_no_handler_of_the_programs_is_left_alone():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    put_off()
    inside = {number: behind(signal.getsignal(number)) for number in signal.valid_signals()}
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    put_back()
    assert inside == before == {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_another_thread_puts_nothing_off(called, notes):
    thread = threading.Thread(target=put_off)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert called == [signal.SIGUSR1]


def test_a_forked_child_has_the_handlers_themselves_and_none_of_the_parents_signals(called, notes):
    context = multiprocessing.get_context("fork")
    seen = context.SimpleQueue()

    def child() -> None:
        is_back = signal.getsignal(signal.SIGUSR1) is notes
        put_back()
        os.kill(os.getpid(), signal.SIGUSR2)
        seen.put((is_back, list(called)))

    put_off()
    signal.raise_signal(signal.SIGUSR1)
    process = context.Process(target=child)
    process.start()
    assert seen.get() == (True, [signal.SIGUSR2])
    process.join()
    put_back()
    assert called == [signal.SIGUSR1]
