"""SIGTERM for a decorated function in the main thread. The package's docstring draws the sequence.

- Nobody else has a handler: if the main thread runs Python, it unwinds by SystemExit(143). Its `finally` blocks run
  with the run still open, and the decorator closes the run. If the main thread is in a C call, our thread finishes the
  run and ends the process.
- Somebody has a handler, which may do anything: our thread finishes the run first, and then has the handler called.
  Logging opens the run again afterwards.
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
from typing import Any, Protocol

from flyteplugins_tracking._runs.sigterm.wakeup import WakeupFd
from flyteplugins_tracking._util import critical, threads
from flyteplugins_tracking._util.fork import PerProcess
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.threads import run_with_timeout

SIGNAL = signal.SIGTERM

# A main thread that runs Python answers a signal within milliseconds; between the C calls of a training step, in this.
_ANSWER_S = 1.0
# How long a signal waits for the main thread to leave the vendor's code: an exception there would break its locks.
_VENDOR_S = 1.0
# How long the run stays open for `finally` blocks. torchelastic's agent sends SIGKILL 30 s after its SIGTERM.
_UNWINDING_S = 6.0
# It stays open until so long after the signal at most: a function that has ignored its grace leaves no more time.
_LATEST_UNWINDING_S = 26.0
# How long the user's handler waits for the end of the runs. It may have a checkpoint to save.
_HANDLER_S = 5.0
# A process that the signal would have ended at once exits in the end, whatever threads and children nobody stops: this
# long after the function was left; or this long after the runs' timeout, if it has not been left.
_AFTERWARDS_S = 10.0
_OVERTIME_S = 2.0
_POLL_S = 0.005
_PUT_IN_FRONT_S = 0.1
# Stops the thread: no signal has the number 0. The thread cannot wait for the pipe to be closed, since a forked child
# may hold it open.
_STOP = 0
# Asks the thread for what it has read so far. Signals have lower numbers.
_SYNC = 255
_SYNC_S = 1.0
# The package of torchelastic's agent, whose handler its workers may inherit. This is the only name of a module that a
# signal asks for: that handler is a private function, and nothing else distinguishes it from a handler of the user's.
_ELASTIC = "torch.distributed.elastic."


class Postponement(Protocol):
    """The delay of the signal for a function whose loop ends by itself: it calls `should_stop()`."""

    def on_sigterm(self) -> None:
        """SIGTERM has come. Takes no lock: also called in the signal's handler. May be called more than once."""

    def lasts(self) -> bool:
        """Whether the signal still waits."""


class SignalMask(threading.local):
    """Blocks SIGTERM in a thread, and in the child that it forks."""

    _old: set[Any] | None = None

    def block(self) -> None:
        """Block it."""
        self._old = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def restore(self) -> None:
        """Put back the mask from before `block`."""
        old, self._old = self._old, None
        if old is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


class _ChainedHandler:
    """Our handler, and the one that it replaces."""

    def __init__(self, watcher: SigtermWatcher, previous: Any) -> None:
        self.watcher = watcher
        self.previous = previous

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.watcher.handle(self, signum, frame)

    @property
    def ends_process(self) -> bool:
        """Whether the signal would only have ended the process: no handler, or the one of torchelastic's agent."""
        module = getattr(self.previous, "__module__", None) or ""
        return self.previous is signal.SIG_DFL or module.startswith(_ELASTIC)


class SigtermWatcher(PerProcess):
    """Watches for SIGTERM while the main thread is in decorated functions that have a run."""

    def __init__(self, finish_on_signal: Callable[[int], None]) -> None:
        """`finish_on_signal` finishes all open runs of this process with an exit code. Called from another thread."""
        self._finish_on_signal = finish_on_signal
        self._depth = 0  # how many decorated functions the main thread is in
        self._wakeup: WakeupFd | None = None
        self._mask = SignalMask()
        self._reset()

    def _reset(self) -> None:
        self._packages: tuple[str, ...] = ()
        self._timeout_s = 0.0
        self._signalled_at: float | None = None
        self._due_at = 0.0  # since when the signal could have taken effect
        self._closing_s = 0.0  # how long it waits for a run that is being closed
        self._put_in_front_at = 0.0
        self._answered = False  # our handler has run
        self._handler_due = False  # the user's handler is still to run
        self._acted = False  # the signal has taken effect
        self._runs_finished = False
        self._terminator: threading.Thread | None = None
        self._postponement: Postponement | None = None
        self._left = threading.Event()  # the outermost function has ended
        self._interrupted = False  # SIGINT has come
        self._in_sync = threading.Event()
        # Held to signal the main thread, so that it is not signalled once our handler is gone.
        self._installed = threading.Lock()

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the outermost function was entered."""
        return self._depth > 0 and self._signalled_at is not None

    @property
    def terminated_at(self) -> float | None:
        """When that SIGTERM came, in seconds of `time.monotonic`; None if none has."""
        return self._signalled_at if self._depth > 0 else None

    def was_interrupted(self) -> bool:
        """Whether SIGINT has come since the outermost function was entered: asyncio makes a cancellation of it."""
        if self._depth > 0 and self._wakeup is not None:
            self._in_sync.clear()
            with suppress(BlockingIOError):
                self._wakeup.add(_SYNC)  # it is read after the signals that have come
                self._in_sync.wait(_SYNC_S)
        return self._depth > 0 and self._interrupted

    @property
    def _is_due(self) -> bool:
        return self._signalled_at is not None and not self._acted

    @property
    def _is_postponed(self) -> bool:
        return self._postponement is not None and self._postponement.lasts()

    # Called by the call

    def start(self, package: str | None, timeout_s: float) -> bool:
        """Watch for one more function's run. Called in a critical section, before the run is opened.

        Args:
            package: The vendor's package, as the tracker imports it.
            timeout_s: Seconds that finishing the run may take.

        Returns:
            False if SIGTERM cannot be watched: off the main thread, if it is ignored, and if Python does not know the
            handler that is installed.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._depth == 0:
            if signal.getsignal(SIGNAL) in (None, signal.SIG_IGN):
                return False
            self._start_thread()
        self._depth += 1
        if package is not None and package not in self._packages:
            self._packages += (package,)
        self._timeout_s = max(self._timeout_s, timeout_s)
        if self._depth == 1:
            self._put_in_front()
        return True

    def run_opened(self) -> None:
        """Let a signal take effect that has come while the run was opened."""
        handler = self._waiting_handler()
        if handler is not None:
            self._act_if_ready(handler, SIGNAL, None)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Put SIGTERM off while the run is closed, and the first SIGINT too."""
        self._closing_s = self._timeout_s + _ANSWER_S
        interrupts: list[tuple[int, FrameType | None]] = []
        handler = signal.getsignal(signal.SIGINT)

        def put_off(signum: int, frame: FrameType | None) -> None:
            if interrupts and callable(handler):
                handler(signum, frame)
            interrupts.append((signum, frame))

        if callable(handler):
            signal.signal(signal.SIGINT, put_off)
        try:
            yield
        finally:
            self._closing_s = 0.0
            if signal.getsignal(signal.SIGINT) is put_off:
                signal.signal(signal.SIGINT, handler)
        if interrupts and callable(handler):
            handler(*interrupts[0])

    def postpone(self, postponement: Postponement | None) -> None:
        """Have a signal that comes from now on wait for this; for nothing, with None."""
        self._postponement = postponement

    def signal_self(self) -> None:
        """Do as if SIGTERM had come, from any thread. Nothing happens if our handler is not installed."""
        if self._signalled_at is None:
            self._signal_main_thread()

    def stop(self) -> None:
        """Watch for one function less. After the last one, a signal takes effect that was put off."""
        if self._depth > 1:
            self._depth -= 1
            return
        if self.terminated:  # other threads may have runs too
            run_with_timeout(self._timeout_s, self._finish_on_signal, TERMINATED)
        handler = None if self._wakeup is None else self._uninstall(self._wakeup)
        self._depth = 0
        if handler is not None and self._is_due:
            self._act(handler, SIGNAL, None)

    # Called by trackers

    def before_row(self) -> None:
        """Put our handler before a handler, or an asyncio loop, that the function has installed since.

        Trackers call this first for each row. A signal that had to wait for a critical section takes effect here: a
        loop that only logs is nearly always in such a section.
        """
        if self._signalled_at is None and time.monotonic() < self._put_in_front_at + _PUT_IN_FRONT_S:
            return
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return
        if self._signalled_at is None:
            self._put_in_front_at = time.monotonic()
            self._put_in_front()
            return
        handler, frame = self._waiting_handler(), sys._getframe(1)
        if handler is not None and not self._must_wait(frame):
            self._act_if_ready(handler, SIGNAL, frame)

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Return when the user's handler has run, if it has not run yet: it may end the process.

        Called before a run is opened again. Threads other than the main one wait only with `any_thread`.
        """
        until = time.monotonic() + _HANDLER_S
        while self._handler_due and (any_thread or threading.current_thread() is threading.main_thread()):
            if time.monotonic() > until:
                self._handler_due = False
            time.sleep(_POLL_S)

    # Called by os.fork

    def before_fork(self) -> None:
        """Block SIGTERM: until the child has put back the old handler, a signal to it would reach our thread here."""
        if self._wakeup is not None:
            self._mask.block()

    def after_fork_in_parent(self) -> None:
        """Unblock it."""
        self._mask.restore()

    def after_fork_in_child(self) -> None:
        """Put back the handler and the wakeup fd: the runs are the parent's."""
        if self._wakeup is not None:
            self._depth = 0
            self._restore(self._wakeup)
            self._close(self._wakeup)
        self._mask.restore()

    # Installation

    def _start_thread(self) -> None:
        self._reset()
        self._wakeup = WakeupFd()
        self._thread = threading.Thread(
            target=self._watch, args=(self._wakeup,), name="flyteplugins_tracking.sigterm", daemon=True
        )
        self._thread.start()

    def _put_in_front(self) -> None:
        if self._wakeup is not None:
            self._wakeup.divert()
        previous = signal.getsignal(SIGNAL)
        if self._current_handler() is None and previous not in (None, signal.SIG_IGN):
            signal.signal(SIGNAL, _ChainedHandler(self, previous))

    def _current_handler(self) -> _ChainedHandler | None:
        """Return the installed handler if it is ours."""
        current = signal.getsignal(SIGNAL)
        return current if isinstance(current, _ChainedHandler) else None

    def _uninstall(self, wakeup: WakeupFd) -> _ChainedHandler | None:
        with self._installed:
            self._left.set()
            handler = self._restore(wakeup)
        wakeup.add(_STOP)
        threads.join(self._thread)
        if self._terminator is not None:
            threads.join(self._terminator)
        if handler is not None and self._is_due:
            wakeup.forward(bytes([SIGNAL]))
        self._close(wakeup)
        return handler

    def _close(self, wakeup: WakeupFd) -> None:
        self._wakeup = None
        wakeup.close()

    def _restore(self, wakeup: WakeupFd) -> _ChainedHandler | None:
        """Put back the old handler and wakeup fd. Returns our handler; None if the function has installed another."""
        wakeup.give_back()
        handler = self._current_handler()
        if handler is not None:
            signal.signal(SIGNAL, handler.previous)
        return handler

    # In the main thread, when the signal has come

    def handle(self, handler: _ChainedHandler, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, for our handler."""
        if self._depth == 0:  # somebody who chained to our handler has kept it
            self._act(handler, signum, frame)
            return
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
            if self._wakeup is not None:
                with suppress(BlockingIOError):
                    self._wakeup.add(SIGNAL)  # the function may have set another wakeup fd
        self._answered = True
        if self._postponement is not None:
            self._postponement.on_sigterm()
        if self._current_handler() is not handler:
            # Called by the handler that has replaced it, as Lightning's does to have all ranks end the same batch. That
            # handler decides how the function ends.
            self._acted = True
            if callable(handler.previous):
                handler.previous(signum, frame)
        elif not self._must_wait(frame):  # if it must, the thread sends the signal again
            self._act_if_ready(handler, signum, frame)

    def _waiting_handler(self) -> _ChainedHandler | None:
        """Return our handler if it has run and the signal had to wait."""
        return self._current_handler() if self._depth > 0 and self._answered and not self._acted else None

    def _act_if_ready(self, handler: _ChainedHandler, signum: int, frame: FrameType | None) -> None:
        """Let the signal have its effect, unless the function ends by itself. A user's handler waits for the runs."""
        if self._is_postponed:
            return
        if handler.ends_process or self._runs_finished:
            self._act(handler, signum, frame)

    def _must_wait(self, frame: FrameType | None) -> bool:
        waited_s = time.monotonic() - self._due_at
        return waited_s < self._closing_s or waited_s < self._patience_s(frame)

    def _patience_s(self, frame: FrameType | None) -> float:
        """Return how long the signal waits for `frame` and its callers: our critical sections, and vendors' code.

        Vendors' code is recognized by the package that the tracker imports.
        """
        longest_s = 0.0
        while frame is not None:
            module = f"{frame.f_globals.get('__name__')}."
            is_vendors = any(module.startswith(f"{package}.") for package in self._packages)
            longest_s = max(longest_s, critical.patience_s(frame.f_code), _VENDOR_S if is_vendors else 0.0)
            frame = frame.f_back
        return longest_s

    def _act(self, handler: _ChainedHandler, signum: int, frame: FrameType | None) -> None:
        """Let the signal have its usual effect."""
        is_first, self._acted, self._handler_due = not self._acted, True, False
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(handler.previous):
            handler.previous(signum, frame)
        elif self._depth == 0 and self._signalled_at is None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif is_first or self._runs_finished:
            threading.Thread(target=self._exit_in_the_end, daemon=True).start()
            raise SystemExit(TERMINATED)

    def _exit_in_the_end(self) -> None:
        left = None
        while left is not self._left:  # another function may have been entered since
            left = self._left
            if left.wait(self._timeout_s):
                time.sleep(_AFTERWARDS_S)
        run_with_timeout(_OVERTIME_S, self._finish_on_signal, TERMINATED)  # a `finally` block may have opened a run
        os._exit(TERMINATED)

    # In the thread that reads the wakeup fd

    def _watch(self, wakeup: WakeupFd) -> None:
        while True:
            signals = wakeup.receive()
            if _STOP in signals:
                return
            wakeup.forward(bytes(number for number in signals if number not in (SIGNAL, _SYNC)))
            self._interrupted |= signal.SIGINT in signals
            if _SYNC in signals:
                self._in_sync.set()
            if SIGNAL in signals and self._terminator is None:
                # In a thread of its own: other signals are forwarded meanwhile.
                self._terminator = threading.Thread(target=self._end_runs, daemon=True)
                self._terminator.start()

    def _end_runs(self) -> None:
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
        if self._postponement is not None:
            self._let_function_end(self._postponement)
        handler = self._current_handler()
        if handler is not None and handler.ends_process:
            self._finish_and_exit()
        else:
            self._call_user_handler(handler)
        # A row that is logged from here on opens a run again: finish it too, before the launcher kills.
        self._signal_until(self._timeout_s - (time.monotonic() - self._signalled_at))
        if not self._left.is_set():
            self._finish_on_signal(TERMINATED)

    def _let_function_end(self, postponement: Postponement) -> None:
        """Wait as long as the function may end by itself. If it does not, the signal comes again."""
        postponement.on_sigterm()
        while self._is_postponed:
            if self._left.wait(_POLL_S):
                return
        self._due_at = time.monotonic()
        if self._answered and not self._acted:
            self._answered = False  # where the main thread was then says nothing about where it is now
            self._signal_main_thread()

    def _finish_and_exit(self) -> None:
        """Finish the runs and exit, unless the main thread unwinds and closes them itself."""
        if self._signal_until(_ANSWER_S, lambda: self._answered):
            since_s = time.monotonic() - (self._signalled_at or 0.0)
            unwinding_s = min(_UNWINDING_S, max(_ANSWER_S, _LATEST_UNWINDING_S - since_s))
            self._signal_until(max(unwinding_s, self._closing_s))
        if self._left.is_set():
            return
        run_with_timeout(self._timeout_s + _ANSWER_S, self._finish_on_signal, TERMINATED)
        self._runs_finished = True
        if not self._signal_until(_ANSWER_S, lambda: self._answered):
            os._exit(TERMINATED)

    def _call_user_handler(self, handler: _ChainedHandler | None) -> None:
        """Finish the runs, and then have the main thread call the user's handler."""
        self._handler_due = handler is not None
        if self._left.is_set():
            return
        run_with_timeout(min(_HANDLER_S, self._timeout_s), self._finish_on_signal, TERMINATED)
        self._due_at = time.monotonic()
        self._runs_finished = True
        self._signal_until(float("inf"), lambda: not self._handler_due)

    def _signal_until(self, timeout_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `is_done` or the function's end. Returns False after the timeout.

        Meanwhile the signal is sent again, if our handler had to put it off.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if is_done() or self._left.wait(_POLL_S):
                return True
            if self._answered and not self._acted:
                self._signal_main_thread()
        return is_done()

    def _signal_main_thread(self) -> None:
        """Have the main thread run our handler, also out of a sleep."""
        with self._installed:
            if not self._left.is_set() and self._current_handler() is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def is_watched() -> bool:
    """Whether a `SigtermWatcher` has its handler installed."""
    return isinstance(signal.getsignal(SIGNAL), _ChainedHandler)
