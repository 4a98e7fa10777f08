"""SIGTERM for functions in the main thread: the listener installs the handler itself, and can unwind a function."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from flyteplugins_tracking._runs.sigterm.base import (
    ANSWER_S,
    CLOSING_S,
    SIGNAL,
    Handler,
    SigtermListener,
    end_process,
    is_main,
)
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.handlers import HANDLERS, behind
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.signals import WakeupFd, patience_s

# How long a signal waits for the main thread to leave the vendor's code: an exception there would break its locks; and
# the callback of a weak reference: Python ignores an exception there.
_VENDOR_S = 1.0
_CALLBACKS = frozenset({"_weakrefset", "weakref"})
# A process that the signal would have ended immediately exits this long after its function, whatever threads and
# children nobody stops; and how long a run that a `finally` block has opened may take to end then.
_AFTERWARDS_S, _OVERTIME_S = 10.0, 2.0
# How often our handler is put in front of one that the function has installed.
_PUT_IN_FRONT_S = 0.1
# Stops the reader: no signal has the number 0. It cannot wait for the pipe to be closed, since a forked child may hold
# it open.
_STOP = 0
# Asks the reader for what it has read so far. Signals have lower numbers.
_SYNC = 255
_SYNC_S = 1.0


class MainThreadListener(SigtermListener):
    """For functions in the main thread. If nobody has a handler, they are unwound by SystemExit(143)."""

    def _reset(self) -> None:
        super()._reset()
        self._closing_s = 0.0  # how long the signal waits for a run that is being closed
        self._put_in_front_at = 0.0
        self._ender: threading.Thread | None = None
        self._interrupted = False  # SIGINT has come
        self._in_sync = threading.Event()

    def start(self, package: str | None, timeout_s: float) -> bool:
        return is_main() and super().start(package, timeout_s)

    def run_opened(self) -> None:
        self._act_if_put_off(None)

    @contextmanager
    def closing(self) -> Iterator[None]:
        self._closing_s = self._timeout_s + ANSWER_S
        try:
            yield
        finally:
            self._closing_s = 0.0

    def stop(self, error: BaseException | None = None) -> None:
        if self._functions > 1:
            self._functions -= 1
            return
        if self.terminated:  # other threads may have runs too
            self._end_runs(self._timeout_s)
        handler = None if self._wakeup is None else self._uninstall(self._wakeup)
        self._functions = 0
        if handler is None or self._signalled_at is None:
            return
        self.ends_process = handler.is_default
        if not self._has_acted:
            self._act(handler, SIGNAL, None)
        # A function may catch the exit, and return.
        elif handler.is_default and not isinstance(error, SystemExit):
            raise SystemExit(TERMINATED) from error

    def await_signals(self) -> None:
        if self._functions > 0 and self._wakeup is not None:
            self._in_sync.clear()
            with suppress(BlockingIOError):
                self._wakeup.add(_SYNC)  # it is read after the signals that have come
                self._in_sync.wait(_SYNC_S)

    def was_interrupted(self) -> bool:
        self.await_signals()
        return self._functions > 0 and self._interrupted

    def signal_self(self) -> None:
        if self._signalled_at is None:
            self._signal_main_thread()

    def before_row(self) -> None:
        """Put our handler before a handler, or an asyncio loop, that the function has installed since.

        A signal that had to wait for a critical section takes effect here: a loop that only logs is nearly always in
        such a section.
        """
        super().before_row()
        if self._signalled_at is None and time.monotonic() < self._put_in_front_at + _PUT_IN_FRONT_S:
            return
        if self._functions == 0 or not is_main():
            return
        if self._signalled_at is None:
            self._put_in_front_at = time.monotonic()
            self._put_in_front()
        else:
            self._act_if_put_off(sys._getframe(1))

    # Installation

    def _install(self) -> bool:
        if signal.getsignal(SIGNAL) in (None, signal.SIG_IGN):
            return False
        wakeup = WakeupFd()
        self._reader = threading.Thread(
            target=self._read_signals, args=(wakeup,), name="flyteplugins_tracking.sigterm", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError:  # there is no thread to be had
            wakeup.close()
            raise
        self._wakeup = wakeup
        self._put_in_front()
        return True

    def _put_in_front(self) -> None:
        if self._wakeup is not None:
            self._wakeup.divert()
        previous = behind(signal.getsignal(SIGNAL))
        if self._current_handler() is None and previous not in (None, signal.SIG_IGN):
            signal.signal(SIGNAL, Handler(self, previous))

    def _uninstall(self, wakeup: WakeupFd) -> Handler | None:
        with self._lock:  # the ender signals the main thread no more when our handler is gone
            self._ended.set()
            handler = self._restore()
        wakeup.add(_STOP)
        threads.join(self._reader)
        if self._ender is not None:
            threads.join(self._ender)
        if handler is not None and self._is_due:
            wakeup.forward(bytes([SIGNAL]))
        self._close()
        return handler

    # In the main thread, when the signal has come

    def _start_ender(self) -> None:
        if self._wakeup is not None:
            with suppress(BlockingIOError):
                self._wakeup.add(SIGNAL)  # the function may have set another wakeup fd

    def _act_if_put_off(self, frame: FrameType | None) -> None:
        handler = self._current_handler()
        if handler is not None and self._functions > 0 and self._was_put_off:
            self._act_if_ready(handler, frame)

    def _act_if_ready(self, handler: Handler, frame: FrameType | None) -> None:
        """Let the signal have its effect, unless the function ends by itself. Else the ender sends it again."""
        waited_s = time.monotonic() - self._due_at
        if waited_s < self._closing_s or waited_s < self._patience_s(frame):
            return
        if self._postponement is not None and self._postponement.lasts():
            return
        if handler.is_default or self._may_act:
            self._act(handler, SIGNAL, frame)

    def _patience_s(self, frame: FrameType | None) -> float:
        """Return how long the signal waits for `frame` and its callers: our sections, vendors' code, callbacks.

        Vendors' code is recognized by the package that the tracker imports.
        """
        longest_s, packages = 0.0, self._packages | _CALLBACKS
        while frame is not None:
            module = f"{frame.f_globals.get('__name__')}."
            is_vendors = any(module.startswith(f"{package}.") for package in packages)
            longest_s = max(longest_s, patience_s(frame.f_code), _VENDOR_S if is_vendors else 0.0)
            frame = frame.f_back
        return longest_s

    def _end_process(self, is_first: bool) -> None:
        if self._functions == 0 and self._signalled_at is None:
            signal.signal(SIGNAL, signal.SIG_DFL)
            os.kill(os.getpid(), SIGNAL)
        elif is_first:
            threading.Thread(target=self._exit_in_the_end, daemon=True).start()
            raise SystemExit(TERMINATED)

    def _exit_in_the_end(self) -> None:
        ended = None
        while ended is not self._ended:  # another function may have been entered since
            ended = self._ended
            ended.wait()
            time.sleep(_AFTERWARDS_S)
        self._end_runs(_OVERTIME_S)
        end_process()

    # In the reader and the ender

    def _read_signals(self, wakeup: WakeupFd) -> None:
        late_at = self._late_at()  # a signal may have come before
        while True:
            signals = wakeup.receive(None if late_at is None else max(0.0, late_at - time.monotonic()))
            if _STOP in signals:
                return
            late_at = late_at or (self._late_at() if signals else None)
            if late_at is not None and time.monotonic() >= late_at:
                HANDLERS.hurry()
                late_at = None
            wakeup.forward(bytes(number for number in signals if number not in (SIGNAL, _SYNC)))
            self._interrupted |= signal.SIGINT in signals
            if SIGNAL in signals:
                self._note_signal()
            if _SYNC in signals:
                self._in_sync.set()
            if SIGNAL in signals and self._ender is None:
                # A thread of its own: other signals are forwarded meanwhile.
                self._ender = threading.Thread(
                    target=self._end_in_time, name="flyteplugins_tracking.sigterm.end", daemon=True
                )
                self._ender.start()

    def _late_at(self) -> float | None:
        """Return until when the program's handlers may be put off for a signal that comes now; None if they are not."""
        return time.monotonic() + HANDLERS.patience_s if HANDLERS.patience_s else None

    def _end_with_process(self) -> None:
        if not self._signal_until(ANSWER_S, self._has_answered):  # the main thread is in a C call
            self._end_open_runs()
            if not self._signal_until(ANSWER_S, self._has_answered):
                end_process()
        if self._signal_until(max(ANSWER_S, self._left_s())):
            return
        self._end_open_runs()
        if not self._closing_s or not self._signal_until(self._left_s() + CLOSING_S):
            end_process()
