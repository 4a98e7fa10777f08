"""Calls that may never return: in a thread, for which nobody waits longer than a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


def run_with_timeout(timeout_s: float | None, function: Callable[..., object], *args: Any, name: str = "") -> bool:
    """Call `function` in a daemon thread, and wait for it.

    The thread has a copy of the caller's context. What the function raises is printed, as for any thread.

    Args:
        timeout_s: Seconds to wait at most; None for as long as it takes.
        function: Goes on in its thread after the timeout.
        *args: What it is called with.
        name: The thread's name; by default Python's.

    Returns:
        Whether the function has ended in time.
    """
    thread = threading.Thread(target=copy_context().run, args=(function, *args), name=name or None, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
