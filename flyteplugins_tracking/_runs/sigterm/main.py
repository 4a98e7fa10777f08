"""SIGTERM: the open runs are ended in time, and then the signal does what it would have done.

A Python signal handler does not run while the main thread sits in a C call such as a collective. So a thread reads
`signal.set_wakeup_fd`, to which the interpreter's C handler writes wherever the main thread is:

- The signal would end the process: where the main thread runs Python it unwinds by SystemExit(143), its `finally`
  blocks run with the run still open, and the decorator ends the run. Where it does not, the thread ends the run and
  the process.
- Somebody has installed a handler: it may do anything, so the thread ends the run first and has the handler called
  then. What is logged afterwards opens the run again.
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

from flyteplugins_tracking._runs.sigterm.wakeup import WakeupFd
from flyteplugins_tracking._util import critical

SIGNAL = signal.SIGTERM
# What a shell reports of a process that SIGTERM or SIGINT has ended.
TERMINATED = 128 + SIGNAL
INTERRUPTED = 128 + signal.SIGINT

# A main thread that runs Python answers a signal within milliseconds; between the C calls of a training step, in this.
_ANSWER_S = 1.0
# How long a signal waits for the vendor's code to be left: an exception there would leave its locks and tasks askew.
_VENDOR_S = 1.0
# How long `finally` blocks have the run, and somebody's handler waits for its end, at most: torchelastic's agent kills
# 30 s after its SIGTERM, and a handler may have a checkpoint to save.
_UNWINDING_S = 6.0
_HANDLER_S = 5.0
# A process that the signal would have ended at once is ended at last: so long after the function was left, where
# threads and children that nobody stops would keep it, and after its runs' time, where it has not been left.
_AFTERWARDS_S = 10.0
_OVERTIME_S = 2.0
# Ctrl-C is left to Python. A main thread that has not moved for so long sits in a C call, until the agent's SIGKILL.
_INTERRUPT_S = 10.0
_POLL_S = 0.005
_RENEWAL_S = 0.1
# Stops the thread: no signal has the number 0. A forked child may hold the pipe's other end open, so that it would wait
# for its end in vain.
_STOP = 0
# Where torchelastic's agent has its handler. The one name of a module that a signal asks for: the handler is a private
# function there, and nothing else tells it from a handler of the user's.
_ELASTIC = "torch.distributed.elastic."


class SignalMask(threading.local):
    """Holds SIGTERM back in a thread, and in the child that it forks."""

    _old: set[Any] | None = None

    def hold(self) -> None:
        """Block it."""
        self._old = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def release(self) -> None:
        """Put back what was there when it was blocked, if it was."""
        old, self._old = self._old, None
        if old is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


class _Layer:
    """Our handler, over what was installed when it was put there."""

    def __init__(self, watch: Watch, previous: Any) -> None:
        self.watch = watch
        self.previous = previous

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.watch.handle(self, signum, frame)

    @property
    def ends_process(self) -> bool:
        """Whether nothing was meant to happen but the process's end.

        A worker that Elastic forks inherits its agent's handler, which raises.
        """
        module = getattr(self.previous, "__module__", None) or ""
        return self.previous is signal.SIG_DFL or module.startswith(_ELASTIC)


class Watch:
    """Watches for SIGTERM while the main thread is in a decorated function that has a run. Entered once for each."""

    def __init__(self, end_runs: Callable[[int], None]) -> None:
        """`end_runs` ends this process's open runs with a status, from another thread than theirs."""
        self._end_runs = end_runs
        self._depth = 0
        self._wakeup: WakeupFd | None = None
        self._mask = SignalMask()
        self._reset()

    def _reset(self) -> None:
        self._packages: tuple[str, ...] = ()
        self._timeout_s = 0.0
        self._signalled_at: float | None = None
        self._due_at = 0.0  # since when the signal could have taken effect
        self._closing_s = 0.0
        self._renewed_at = 0.0
        self._answered = False
        self._handler_due = False
        self._acted = False
        self._runs_ended = False
        self._terminator: threading.Thread | None = None
        self._left = threading.Event()
        # Held to signal the main thread, so that it is not signalled once the handler is gone.
        self._installed = threading.Lock()

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the outermost function was entered."""
        return self._depth > 0 and self._signalled_at is not None

    def enter(self, package: str | None, timeout_s: float) -> bool:
        """Begin to watch, for a run of the vendor's `package` that may take `timeout_s` seconds to end.

        The caller is a critical section (see `critical`): a signal waits until it has been left, or calls `settle`.

        Args:
            package: What the tracker imports, as `Tracker.package`.
            timeout_s: Seconds.

        Returns:
            False where SIGTERM cannot be watched: off the main thread, where it is ignored, or where a handler is
            installed that Python does not know.
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

    def leave(self) -> None:
        """Cease to watch. A signal that was put off takes effect now."""
        if self._depth > 1:
            self._depth -= 1
            return
        if self.terminated:
            end_in_time(self._end_runs, self._timeout_s)  # those of other threads
        layer = None if self._wakeup is None else self._uninstall(self._wakeup)
        self._depth = 0
        if layer is not None and self._is_due:
            self._act(layer, SIGNAL, None)

    @property
    def _is_due(self) -> bool:
        return self._signalled_at is not None and not self._acted

    def settle(self) -> None:
        """The run is open: let a signal take effect that was put off till then."""
        layer = self._waiting_layer()
        if layer is not None:
            self._take(layer, SIGNAL, None)

    def _waiting_layer(self) -> _Layer | None:
        """Our handler, if a signal has come that it could not act upon yet."""
        is_waiting = self.terminated and self._answered and not self._acted
        return self._layer() if is_waiting else None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Put SIGTERM off while the function's own end is recorded, and the first SIGINT too."""
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

    def renew(self) -> None:
        """Stay in front of a handler, and of an asyncio loop, that the function has installed. Called for each row.

        A signal takes effect here that has found the main thread in a critical section before: a loop that does nothing
        but log is in one nearly always.
        """
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return
        if self._signalled_at is not None:
            layer, frame = self._waiting_layer(), sys._getframe(1)
            if layer is not None and not self._must_wait(frame):
                self._take(layer, SIGNAL, frame)
        elif time.monotonic() >= self._renewed_at + _RENEWAL_S:
            self._renewed_at = time.monotonic()
            self._put_in_front()

    def await_handler(self, any_thread: bool = False) -> None:
        """Return when somebody's handler has run in this thread, or in any, if it is still to run."""
        until = time.monotonic() + _HANDLER_S
        while self._handler_due and (any_thread or threading.current_thread() is threading.main_thread()):
            if time.monotonic() > until:
                self._handler_due = False
            time.sleep(_POLL_S)

    def before_fork(self) -> None:
        """Hold SIGTERM back: until the child has put back what was there, its own would reach the parent's thread."""
        if self._wakeup is not None:
            self._mask.hold()

    def after_fork_in_parent(self) -> None:
        """See `before_fork`."""
        self._mask.release()

    def after_fork_in_child(self) -> None:
        """See `before_fork`."""
        if self._wakeup is not None:
            self._depth = 0
            self._restore(self._wakeup)
            self._close(self._wakeup)
        self.after_fork_in_parent()

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
        if self._layer() is None and previous not in (None, signal.SIG_IGN):
            signal.signal(SIGNAL, _Layer(self, previous))

    def _layer(self) -> _Layer | None:
        """Our handler, where it is the one that is installed."""
        current = signal.getsignal(SIGNAL)
        return current if isinstance(current, _Layer) else None

    def _uninstall(self, wakeup: WakeupFd) -> _Layer | None:
        with self._installed:
            self._left.set()
            layer = self._restore(wakeup)
        wakeup.add(_STOP)
        self._thread.join()
        if self._terminator is not None:
            self._terminator.join()
        if layer is not None and self._is_due:
            wakeup.forward(bytes([SIGNAL]))
        self._close(wakeup)
        return layer

    def _close(self, wakeup: WakeupFd) -> None:
        self._wakeup = None
        wakeup.close()

    def _restore(self, wakeup: WakeupFd) -> _Layer | None:
        """Put back what was there before, unless the function has put something there. Returns our handler if not."""
        wakeup.give_back()
        layer = self._layer()
        if layer is not None:
            signal.signal(SIGNAL, layer.previous)
        return layer

    # In the main thread

    def handle(self, layer: _Layer, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._depth == 0:  # kept by somebody who had chained to it
            self._act(layer, signum, frame)
            return
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
            if self._wakeup is not None:
                with suppress(BlockingIOError):
                    self._wakeup.add(SIGNAL)  # the function may have set another wakeup fd
        self._answered = True
        if self._layer() is not layer:
            # Called by a handler in its place, as Lightning's does, which lets all ranks end the batch together: what
            # becomes of the function is that one's to say.
            self._acted = True
            if callable(layer.previous):
                layer.previous(signum, frame)
        elif not self._must_wait(frame):  # else the thread sends the signal again
            self._take(layer, signum, frame)

    def _take(self, layer: _Layer, signum: int, frame: FrameType | None) -> None:
        if layer.ends_process or self._runs_ended:
            self._act(layer, signum, frame)

    def _must_wait(self, frame: FrameType | None) -> bool:
        waited_s = time.monotonic() - self._due_at
        return waited_s < self._closing_s or waited_s < self._patience_s(frame)

    def _patience_s(self, frame: FrameType | None) -> float:
        """How long the signal waits for what `frame` and its callers are in the middle of: code of ours or a vendor's.

        A vendor's is known by the name that its tracker imports it by.
        """
        longest_s = 0.0
        while frame is not None:
            module = f"{frame.f_globals.get('__name__')}."
            is_vendors = any(module.startswith(f"{package}.") for package in self._packages)
            longest_s = max(longest_s, critical.patience_s(frame.f_code), _VENDOR_S if is_vendors else 0.0)
            frame = frame.f_back
        return longest_s

    def _act(self, layer: _Layer, signum: int, frame: FrameType | None) -> None:
        """What the signal would have done."""
        first, self._acted, self._handler_due = not self._acted, True, False
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(layer.previous):
            layer.previous(signum, frame)
        elif self._depth == 0 and self._signalled_at is None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif first or self._runs_ended:
            threading.Thread(target=self._end_process_at_last, daemon=True).start()
            raise SystemExit(TERMINATED)

    def _end_process_at_last(self) -> None:
        left = None
        while left is not self._left:  # else another function has been entered since
            left = self._left
            if left.wait(self._timeout_s):
                time.sleep(_AFTERWARDS_S)
        end_in_time(self._end_runs, _OVERTIME_S)  # what a `finally` block has opened
        os._exit(TERMINATED)

    # In the thread

    def _watch(self, wakeup: WakeupFd) -> None:
        interrupted_at: object = None
        while True:
            signals = wakeup.receive(_INTERRUPT_S if interrupted_at else None)
            if not signals:
                if interrupted_at == _main_thread_at():
                    self._end_runs(INTERRUPTED)
                interrupted_at = None
                continue
            if _STOP in signals:
                return
            wakeup.forward(bytes(number for number in signals if number != SIGNAL))
            if SIGNAL in signals and self._terminator is None:
                # In a thread of its own: other signals are forwarded meanwhile.
                self._terminator = threading.Thread(target=self._terminate, daemon=True)
                self._terminator.start()
            if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                interrupted_at = interrupted_at or _main_thread_at()

    def _terminate(self) -> None:
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
        layer = self._layer()
        ends = layer is not None and layer.ends_process
        self._handler_due = layer is not None and not ends
        if ends and self._wait(_ANSWER_S, lambda: self._answered):
            self._wait(max(_UNWINDING_S, self._closing_s))
        if self._left.is_set():
            return
        end_in_time(self._end_runs, self._timeout_s + _ANSWER_S if ends else min(_HANDLER_S, self._timeout_s))
        self._due_at = self._due_at if ends else time.monotonic()
        self._runs_ended = True
        if ends and not self._wait(_ANSWER_S, lambda: self._answered):
            os._exit(TERMINATED)
        self._wait(float("inf"), lambda: not self._handler_due)
        # What is logged from here on has opened a run again: it ends too, before the launcher kills.
        self._wait(self._timeout_s - (time.monotonic() - self._signalled_at))
        if not self._left.is_set():
            self._end_runs(TERMINATED)

    def _wait(self, timeout_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the function to be left or something to be `done`; signal again what could not be acted upon."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if done() or self._left.wait(_POLL_S):
                return True
            if self._answered and not self._acted:
                self._signal_again()
        return done()

    def _signal_again(self) -> None:
        """Have the main thread run its handler, out of a sleep too."""
        with self._installed:
            if not self._left.is_set() and self._layer() is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def is_watched() -> bool:
    """Whether the installed handler is a `Watch`'s."""
    return isinstance(signal.getsignal(SIGNAL), _Layer)


def end_in_time(end_runs: Callable[[int], None], timeout_s: float) -> None:
    """End the open runs with 143, in a thread that is not waited for any longer than `timeout_s`."""
    ending = threading.Thread(target=end_runs, args=(TERMINATED,), name="flyteplugins_tracking.ending", daemon=True)
    ending.start()
    ending.join(timeout_s)


def _main_thread_at() -> tuple[int, int]:
    """Where the main thread is: its innermost frame and the instruction there."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return id(frame), frame.f_lasti
