"""A thread that was joined is gone for the operating system too."""

import os
import threading

import pytest

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.timeout import run_with_timeout

THREADS = 300


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux alone tells of a process's threads")
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


def test_a_thread_that_does_not_end_is_waited_for_as_long_as_asked():
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    assert not threads.join(thread, 0.01)
    assert not run_with_timeout(0.01, ended.wait)
    ended.set()
    assert threads.join(thread)
