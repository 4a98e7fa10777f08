"""The program's signal handlers, put off while a run is opened or closed.

A handler runs between any two instructions of the main thread, and what it raises comes out there: a DataLoader's for
SIGCHLD raises if a worker was killed, a watchdog's for SIGALRM if it is late. In the middle of a run's end, that would
leave the run open, or with a wrong status.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from flyteplugins_tracking._util.fork import PerProcess, register

_NUMBERS = tuple(signal.valid_signals())
_NONE = object()
_PACKAGE = __name__.partition(".")[0]
Handler = Callable[[int, "FrameType | None"], object]


class _StandIn:
    """Is installed while a handler is put off. Whoever has kept it may go on to call it, or install it."""

    def __init__(self, handlers: _Handlers, handler: Handler) -> None:
        self.handlers = handlers
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.handlers.deliver(self.handler, signum, frame)


class _Handlers(PerProcess):
    """The handlers of this process, and the signals that wait for the end of a section of the main thread.

    A signal waits, however often it comes, once, as in the kernel while it is blocked. The second SIGINT does not: the
    user wants to abort. Handlers in C, and the library's own, are not put off.

    Attributes:
        patience_s: How long signals wait at most, if there is a thread that calls `hurry` then. After that the handlers
            run. What they raise comes out at once, or at the end of the section.
        interrupted_at: When the first SIGINT of the section came, in seconds of `time.monotonic`; None if none has.
    """

    patience_s = 0.0
    interrupted_at: float | None = None

    def __init__(self) -> None:
        self._sections: set[object] = set()
        self._stand_ins: dict[int, _StandIn] = {}
        self._waiting: dict[int, tuple[Handler, FrameType | None]] = {}  # in the order in which they have come
        self._hurried: set[int] = set()  # those of them that are sent again
        self._errors: list[BaseException] = []  # what is to come out at the section's end
        self._is_late = False
        self._keeps_errors = False
        self._is_over = False  # the process ends by a signal: but for Ctrl-C, no handler is called any more
        self.interrupted_at = None

    def after_fork_in_child(self) -> None:
        """Put the handlers back. The section, and the signals that wait, are the parent's."""
        stand_ins = self._stand_ins
        self.__init__()  # type: ignore[misc]
        for number, stand_in in stand_ins.items():
            _replace(number, stand_in)

    def put_off(self, section: object, patience_s: float, *, keeps_errors: bool) -> BaseException | None:
        """Put the handlers off until `put_back`. Does nothing in other threads than the main one.

        Args:
            section: What begins. It may be put off in the section of another one.
            patience_s: See the class.
            keeps_errors: Whether what a handler raises after that comes out at the end of the section.

        Returns:
            What a handler has raised before it was put off.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        try:
            if not self._sections:
                self._is_late, self._keeps_errors, self._is_over, self.interrupted_at = False, False, False, None
            self.patience_s = patience_s
            self._keeps_errors |= keeps_errors
            self._sections.add(section)
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                stand_in = self.stand_in(number, handler)
                if stand_in is not handler:
                    signal.signal(number, stand_in)
        except BaseException as error:
            return self.put_off(section, patience_s, keeps_errors=keeps_errors) or error
        return None

    def put_back(self, section: object, *, drops: bool = False) -> None:
        """Put the handlers back, and call those whose signals have come. What they raise comes out here.

        Args:
            section: What ends. If it is in the section of another one, nothing is put back yet.
            drops: Whether to put back and call none, for good: they would not run if the signal that ends the process
                had ended it at once, and what they raise would take the place of the exit.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if self._sections - {section}:
            self._sections.discard(section)
            return
        if drops:
            self.patience_s, self._is_over = 0.0, True
            self._sections.discard(section)
            self._waiting.clear()
            self._errors.clear()
            return
        try:
            self._restore()  # while the signals of those that are not put back yet wait
        finally:
            try:
                self.patience_s, self.interrupted_at = 0.0, None
                self._sections.discard(section)
                self._call_waiting()
            finally:
                if self._errors or self._waiting:
                    self._call_waiting()

    def stand_in(self, number: int, handler: Any) -> Any:
        """Return what to install for a handler now: in a section its stand-in, unless the library's own."""
        module = getattr(handler, "__module__", None) or ""
        is_own = module.partition(".")[0] == _PACKAGE and not isinstance(handler, _StandIn)
        if not self._sections or not callable(handler) or is_own:
            return handler
        self._stand_ins[number] = handler if isinstance(handler, _StandIn) else _StandIn(self, handler)
        return self._stand_ins[number]

    def has_come(self, number: int) -> bool:
        """Whether this signal waits."""
        return number in self._waiting

    def hurry(self) -> None:
        """Have the signals that wait sent again, now that `patience_s` has passed. Called in another thread."""
        self._is_late = bool(self._sections and self._waiting)
        for number in list(self._waiting):
            if signal.getsignal(number) is self._stand_ins.get(number, _NONE):
                self._hurried.add(number)
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def deliver(self, handler: Handler, signum: int, frame: FrameType | None) -> None:
        """Call the handler, or have the signal wait. Called in the main thread, for its stand-in."""
        is_hurried = signum in self._hurried
        self._hurried.discard(signum)
        if is_hurried and self._waiting.pop(signum, None) is None:
            return  # it was called when the section ended
        if self._is_over and not self._sections and signum != signal.SIGINT:
            return
        is_interrupt = signum == signal.SIGINT and not is_hurried
        is_second = is_interrupt and self.interrupted_at is not None
        if is_interrupt and self._sections:
            self.interrupted_at = self.interrupted_at or time.monotonic()
        if not self._sections or is_second or (self._is_late and not self._keeps_errors):
            self.call(handler, signum, frame)
        elif not self._is_late:
            self._waiting.setdefault(signum, (handler, frame))
        else:
            try:
                handler(signum, frame)
            except BaseException as error:
                self._errors.append(error)

    def call(self, handler: Handler, signum: int, frame: FrameType | None) -> None:
        """Call a handler at once. What it raises in an opening comes out at its end too, whatever a client makes of it.

        A user's handler may raise any exception, also one that a client raises if its server does not answer, which is
        an outage: a watchdog's TimeoutError, an OSError.
        """
        try:
            handler(signum, frame)
        except BaseException as error:
            if self._sections and not self._keeps_errors:
                self._errors.append(error)
            raise

    def raise_errors(self) -> None:
        """Raise what a handler has raised in the opening. Called where a client's is translated or dropped."""
        if self._errors and not self._keeps_errors and threading.current_thread() is threading.main_thread():
            raise self._errors[0]

    # Recursions: a handler that has been put back may raise at any point of these, and the rest is done nevertheless.

    def _restore(self) -> None:
        try:
            while self._stand_ins:
                number, stand_in = next(iter(self._stand_ins.items()))
                _replace(number, stand_in)
                self._stand_ins.pop(number, None)
        finally:
            if self._stand_ins:
                self._restore()

    def _call_waiting(self) -> None:
        try:
            while self._errors:
                raise self._errors.pop(0)
            while self._waiting:
                number = next(iter(self._waiting))
                handler, frame = self._waiting.pop(number)
                handler(number, frame)
        finally:
            if self._errors or self._waiting:
                self._call_waiting()


def _replace(number: int, stand_in: _StandIn) -> None:
    """Install the handler instead of its stand-in, unless somebody has installed another one since."""
    current: Any = signal.getsignal(number)
    if current is stand_in:
        signal.signal(number, stand_in.handler)


HANDLERS = register(_Handlers())


def behind(handler: Any) -> Any:
    """Return the handler that a stand-in stands for; any other handler itself."""
    return handler.handler if isinstance(handler, _StandIn) else handler
