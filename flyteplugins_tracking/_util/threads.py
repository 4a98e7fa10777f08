"""Threads: waiting for the end of one of Python's, until those of a library sleep, and calls that may not return."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextvars import copy_context
from typing import Any, TypeVar

from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import loaded

T = TypeVar("T")

_EXIT_S = 1.0
_POLL_S = 0.0005
_ASLEEP_IN_A_ROW = 3
_ASK_S = 0.25
_LOOK_S = 0.02
_IDLE_IN_A_ROW = 3


def wait_until(is_done: Callable[[], object], timeout_s: float, poll_s: float = 0.1) -> bool:
    """Ask `is_done` again and again, with a pause in between. Returns whether it was so within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


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
    wait_until(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"), _EXIT_S, _POLL_S)
    return True


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
    return join(_started(function, *args, name=name), timeout_s)


def run_while(lasts: Callable[[], bool], function: Callable[..., object], *args: Any) -> bool:
    """Call `function` as `run_with_timeout` does, and ask `lasts` several times a second whether to wait for it.

    Returns:
        Whether the function has ended. If no thread can be started, it is called in this one.
    """
    try:
        thread = _started(function, *args)
    except RuntimeError:
        function(*args)
        return True
    while not join(thread, _ASK_S):
        if not lasts():
            return False
    return True


def _started(function: Callable[..., object], *args: Any, name: str = "") -> threading.Thread:
    thread = threading.Thread(target=copy_context().run, args=(function, *args), name=name or None, daemon=True)
    thread.start()
    return thread


def call_within(timeout_s: float, function: Callable[..., T], *args: Any) -> T:
    """Return what `function` returns, or raise what it raises. It is called as by `run_with_timeout`.

    Raises:
        TimeoutError: It has not ended in time. It continues in its thread.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function(*args))
        except Exception as error:
            errors.append(error)

    run_with_timeout(timeout_s, call)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"not within {timeout_s:g} s")
    return results[0]


def wait_as_at_exit(before: Collection[threading.Thread]) -> None:
    """Wait for the non-daemon threads that are not of `before`, as Python does when it ends.

    Some threads end only because Python ends: those that wait for work of an executor or for the end of the main thread
    are not waited for, and to the others the main thread has ended.
    """
    main, idle = threading.main_thread(), 0
    main.is_alive = lambda: False  # type: ignore[method-assign]
    try:
        while others := [one for one in threading.enumerate() if not one.daemon and one not in before]:
            # An executor's worker looks idle between two pieces of work too.
            idle = idle + 1 if all(_lasts_until_exit(one) for one in others) else 0
            if idle == _IDLE_IN_A_ROW:
                return
            time.sleep(_LOOK_S)
    finally:
        del main.is_alive


def _lasts_until_exit(thread: threading.Thread) -> bool:
    pending = getattr(thread, "pending_work_items", None)  # of a pool of processes
    if pending is not None:
        return not pending
    executors, frame = loaded("concurrent.futures.thread"), sys._current_frames().get(thread.ident or 0)
    if executors is not None and frame is not None and frame.f_code is executors._worker.__code__:
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code is threading.Thread.join.__code__ and frame.f_locals["timeout"] is None:
            return frame.f_locals["self"] is threading.main_thread()
        frame = frame.f_back
    return False


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
