"""SIGTERM for functions off the main thread, while that runs an asyncio loop: so Flyte 2 runs a plain task in its pod.

The handler can be installed by the main thread alone, and that has no function of ours to unwind. So the loop installs
it; a thread ends the runs, and signals the main thread again, which then does what the signal would have done.
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

from flyteplugins_tracking._runs.sigterm.main import SIGNAL, TERMINATED, SignalMask, end_in_time, is_watched
from flyteplugins_tracking._runs.sigterm.wakeup import WakeupFd

# A loop that is not blocked runs a callback, and the main thread a handler, within milliseconds.
_ANSWER_S = 1.0
# How long a signal waits for a run that is being opened: it exists at the server already, and would stay "running".
_OPENING_S = 5.0
# How long somebody's handler waits for the runs' end, and then the threads that log for it, at most: see `main`.
_HANDLER_S = 5.0
# What a handler has set off, such as the end of the loop, has so long before a function that logs goes on.
_AFTERMATH_S = 0.2
_POLL_S = 0.005


class _Layer:
    """Our handler, over what was installed when the main thread's loop put it there."""

    def __init__(self, watch: LoopWatch, loop: Any) -> None:
        self.watch = watch
        self.loop = loop
        self.previous: Any = None
        self.is_installed = False
        self.tried = threading.Event()
        self._wakeup: WakeupFd | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.watch.handle(self, signum, frame)

    @property
    def ends_process(self) -> bool:
        """Whether nothing was meant to happen but the process's end."""
        return self.previous is signal.SIG_DFL

    def install(self) -> None:
        """On the loop: be the handler, unless the signal is ignored, unknown to Python, or watched already."""
        previous = signal.getsignal(SIGNAL)
        if previous not in (None, signal.SIG_IGN) and not is_watched():
            self.previous = previous
            signal.signal(SIGNAL, self)
            self._divert()
            self.is_installed = True
        self.tried.set()

    def uninstall(self) -> None:
        """On the loop: put back what was there, unless somebody has put something else there."""
        if self._wakeup is not None:
            self.loop.remove_reader(self._wakeup.reader)
        self.restore()

    def restore(self) -> None:
        """Put it back without the loop: a forked child shares the selector with its parent."""
        if self._wakeup is not None:
            wakeup, self._wakeup = self._wakeup, None
            wakeup.give_back()
            wakeup.close()
        current: Any = signal.getsignal(SIGNAL)
        if current is self:
            signal.signal(SIGNAL, self.previous)

    def act(self, signum: int, frame: FrameType | None) -> None:
        """What the signal would have done."""
        if self.ends_process:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            os._exit(TERMINATED)  # as process 1 of a container, to which the kernel does nothing by default
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(self.previous):
            self.previous(signum, frame)

    def _divert(self) -> None:
        """Come before a handler of the loop's own, which the loop calls as soon as it reads its wakeup fd."""
        wakeup = WakeupFd()
        wakeup.divert()
        if wakeup.has_replaced:
            self._wakeup = wakeup
            self.loop.add_reader(wakeup.reader, self._relay, wakeup)
        else:
            wakeup.give_back()
            wakeup.close()

    def _relay(self, wakeup: WakeupFd) -> None:
        """Other signals go on at once, SIGTERM when it acts."""
        wakeup.forward(bytes(number for number in wakeup.received() if number != SIGNAL))


class LoopWatch:
    """Watches for SIGTERM while other threads than the main one are in decorated functions that have a run."""

    def __init__(self, end_runs: Callable[[int], None]) -> None:
        """`end_runs` ends this process's open runs with a status, from another thread than theirs."""
        self._end_runs = end_runs
        self._mask = SignalMask()
        self._reset()

    def _reset(self) -> None:
        self._depth = 0
        self._layer: _Layer | None = None
        self._timeout_s = 0.0
        self._signalled_at: float | None = None
        # From the signal until it has acted. Plain flags: an event's lock may be held where the handler interrupts.
        self._is_due = self._runs_ended = self._acting = self._acted = False
        # The threads that open or end a run right now.
        self._opening: set[int] = set()
        self._ending: set[int] = set()
        self._left = threading.Event()
        # For the functions' threads. The handler and what the loop calls never take it.
        self._lock = threading.Lock()

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the first of the functions was entered."""
        return self._depth > 0 and self._signalled_at is not None

    def enter(self, package: str | None, timeout_s: float) -> bool:  # noqa: ARG002 no thread is unwound out of its code
        """Begin to watch, for a run that may take `timeout_s` seconds to end.

        The run is opened next, and the signal is put off until then: see `settle`.

        Returns:
            False on the main thread; where that runs no asyncio loop, or one that does not answer; and where the signal
            is ignored, has a handler that Python does not know, or is watched for the main thread.
        """
        if threading.current_thread() is threading.main_thread():
            return False
        self.await_handler()
        with self._lock:
            if self._depth == 0 and not self._install():
                return False
            self._depth += 1
            self._opening.add(threading.get_ident())
            self._timeout_s = max(self._timeout_s, timeout_s)
        return True

    def settle(self) -> None:
        """The run is open: let a signal take effect that was put off till then."""
        self._opening.discard(threading.get_ident())

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Put the signal off while the function's own end is recorded."""
        self.settle()  # a run that could not be opened
        self._ending.add(threading.get_ident())
        try:
            yield
        finally:
            self._ending.discard(threading.get_ident())

    def leave(self) -> None:
        """Cease to watch, when a signal that was put off has taken effect."""
        self.await_handler()
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._uninstall()

    def renew(self) -> None:
        """See `Watch.renew`. Off the main thread the function cannot have installed a handler."""

    def await_handler(self, any_thread: bool = False) -> None:  # noqa: ARG002 each thread's rows would open its run
        """Return when a signal that has come has acted. The handler that acts, on the main thread, may log."""
        is_main = threading.current_thread() is threading.main_thread()
        while self._is_due and not (is_main and self._acting):
            time.sleep(_POLL_S)

    def before_fork(self) -> None:
        """Hold SIGTERM back: until the child has put back what was there, its own would be lost."""
        if isinstance(signal.getsignal(SIGNAL), _Layer):
            self._mask.hold()

    def after_fork_in_parent(self) -> None:
        """See `before_fork`."""
        self._mask.release()

    def after_fork_in_child(self) -> None:
        """See `before_fork`."""
        layer = signal.getsignal(SIGNAL)
        if isinstance(layer, _Layer):
            layer.restore()
        self._reset()
        self._mask.release()

    def _install(self) -> bool:
        loop = _main_threads_loop()
        if loop is None:
            return False
        self._reset_for(layer := _Layer(self, loop))
        with suppress(RuntimeError):  # closed since
            loop.call_soon_threadsafe(layer.install)
            if layer.tried.wait(_ANSWER_S) and layer.is_installed:
                return True
            # After an installation that comes too late: until then the layer only passes on.
            self._uninstall()
        self._layer = None
        return False

    def _reset_for(self, layer: _Layer) -> None:
        lock = self._lock
        self._reset()
        self._lock, self._layer = lock, layer

    def _uninstall(self) -> None:
        layer, self._layer = self._layer, None
        self._left.set()
        if layer is not None:
            with suppress(RuntimeError):  # closed since
                layer.loop.call_soon_threadsafe(layer.uninstall)

    # In the main thread

    def handle(self, layer: _Layer, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._layer is not layer or self._acting:
            layer.act(signum, frame)
        elif self._runs_ended:
            self._acting = True
            layer.act(signum, frame)
            self._acted = True
        elif self._signalled_at is None:
            self._signalled_at, self._is_due = time.monotonic(), True
            threading.Thread(target=self._terminate, args=(layer,), name=__name__, daemon=True).start()

    # In a thread

    def _terminate(self, layer: _Layer) -> None:
        left = self._left
        try:
            self._end_in_time(layer)
            self._runs_ended = True
            self._have_it_act(layer)
        finally:
            self._is_due = False
        self._end_what_opens_again(left)

    def _end_in_time(self, layer: _Layer) -> None:
        _wait_until(lambda: not self._opening, _OPENING_S)
        timeout_s = self._timeout_s + _ANSWER_S if layer.ends_process else min(_HANDLER_S, self._timeout_s)
        until = time.monotonic() + timeout_s
        end_in_time(self._end_runs, timeout_s)
        _wait_until(lambda: not self._ending, until - time.monotonic())

    def _have_it_act(self, layer: _Layer) -> None:
        """Signal the main thread again: a handler acts, raises and is interrupted there as it would have been."""
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        has_returned = _wait_until(lambda: self._acted, _ANSWER_S if layer.ends_process else _HANDLER_S)
        if layer.ends_process:
            os._exit(TERMINATED)
        if has_returned:
            time.sleep(_AFTERMATH_S)

    def _end_what_opens_again(self, left: threading.Event) -> None:
        """What is logged after somebody's handler opens a run again: it ends too, before the launcher kills."""
        since = time.monotonic() - (self._signalled_at or 0.0)
        if not left.wait(max(0.0, self._timeout_s - since)):
            self._end_runs(TERMINATED)


def _main_threads_loop() -> Any:
    """The asyncio loop that the main thread runs right now; None where there is none or it is not asyncio's own."""
    kind = getattr(sys.modules.get("asyncio"), "AbstractEventLoop", ())
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_forever" and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not done() and time.monotonic() < until:
        time.sleep(_POLL_S)
    return done()
