"""Waiting for threads: for the end of one of Python's, and until those of a library have nothing to do."""

from __future__ import annotations

import os
import threading
import time

from flyteplugins_tracking._util import proc

_EXIT_S = 1.0
_POLL_S = 0.0005
_ASLEEP_IN_A_ROW = 3


def join(thread: threading.Thread, timeout_s: float | None = None) -> bool:
    """Wait until a thread has ended, for the operating system too.

    Python's own `join` returns before that. At the end of a thread that has looked up a host, or that has got the stack
    of one, the C library takes the resolver's lock. A child that is forked then inherits the lock, which nobody
    releases: it hangs when it looks up a host (glibc 2.36; `__res_thread_freeres` in resolv/res-close.c).

    Args:
        thread: The thread, which has been started.
        timeout_s: Seconds to wait at most for the thread's function; None to wait without a limit.

    Returns:
        Whether the function has ended.
    """
    thread.join(timeout_s)
    if thread.is_alive():
        return False
    deadline = time.monotonic() + _EXIT_S
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return True


def wait_until_asleep(name: str, timeout_s: float) -> bool:
    """Wait until all threads of this process with a name sleep: each time of three, one after the other.

    This function lets go of the GIL in between, so that a thread that waits for it gets it and goes on.

    Args:
        name: The name that the operating system shows, of at most 15 characters.
        timeout_s: Seconds to wait at most.

    Returns:
        Whether they sleep. True where the operating system does not show threads.
    """
    deadline = time.monotonic() + timeout_s
    asleep = 0
    while asleep < _ASLEEP_IN_A_ROW:
        states = {proc.state(thread) for thread in proc.threads(name)}
        if not states:
            return True
        if time.monotonic() > deadline:
            return False
        asleep = asleep + 1 if states == {"S"} else 0
        time.sleep(_POLL_S)
    return True
