"""Threads and calls that may never return: who was joined is gone, and who works is waited for."""

from __future__ import annotations

import hashlib
import os
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest
from support.waiting import wait_until

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.threads import run_with_timeout

THREADS = 300
variable: ContextVar[str] = ContextVar("variable", default="none")
SHOWN = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux alone tells of a process's threads")


@SHOWN
def test_a_fork_after_join_meets_no_thread_that_still_exits():
    ids: list[int] = []

    def note_id() -> None:
        ids.append(threading.get_native_id())

    for _ in range(THREADS):
        thread = threading.Thread(target=note_id)
        thread.start()
        assert threads.join(thread)
        assert not os.path.exists(f"/proc/self/task/{ids[-1]}")
        assert run_with_timeout(10, note_id)
        assert not os.path.exists(f"/proc/self/task/{ids[-1]}")
    assert len(ids) == 2 * THREADS


def test_a_thread_that_does_not_end_is_waited_for_as_long_as_asked_and_goes_on():
    may_end, ends = threading.Event(), []
    thread = threading.Thread(target=may_end.wait, daemon=True)
    thread.start()
    assert not threads.join(thread, 0.01)
    assert not run_with_timeout(0.01, lambda: ends.append(may_end.wait(60)))
    may_end.set()
    assert threads.join(thread)
    wait_until(lambda: ends)


def test_the_function_has_the_callers_context():
    found: list[str] = []
    token = variable.set("callers")
    try:
        assert run_with_timeout(30, lambda: found.append(variable.get()))
    finally:
        variable.reset(token)
    assert found == ["callers"]


@SHOWN
def test_a_thread_of_a_library_is_waited_for_until_it_has_let_go_of_what_it_has():
    """It works without the GIL, as torch's threads do, and needs the GIL at the end."""
    has_begun, has_let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("works")
        has_begun.set()
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 500_000)
        has_let_go.set()
        ended.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    has_begun.wait()
    assert not threads.wait_until_asleep("works", 0)
    assert threads.wait_until_asleep("works", 60)
    assert has_let_go.is_set()
    ended.set()
    assert threads.join(thread)
    assert threads.wait_until_asleep("works", 0)  # there is none
