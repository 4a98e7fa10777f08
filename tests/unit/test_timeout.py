"""Calls that may never return."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import pytest

from flyteplugins_tracking._util.threads import run_with_timeout

variable: ContextVar[str] = ContextVar("variable", default="none")


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_true_is_returned_when_the_function_has_ended(timeout_s):
    done: list[int] = []
    assert run_with_timeout(timeout_s, done.append, 1)
    assert done == [1]


def test_a_function_that_takes_too_long_goes_on_in_its_thread():
    may_end, has_ended = threading.Event(), threading.Event()

    def wait() -> None:
        may_end.wait(30)
        has_ended.set()

    began = time.monotonic()
    assert not run_with_timeout(0.05, wait)
    assert time.monotonic() - began < 10
    may_end.set()
    assert has_ended.wait(30)


def test_the_function_has_the_callers_context_and_a_named_daemon_thread():
    found = []

    def look() -> None:
        thread = threading.current_thread()
        found.append((variable.get(), thread.name, thread.daemon))

    token = variable.set("callers")
    try:
        assert run_with_timeout(30, look, name="looks")
    finally:
        variable.reset(token)
    assert found == [("callers", "looks", True)]
