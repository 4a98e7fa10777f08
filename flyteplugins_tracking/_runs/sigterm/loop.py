"""SIGTERM for decorated functions in other threads than the main one, while that runs an asyncio loop.

Flyte 2 runs a plain task in its pod this way. Only the main thread can install a handler, so its loop installs ours. It
has no function of ours to unwind. A thread finishes the runs and signals the main thread again: then the signal has its
usual effect.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from flyteplugins_tracking._runs.sigterm.main import SIGNAL, Postponement, SignalMask, is_watched
from flyteplugins_tracking._runs.sigterm.wakeup import WakeupFd
from flyteplugins_tracking._util.fork import PerProcess
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.threads import run_with_timeout

# A loop that is not blocked runs a callback, and the main thread a handler, within milliseconds.
_ANSWER_S = 1.0
# How long a signal waits for a run that is being opened: it exists at the server, and would stay "running".
_OPENING_S = 5.0
# How long the user's handler waits for the end of the runs; and how long threads that log wait for that handler.
_HANDLER_S = 5.0
# How long they wait for the effects of the handler, such as the end of the loop.
_AFTERMATH_S = 0.2
_POLL_S = 0.005


class _ChainedHandler:
    """Our handler, and the one that it replaces."""

    def __init__(self, watcher: AsyncioSigtermWatcher, loop: Any) -> None:
        self.watcher = watcher
        self.loop = loop
        self.previous: Any = None
        self.is_installed = False
        self.tried = threading.Event()
        self._wakeup: WakeupFd | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.watcher.handle(self, signum, frame)

    @property
    def ends_process(self) -> bool:
        """Whether the signal would only have ended the process."""
        return self.previous is signal.SIG_DFL

    def install(self) -> None:
        """On the loop: install the handler, unless the signal is ignored, already watched, or handled in C."""
        previous = signal.getsignal(SIGNAL)
        if previous not in (None, signal.SIG_IGN) and not is_watched():
            self.previous = previous
            signal.signal(SIGNAL, self)
            self._divert()
            self.is_installed = True
        self.tried.set()

    def uninstall(self) -> None:
        """On the loop: put back the replaced handler, unless somebody has installed another one since."""
        if self._wakeup is not None:
            self.loop.remove_reader(self._wakeup.reader)
        self.restore()

    def restore(self) -> None:
        """Put back the replaced handler, without the loop: a forked child shares its selector with the parent."""
        if self._wakeup is not None:
            wakeup, self._wakeup = self._wakeup, None
            wakeup.give_back()
            wakeup.close()
        current: Any = signal.getsignal(SIGNAL)
        if current is self:
            signal.signal(SIGNAL, self.previous)

    def act(self, signum: int, frame: FrameType | None) -> None:
        """Let the signal have its usual effect."""
        if self.ends_process:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            os._exit(TERMINATED)  # process 1 of a container survives the default action
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(self.previous):
            self.previous(signum, frame)

    def _divert(self) -> None:
        """Come before the loop's own handlers, which it calls as soon as it reads its wakeup fd."""
        wakeup = WakeupFd()
        wakeup.divert()
        if wakeup.has_replaced:
            self._wakeup = wakeup
            self.loop.add_reader(wakeup.reader, self._relay, wakeup)
        else:
            wakeup.give_back()
            wakeup.close()

    def _relay(self, wakeup: WakeupFd) -> None:
        """Forward other signals at once. SIGTERM is forwarded when it takes effect."""
        wakeup.forward(bytes(number for number in wakeup.received() if number != SIGNAL))


class AsyncioSigtermWatcher(PerProcess):
    """Watches for SIGTERM while other threads than the main one are in decorated functions that have a run."""

    def __init__(self, finish_on_signal: Callable[[int], None]) -> None:
        """`finish_on_signal` finishes all open runs of this process with an exit code. Called from another thread."""
        self._finish_on_signal = finish_on_signal
        self._mask = SignalMask()
        self._reset()

    def _reset(self) -> None:
        self._depth = 0
        self._handler: _ChainedHandler | None = None
        self._postponement: Postponement | None = None
        self._timeout_s = 0.0
        self._signalled_at: float | None = None
        # Due from the signal until it has taken effect. Plain flags: the handler may interrupt a thread that holds the
        # lock of an event.
        self._is_due = self._runs_finished = self._acting = self._acted = False
        # The threads that open or close a run right now.
        self._opening: set[int] = set()
        self._closing: set[int] = set()
        self._left = threading.Event()
        # For the functions' threads. The handler, and what the loop calls, must never take it.
        self._lock = threading.Lock()

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the first of the functions was entered."""
        return self._depth > 0 and self._signalled_at is not None

    @property
    def terminated_at(self) -> float | None:
        """When that SIGTERM came, in seconds of `time.monotonic`; None if none has."""
        return self._signalled_at if self._depth > 0 else None

    def was_interrupted(self) -> bool:
        """Return False: SIGINT is for the main thread."""
        return False

    def start(self, package: str | None, timeout_s: float) -> bool:  # noqa: ARG002 no thread is unwound out of its code
        """Watch for one more function's run. Called before the run is opened: the signal waits until `run_opened`.

        Args:
            package: The vendor's package.
            timeout_s: Seconds that finishing the run may take.

        Returns:
            False if SIGTERM cannot be watched: on the main thread; if that runs no asyncio loop, or one that does not
            answer; if the signal is ignored, has a handler that Python does not know, or is watched for a function in
            the main thread.
        """
        if threading.current_thread() is threading.main_thread():
            return False
        self.wait_for_user_handler()
        with self._lock:
            if self._depth == 0 and not self._install():
                return False
            self._depth += 1
            self._opening.add(threading.get_ident())
            self._timeout_s = max(self._timeout_s, timeout_s)
        return True

    def run_opened(self) -> None:
        """Let a signal take effect that has come while the run was opened."""
        self._opening.discard(threading.get_ident())

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Put the signal off while the run is closed."""
        self.run_opened()
        self._closing.add(threading.get_ident())
        try:
            yield
        finally:
            self._closing.discard(threading.get_ident())

    def postpone(self, postponement: Postponement | None) -> None:
        """Have a signal that comes from now on wait for this; for nothing, with None."""
        self._postponement = postponement

    def signal_self(self) -> None:
        """Do nothing: a function outside of the main thread has no other ranks."""

    def stop(self) -> None:
        """Watch for one function less, when a signal that was put off has taken effect."""
        self.run_opened()  # also one that could not be opened
        self.wait_for_user_handler()
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._uninstall()

    def before_row(self) -> None:
        """Do nothing: off the main thread, the function cannot have installed a handler."""

    def wait_for_user_handler(self, any_thread: bool = False) -> None:  # noqa: ARG002 all threads wait
        """Return when a signal that has come has taken effect. Its handler, in the main thread, may log meanwhile."""
        is_main = threading.current_thread() is threading.main_thread()
        while self._is_due and not (is_main and self._acting):
            time.sleep(_POLL_S)

    def before_fork(self) -> None:
        """Block SIGTERM: until the child has put back the old handler, a signal to it would be lost."""
        if isinstance(signal.getsignal(SIGNAL), _ChainedHandler):
            self._mask.block()

    def after_fork_in_parent(self) -> None:
        """Unblock it."""
        self._mask.restore()

    def after_fork_in_child(self) -> None:
        """Put back the handler and the wakeup fd: the runs are the parent's."""
        handler = signal.getsignal(SIGNAL)
        if isinstance(handler, _ChainedHandler):
            handler.restore()
        self._reset()
        self._mask.restore()

    def _install(self) -> bool:
        loop = _main_threads_loop()
        if loop is None:
            return False
        handler, lock = _ChainedHandler(self, loop), self._lock
        self._reset()
        self._lock, self._handler = lock, handler
        with suppress(RuntimeError):  # closed since
            loop.call_soon_threadsafe(handler.install)
            if handler.tried.wait(_ANSWER_S) and handler.is_installed:
                return True
            # The loop may install it later. It is removed then, and only forwards until that.
            self._uninstall()
        self._handler = None
        return False

    def _uninstall(self) -> None:
        handler, self._handler = self._handler, None
        self._left.set()
        if handler is not None:
            with suppress(RuntimeError):  # closed since
                handler.loop.call_soon_threadsafe(handler.uninstall)

    # In the main thread

    def handle(self, handler: _ChainedHandler, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, for our handler."""
        if self._handler is not handler or self._acting:
            handler.act(signum, frame)
        elif self._runs_finished:
            self._acting = True
            handler.act(signum, frame)
            self._acted = True
        elif self._signalled_at is None:
            self._signalled_at, self._is_due = time.monotonic(), True
            threading.Thread(target=self._end_runs, args=(handler,), name=__name__, daemon=True).start()

    # In a thread

    def _end_runs(self, handler: _ChainedHandler) -> None:
        left = self._left
        self._let_functions_end()
        try:
            self._finish_runs(handler)
            self._runs_finished = True
            self._act_in_main_thread(handler)
        finally:
            self._is_due = False
        self._finish_what_opens_again(left)

    def _let_functions_end(self) -> None:
        """Wait as long as a function may end by itself."""
        while (postponement := self._postponement) is not None:
            postponement.on_sigterm()
            if not postponement.lasts():
                return
            time.sleep(_POLL_S)

    def _finish_runs(self, handler: _ChainedHandler) -> None:
        _wait_until(lambda: not self._opening, _OPENING_S)
        timeout_s = self._timeout_s + _ANSWER_S if handler.ends_process else min(_HANDLER_S, self._timeout_s)
        deadline = time.monotonic() + timeout_s
        run_with_timeout(timeout_s, self._finish_on_signal, TERMINATED)
        _wait_until(lambda: not self._closing, deadline - time.monotonic())

    def _act_in_main_thread(self, handler: _ChainedHandler) -> None:
        """Signal the main thread again: the user's handler runs, raises and is interrupted there as without us."""
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        has_returned = _wait_until(lambda: self._acted, _ANSWER_S if handler.ends_process else _HANDLER_S)
        if handler.ends_process:
            os._exit(TERMINATED)
        if has_returned:
            time.sleep(_AFTERMATH_S)

    def _finish_what_opens_again(self, left: threading.Event) -> None:
        """Finish runs that are opened again by rows logged after the user's handler, before the launcher kills."""
        since = time.monotonic() - (self._signalled_at or 0.0)
        if not left.wait(max(0.0, self._timeout_s - since)):
            self._finish_on_signal(TERMINATED)


def _main_threads_loop() -> Any:
    """Return the asyncio loop that the main thread runs right now; None if it runs none, or one of another library."""
    kind = getattr(sys.modules.get("asyncio"), "AbstractEventLoop", ())
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_forever" and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_done()
