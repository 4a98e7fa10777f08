"""Signals: functions that an exception out of a signal handler must not leave halfway, and the wakeup fd.

A function is marked as critical where it is written, and recognised by its code object: a move or a new name of its
module changes nothing. A class that is used in a `with` statement marks its `__enter__` and `__exit__`: between these
and the block CPython runs no signal handler. SIGTERM's handler, which is the library's, looks for the mark. Two of the
program's handlers are put off while a run is opened or closed: `HandlersPutOff`.

The wakeup fd is the file to which the interpreter writes the number of each signal, wherever the main thread is.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_patience_s: dict[CodeType, float] = {}


def critical_section(patience_s: float) -> Callable[[F], F]:
    """Mark a function: a signal waits for its end, and for the end of what it calls.

    Args:
        patience_s: How long the signal waits at most, in seconds. After that it interrupts the function.
    """

    def mark(function: F) -> F:
        plain: FunctionType = function  # type: ignore[assignment]
        _patience_s[plain.__code__] = patience_s
        return function

    return mark


def patience_s(code: CodeType) -> float:
    """Return the seconds that a signal waits at most for the function of this code; 0 if it is not marked."""
    return _patience_s.get(code, 0.0)


class HandlersPutOff:
    """Puts off the program's handlers for SIGCHLD and for the first Ctrl-C, which would leave a run half closed.

    A DataLoader's handler for SIGCHLD raises if a worker was killed. A second Ctrl-C is not put off. If the block
    raises, the handlers are not called any more: what they raise would take the place of that.
    """

    def __enter__(self) -> None:
        self._came: dict[int, FrameType | None] = {}
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            found: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)}
            self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
        for number in self._handlers:
            signal.signal(number, self._put_off)

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came:
            self._handlers[number](number, frame)
        self._came[number] = frame

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        put_back = {number for number in self._handlers if signal.getsignal(number) == self._put_off}
        for number in put_back:
            signal.signal(number, self._handlers[number])
        for number, frame in self._came.items():
            if number in put_back and kind is None:
                self._handlers[number](number, frame)


class WakeupFd:
    """A pipe of this library that replaces the process's wakeup fd, such as an asyncio loop's.

    Attributes:
        reader: The end that can be read when a signal has come.
    """

    def __init__(self) -> None:
        """Make the pipe. It receives nothing until `divert`, which the main thread must call, as `give_back`."""
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        # The wakeup fd of another library: its number, to be given back, and a duplicate, to be written to. The number
        # may be another file's by then.
        self._number = self._duplicate = -1

    def divert(self) -> None:
        """Receive the signals from now on. Can be called again, for instance after another wakeup fd was set."""
        current = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if current != self._writer:
            self._remember(current)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for signals, and return whether some have come that are not read."""
        poll = select.poll()  # `select` takes no file of a number above 1023
        poll.register(self.reader, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def received(self) -> bytes:
        """Return the numbers of the signals that have come since the last call."""
        with suppress(BlockingIOError):
            return os.read(self.reader, 512)
        return b""

    def add(self, number: int) -> None:
        """Have this number received, as if the signal had come, unless there is more than enough to be read."""
        with suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def forward(self, signals: bytes) -> None:
        """Pass these numbers on to the wakeup fd that was replaced."""
        if signals and self._duplicate != -1:
            with suppress(OSError):
                os.write(self._duplicate, signals)

    def give_back(self) -> None:
        """Put the replaced wakeup fd back, unless another one was set since, or its number is another file's."""
        current = signal.set_wakeup_fd(-1)
        if current != self._writer:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        elif self._duplicate != -1:
            with suppress(OSError, ValueError):  # closed since
                if os.path.sameopenfile(self._number, self._duplicate):
                    signal.set_wakeup_fd(self._number, warn_on_full_buffer=False)

    def close(self) -> None:
        """Close the pipe. A forked child closes its own copy after `give_back`."""
        for end in (self.reader, self._writer):
            os.close(end)
        self.forget()

    def forget(self) -> None:
        """Keep nothing of the wakeup fd that was replaced. Called when nothing is to be forwarded any more."""
        self._remember(-1)

    def _remember(self, number: int) -> None:
        if self._duplicate != -1:
            os.close(self._duplicate)
        self._number = self._duplicate = -1
        if number != -1:
            with suppress(OSError):  # closed already
                self._number, self._duplicate = number, os.dup(number)
