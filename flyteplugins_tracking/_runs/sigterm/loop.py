"""SIGTERM for functions in other threads than the main one, while that runs an asyncio loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from flyteplugins_tracking._runs.sigterm.base import (
    ANSWER_S,
    CLOSING_S,
    POLL_S,
    SIGNAL,
    Handler,
    SigtermListener,
    end_process,
    is_installed,
    is_main,
)
from flyteplugins_tracking._util.signals import WakeupFd

# How long a signal waits for a run that another thread opens: it exists at the server, and would stay "running".
_OPENING_S = 5.0
# How long a function's end waits for the user's handler, which the main thread's loop has to call.
_HANDLER_S = 5.0


class LoopListener(SigtermListener):
    """For functions in other threads than the main one, while that runs an asyncio loop, which installs the handler."""

    def _reset(self) -> None:
        super()._reset()
        # The threads that open or close a run right now.
        self._opening: set[int] = set()
        self._closing: set[int] = set()
        self._loop: Any = None

    def start(self, package: str | None, timeout_s: float) -> bool:
        """As for the base class: the signal waits until `run_opened`.

        Returns:
            False also on the main thread; if that runs no asyncio loop, or one that does not answer; and if there is a
            listener for a function in the main thread.
        """
        if is_main():
            return False
        self._await_effect()
        can_listen = super().start(package, timeout_s)
        if can_listen:
            self._opening.add(threading.get_ident())
        return can_listen

    def run_opened(self) -> None:
        self._opening.discard(threading.get_ident())

    @contextmanager
    def closing(self) -> Iterator[None]:
        self.run_opened()
        self._closing.add(threading.get_ident())
        try:
            yield
        finally:
            self._closing.discard(threading.get_ident())

    def stop(self, error: BaseException | None = None) -> None:  # noqa: ARG002 the main thread ends the process
        self.run_opened()  # even if it could not be opened
        self._await_effect()
        with self._lock:
            self._functions -= 1
            if self._functions == 0:
                self._ended.set()
                self._uninstall()

    def _await_effect(self) -> None:
        """Wait until a signal that has come has taken effect: the function has not returned before it."""
        while self._is_due and not (self._may_act and time.monotonic() > self._due_at + _HANDLER_S):
            time.sleep(POLL_S)

    # Installation

    def _install(self) -> bool:
        self._loop = loop = _main_threads_loop()
        if loop is None:
            return False
        tried = threading.Event()
        with suppress(RuntimeError):  # closed since
            loop.call_soon_threadsafe(self._install_on_loop, loop, tried)
            if tried.wait(ANSWER_S) and self._current_handler() is not None:
                return True
            self._uninstall()  # the loop may install it later
        return False

    def _uninstall(self) -> None:
        with suppress(RuntimeError):  # closed since
            self._loop.call_soon_threadsafe(self._uninstall_on_loop, self._loop)

    def _install_on_loop(self, loop: Any, tried: threading.Event) -> None:
        """Install our handler, unless the signal is ignored, already listened for, or handled in C."""
        previous = signal.getsignal(SIGNAL)
        if previous not in (None, signal.SIG_IGN) and not is_installed():
            signal.signal(SIGNAL, Handler(self, previous))
            # Come before the loop's own handlers, which it calls as soon as it reads its wakeup fd.
            wakeup = WakeupFd()
            wakeup.divert()
            if wakeup.has_replaced:
                self._wakeup = wakeup
                loop.add_reader(wakeup.reader, self._relay, wakeup)
            else:
                wakeup.give_back()
                wakeup.close()
        tried.set()

    def _uninstall_on_loop(self, loop: Any) -> None:
        if self._wakeup is not None:
            loop.remove_reader(self._wakeup.reader)
        self._restore()
        self._close()

    def _relay(self, wakeup: WakeupFd) -> None:
        """Forward other signals immediately. SIGTERM is forwarded when it takes effect."""
        wakeup.forward(bytes(number for number in wakeup.received() if number != SIGNAL))

    # In the main thread, when the signal has come

    def _start_ender(self) -> None:
        threading.Thread(target=self._end_in_time, name="flyteplugins_tracking.sigterm", daemon=True).start()

    @property
    def _was_put_off(self) -> bool:
        return self._may_act and super()._was_put_off

    def _act_if_ready(self, handler: Handler, frame: FrameType | None) -> None:
        if self._may_act:
            self._act(handler, SIGNAL, frame)

    def _end_process(self, is_first: bool) -> None:  # noqa: ARG002
        signal.signal(SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), SIGNAL)
        time.sleep(ANSWER_S)  # another thread may take the signal, a moment later
        end_process()  # process 1 of a container survives the default action

    # In the ender

    def _end_with_process(self) -> None:
        self._signal_until(_OPENING_S, lambda: not self._opening)
        self._end_open_runs()
        self._signal_until(max(ANSWER_S, self._left_s() + CLOSING_S), lambda: not self._closing)
        self._may_act = True
        self._signal_main_thread()
        if self._signal_until(ANSWER_S, lambda: self._has_acted):
            time.sleep(2 * ANSWER_S)  # the main thread ends the process
        end_process()


def _main_threads_loop() -> Any:
    """Return the asyncio loop that the main thread runs right now; None if it runs none, or one of another library."""
    kind = getattr(sys.modules.get("asyncio"), "AbstractEventLoop", ())
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_forever" and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
