"""Waiting for the end of a thread, so that the process may fork after it."""

from __future__ import annotations

import os
import threading
import time

_EXIT_S = 1.0
_POLL_S = 0.0005


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
