"""Calls that may never return: they run in a thread, and the caller waits for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from flyteplugins_tracking._util import threads


def run_with_timeout(timeout_s: float | None, function: Callable[..., object], *args: Any, name: str = "") -> bool:
    """Call `function` in a daemon thread, and wait for it.

    The thread has a copy of the caller's context. What the function raises is printed, as for any thread.

    Args:
        timeout_s: Seconds to wait at most; None to wait without a limit.
        function: The function to call. After the timeout it continues in its thread.
        *args: The function's arguments.
        name: The thread's name. By default, Python chooses one.

    Returns:
        Whether the function ended in time.
    """
    thread = threading.Thread(target=copy_context().run, args=(function, *args), name=name or None, daemon=True)
    thread.start()
    return threads.join(thread, timeout_s)
