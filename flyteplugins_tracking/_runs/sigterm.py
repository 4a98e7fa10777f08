"""SIGTERM: ends the open runs in time, and then lets the signal have its usual effect.

torchrun, Kubernetes and Slurm send SIGTERM, and SIGKILL `kill_after_s` later: 30 s. The service must know the run's
end before that, wherever the main thread is: a Python signal handler does not run while it is in a C call such as a
collective. So a thread, the reader (`_watch`), reads the wakeup fd, to which the interpreter writes each signal
immediately. At the first SIGTERM it starts another thread, the ender (`_serve`), which starts one more for each open
run. `finish_timeout_s` below is `kill_after_s` less 5 s. To end the runs is `end_open_runs(143)`.

Nobody has a handler for SIGTERM (or only torchelastic's agent, which its workers inherit), and the main thread is in
the decorated function:

    main thread   user's code | SystemExit(143): `finally` blocks, with the run open | the call closes it: 143 | exit
    SIGTERM ------> handler --+
                    in a critical section (`_util.signals`) or the vendor's code: sent again each 5 ms until that ends
    the ender       what follows

If the handler runs within 1 s, the main thread runs Python:

    1. The ender waits for the function's end: 6 s, or longer while the run is closed, at most finish_timeout_s + 1 s.
    2. If the end does not come: it ends the runs, until finish_timeout_s + 3 s after the signal at most.
    3. The process is ended with 143, if it still runs 10 s after the function's end; or finish_timeout_s after the
       handler, if the function has not ended. A run that is open again then has 2 s more.

What else is raised on the way (a DataLoader's handler for SIGCHLD does, if its workers are signalled too) changes the
process's end as little as the run's: `stop` raises SystemExit(143). The program's other handlers wait while a run is
opened or closed (`_util.handlers`); the reader has them called after 5 s.

If it does not, the main thread is in a C call:

    1. The ender waits for the handler: 1 s.
    2. It ends the runs: at most finish_timeout_s + 1 s.
    3. It waits for the handler once more: 1 s.
    4. If that has not run: the process is ended with 143, at most finish_timeout_s + 3 s after the signal.

Somebody has a handler, which may do anything:

    main thread   user's code continues              | user's handler | user's code: logging opens the run again
    SIGTERM ------> our handler waits ---------------+
    the ender       ends the runs, and SIGTERM again .................| ends the runs again

    1. The ender ends the runs: at most 5 s, or finish_timeout_s if that is less.
    2. SIGTERM again, each 5 ms until the user's handler has run or the function has ended.
    3. Then, if the function has not ended finish_timeout_s after the first signal: it ends the runs again.

The decorated functions are in other threads, and the main thread runs an asyncio loop: Flyte 2 runs a plain task in its
pod this way. Only the main thread can install a handler, so its loop installs it. It has no decorated function to
unwind: the ender always ends the runs first, and then signals the main thread again, once.

May enter: the handling of signals. Must not: a vendor, a rank, another module's name. A watcher ends runs
through a function that it is given; a tracker sees its `request.watch` and nothing else of this module.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import PerProcess
from flyteplugins_tracking._util.handlers import HANDLERS, behind
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.signals import WakeupFd, patience_s

SIGNAL = signal.SIGTERM

# How long the main thread may take to answer a signal. One that runs Python takes milliseconds; the C calls of a
# training step take longer.
_ANSWER_S = 1.0
# How long a signal waits for the main thread to leave the vendor's code: an exception there would break its locks; and
# the callback of a weak reference: Python ignores an exception there.
_VENDOR_S = 1.0
_CALLBACKS = frozenset({"_weakrefset", "weakref"})
# How long a signal waits for a run that another thread opens: it exists at the server, and would stay "running".
_OPENING_S = 5.0
# How long the run stays open for `finally` blocks. torchelastic's agent sends SIGKILL 30 s after its SIGTERM.
_UNWINDING_S = 6.0
# How long after the signal it stays open at most: a function that has used its grace for its loop leaves no more time.
_LATEST_UNWINDING_S = 26.0
# How long after their timeout the runs may still be ended: SIGKILL comes 5 s after it.
_LATEST_END_S = 3.0
# How long the user's handler waits for the end of the runs: it may have a checkpoint to save. Rows wait as long for it.
_HANDLER_S = 5.0
# How long rows of other threads wait for the effects of the handler, such as the end of the loop.
_AFTERMATH_S = 0.2
# A process that the signal would have ended immediately exits in the end, whatever threads and children nobody stops:
# this long after the function was left; or this long after the runs' timeout, if it has not been left.
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


class Runs(enum.IntEnum):
    """What the ender has done with the open runs. Only that thread changes it."""

    OPEN = 0  # nothing: there was no signal, the function may end by itself, or the main thread unwinds and closes them
    ENDING = 1
    ENDED = 2  # now the signal may take effect
    REOPENING = 3  # it has taken effect: a row opens its run again


class Effect(enum.IntEnum):
    """Whether the signal has had its usual effect. Only the main thread changes it."""

    NONE = 0
    BEGUN = 1
    DONE = 2


class ForkMask(PerProcess, threading.local):
    """Blocks SIGTERM in a thread that forks, and in the child.

    Until the child has put back the old handler and wakeup fd, a signal to it would reach the reader in the parent.
    Registered after the watchers, so that it unblocks the signal when they have done that.
    """

    _old: set[Any] | None = None

    def before_fork(self) -> None:
        self._old = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def after_fork_in_parent(self) -> None:
        if self._old is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old)

    after_fork_in_child = after_fork_in_parent


class _Handler:
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


def is_watched() -> bool:
    """Whether a watcher has its handler installed."""
    return isinstance(signal.getsignal(SIGNAL), _Handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class SigtermWatcher(PerProcess):
    """Watches for SIGTERM while decorated functions are running that have a run.

    Its two subclasses differ in who installs the handler, and in whether the main thread has a function to unwind.
    """

    _depth = 0  # how many functions are watched
    _wakeup: WakeupFd | None = None

    # Whether the last function has ended, and the process ends, by a signal for which nobody has a handler.
    ends_process: bool

    def __init__(self, end_runs: Callable[[int, float], None], on_row: Callable[[], object] = lambda: None) -> None:
        """Does not watch yet.

        Args:
            end_runs: Ends all open runs of this process: with an exit code, within a number of seconds.
            on_row: Called before each row.
        """
        self._end_runs = end_runs
        self._on_row = on_row
        # Held while `_depth` and the installation change. The handler, and what a loop calls, must never take it.
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._timeout_s = 0.0
        self._packages = _CALLBACKS
        self._signalled_at: float | None = None
        self._due_at = 0.0  # since when the signal could have taken effect
        self._answered_at = 0.0  # when our handler has run last
        self._runs = Runs.OPEN
        self._effect = Effect.NONE
        self._postponement: Postponement | None = None
        self._left = threading.Event()  # the last function has ended
        self.ends_process = False

    def after_fork_in_child(self) -> None:
        """Put back the handler and the wakeup fd: the runs are the parent's."""
        self._restore()
        self._close()
        self._depth = 0
        self.__init__(self._end_runs, self._on_row)  # type: ignore[misc]

    # Called by the call of a decorated function

    def start(self, package: str | None, timeout_s: float) -> bool:
        """Watch for one more function's run. Called in a critical section, before the run is opened.

        Args:
            package: The vendor's package, as the tracker imports it.
            timeout_s: Seconds that finishing the run may take.

        Returns:
            False if SIGTERM cannot be watched here: if it is ignored, or if Python does not know its handler.
        """
        with self._lock:
            if self._depth == 0:
                self._reset()
            self._depth += 1
            self._timeout_s = max(self._timeout_s, timeout_s)
            self._packages |= {package} if package else set()
            is_installed = self._depth > 1
            try:
                is_installed = is_installed or self._install()
            finally:
                self._depth -= not is_installed
            return is_installed

    def run_opened(self) -> None:
        """Let a signal take effect that has come while the run was opened."""

    def closing(self) -> AbstractContextManager[None]:
        """Put the signal off while the run is closed."""
        raise NotImplementedError

    def stop(self, error: BaseException | None = None) -> None:
        """Watch for one function less. After the last one, a signal takes effect that was put off.

        Args:
            error: What ends the function. If it ends after a signal that would only have ended the process, it does so
                as by the signal: a handler, a worker that was signalled too, or a `finally` block may have raised.
        """
        raise NotImplementedError

    def postpone(self, postponement: Postponement | None) -> None:
        """Have a signal that comes from now on wait for this; for nothing, with None."""
        self._postponement = postponement

    def was_interrupted(self) -> bool:
        """Whether SIGINT has come since the outermost function was entered: asyncio makes a cancellation of it."""
        return False

    def signal_self(self) -> None:
        """Do as if SIGTERM had come, from any thread, for a function in the main thread: others have no other ranks."""

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the first of the functions was entered."""
        return self.terminated_at is not None

    @property
    def terminated_at(self) -> float | None:
        """When that SIGTERM came, in seconds of `time.monotonic`; None if none has."""
        return self._signalled_at if self._depth > 0 else None

    # Called by trackers

    def before_row(self) -> None:
        """Count a row, and install our handler again if the function has replaced it. Fast: called before each row."""
        self._on_row()

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Wait until the user's handler has run, which may end the process. Called before a run is opened again.

        Args:
            any_thread: Whether to wait in other threads than the main thread too.
        """
        raise NotImplementedError

    # Installation

    def _install(self) -> bool:
        """Install our handler. Returns False if the signal cannot be watched."""
        raise NotImplementedError

    def _current_handler(self) -> _Handler | None:
        """Return the installed handler if it is this watcher's."""
        current: Any = signal.getsignal(SIGNAL)
        return current if isinstance(current, _Handler) and current.watcher is self else None

    def _restore(self) -> _Handler | None:
        """Put back the old handler and wakeup fd. Returns our handler; None if the function has installed another."""
        if self._wakeup is not None:
            self._wakeup.give_back()
        handler = self._current_handler()
        if handler is not None:
            signal.signal(SIGNAL, HANDLERS.stand_in(SIGNAL, handler.previous))
        return handler

    def _close(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.close()

    # In the main thread, when the signal has come

    def handle(self, handler: _Handler, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, for our handler."""
        if self._depth == 0:  # somebody who chained to our handler has kept it, or the loop has still to uninstall it
            self._act(handler, signum, frame)
            return
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
            self._start_ender()
        self._answered_at = time.monotonic()
        if self._postponement is not None:
            self._postponement.on_sigterm()
        if self._current_handler() is not handler:
            # Called by the handler that has replaced it, as Lightning's does to have all ranks end the same batch. That
            # handler decides how the function ends.
            self._effect = Effect.DONE
            if callable(handler.previous):
                handler.previous(signum, frame)
        else:
            self._act_if_ready(handler, frame)

    def _start_ender(self) -> None:
        """Have the ender started, once."""
        raise NotImplementedError

    def _act_if_ready(self, handler: _Handler, frame: FrameType | None) -> None:
        """Let the signal have its effect, unless that has to wait."""
        if self._runs >= Runs.ENDED:
            self._act(handler, SIGNAL, frame)

    def _act(self, handler: _Handler, signum: int, frame: FrameType | None) -> None:
        """Let the signal have its usual effect."""
        is_first, self._effect = self._effect is Effect.NONE, Effect.BEGUN
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(handler.previous):
            HANDLERS.call(handler.previous, signum, frame)
        else:
            self._end_process(is_first)
        self._effect = Effect.DONE

    def _end_process(self, is_first: bool) -> None:
        """Do what the signal does by default."""
        raise NotImplementedError

    # In the ender, when the signal has come

    def _serve(self) -> None:
        """End the runs, let the signal take effect, and end what is opened again after that."""
        if self._signalled_at is None:
            self._signalled_at = self._due_at = time.monotonic()
        signalled_at, left = self._signalled_at, self._left
        try:
            self._let_function_end()
            handler = self._current_handler()
            ends_process = handler is not None and handler.ends_process
            if not self._wait_for_unwinding(ends_process):
                self._runs = Runs.ENDING
                left_s = signalled_at + self._timeout_s + _LATEST_END_S - time.monotonic()
                longest_s = self._timeout_s + _ANSWER_S if ends_process else min(_HANDLER_S, self._timeout_s)
                self._end_open_runs(max(_ANSWER_S, min(longest_s, left_s)))
                if not ends_process:
                    self._due_at = time.monotonic()  # the user's handler has had to wait for the end of the runs
                self._runs = Runs.ENDED
                self._await_effect(handler, ends_process)
        finally:
            self._runs = Runs.REOPENING
        # A row that is logged from here on opens a run again: end it too, before the launcher kills.
        self._signal_until(self._timeout_s - (time.monotonic() - signalled_at))
        if not left.is_set():
            self._end_runs(TERMINATED, self._timeout_s)

    def _let_function_end(self) -> None:
        """Wait as long as the function may end by itself."""
        while (postponement := self._postponement) is not None:
            postponement.on_sigterm()
            if not postponement.lasts() or self._left.wait(_POLL_S):
                return

    def _wait_for_unwinding(self, ends_process: bool) -> bool:  # noqa: ARG002
        """Wait while the main thread leaves the last function. Returns whether it has, and so has closed the runs.

        Args:
            ends_process: Whether the signal would only have ended the process. Then the main thread may unwind now.
        """
        return False

    def _end_open_runs(self, timeout_s: float) -> None:
        self._end_runs(TERMINATED, timeout_s)

    def _await_effect(self, handler: _Handler | None, ends_process: bool) -> None:
        """Have the main thread let the signal take effect, now that the runs have ended."""
        raise NotImplementedError

    def _signal_until(self, timeout_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `is_done` or the end of the last function. Returns False after the timeout."""
        left, deadline = self._left, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if is_done() or left.wait(_POLL_S):
                return True
            self._signal_again()
        return is_done()

    def _signal_again(self) -> None:
        """Send the signal again if our handler has had to put it off."""


class MainThreadWatcher(SigtermWatcher):
    """For functions in the main thread. It installs the handler itself, and a function can be unwound.

    - Nobody else has a handler: if the main thread runs Python, it unwinds by SystemExit(143). Its `finally` blocks run
      with the run still open, and the call closes the run. If the main thread is in a C call, the ender ends the runs
      and the process.
    - Somebody has a handler, which may do anything: the ender ends the runs first, and then has the handler called.
      Logging opens the run again afterwards.
    """

    def _reset(self) -> None:
        super()._reset()
        self._closing_s = 0.0  # how long the signal waits for a run that is being closed
        self._put_in_front_at = 0.0
        self._server: threading.Thread | None = None
        self._interrupted = False  # SIGINT has come
        self._in_sync = threading.Event()

    def start(self, package: str | None, timeout_s: float) -> bool:
        return _is_main() and super().start(package, timeout_s)

    def run_opened(self) -> None:
        self._act_if_put_off(None)

    @contextmanager
    def closing(self) -> Iterator[None]:
        self._closing_s = self._timeout_s + _ANSWER_S
        try:
            yield
        finally:
            self._closing_s = 0.0

    def stop(self, error: BaseException | None = None) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        if self.terminated:  # other threads may have runs too
            self._end_runs(TERMINATED, self._timeout_s)
        handler = None if self._wakeup is None else self._uninstall(self._wakeup)
        self._depth = 0
        if handler is None or self._signalled_at is None:
            return
        self.ends_process = handler.ends_process
        if self._effect is Effect.NONE:
            self._act(handler, SIGNAL, None)
        elif handler.ends_process and error is not None and not isinstance(error, SystemExit):
            raise SystemExit(TERMINATED) from error

    def was_interrupted(self) -> bool:
        if self._depth > 0 and self._wakeup is not None:
            self._in_sync.clear()
            with suppress(BlockingIOError):
                self._wakeup.add(_SYNC)  # it is read after the signals that have come
                self._in_sync.wait(_SYNC_S)
        return self._depth > 0 and self._interrupted

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
        if self._depth == 0 or not _is_main():
            return
        if self._signalled_at is None:
            self._put_in_front_at = time.monotonic()
            self._put_in_front()
        else:
            self._act_if_put_off(sys._getframe(1))

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        if not any_thread and not _is_main():
            return
        while self._runs in (Runs.ENDING, Runs.ENDED) and self._effect is Effect.NONE:
            handler = self._current_handler()
            if handler is None or handler.ends_process or time.monotonic() > self._due_at + _HANDLER_S:
                return
            time.sleep(_POLL_S)

    # Installation

    def _install(self) -> bool:
        if signal.getsignal(SIGNAL) in (None, signal.SIG_IGN):
            return False
        wakeup = WakeupFd()
        self._thread = threading.Thread(
            target=self._watch, args=(wakeup,), name="flyteplugins_tracking.sigterm", daemon=True
        )
        try:
            self._thread.start()
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
            signal.signal(SIGNAL, _Handler(self, previous))

    def _uninstall(self, wakeup: WakeupFd) -> _Handler | None:
        with self._lock:  # the ender signals the main thread no more when our handler is gone
            self._left.set()
            handler = self._restore()
        wakeup.add(_STOP)
        threads.join(self._thread)
        if self._server is not None:
            threads.join(self._server)
        if handler is not None and self._is_due:
            wakeup.forward(bytes([SIGNAL]))
        self._close()
        return handler

    # In the main thread, when the signal has come

    @property
    def _is_due(self) -> bool:
        return self._signalled_at is not None and self._effect is Effect.NONE

    @property
    def _was_put_off(self) -> bool:
        """Whether our handler has run since the signal has been due, and has not let it take effect."""
        return self._is_due and self._answered_at >= self._due_at

    def _start_ender(self) -> None:
        if self._wakeup is not None:
            with suppress(BlockingIOError):
                self._wakeup.add(SIGNAL)  # the function may have set another wakeup fd

    def _act_if_put_off(self, frame: FrameType | None) -> None:
        handler = self._current_handler()
        if handler is not None and self._depth > 0 and self._was_put_off:
            self._act_if_ready(handler, frame)

    def _act_if_ready(self, handler: _Handler, frame: FrameType | None) -> None:
        """Let the signal have its effect, unless the function ends by itself. A user's handler waits for the runs."""
        waited_s = time.monotonic() - self._due_at
        if waited_s < self._closing_s or waited_s < self._patience_s(frame):
            return  # the ender sends the signal again
        if self._postponement is not None and self._postponement.lasts():
            return
        if handler.ends_process or self._runs >= Runs.ENDED:
            self._act(handler, SIGNAL, frame)

    def _patience_s(self, frame: FrameType | None) -> float:
        """Return how long the signal waits for `frame` and its callers: our sections, vendors' code, callbacks.

        Vendors' code is recognized by the package that the tracker imports.
        """
        longest_s = 0.0
        while frame is not None:
            module = f"{frame.f_globals.get('__name__')}."
            is_vendors = any(module.startswith(f"{package}.") for package in self._packages)
            longest_s = max(longest_s, patience_s(frame.f_code), _VENDOR_S if is_vendors else 0.0)
            frame = frame.f_back
        return longest_s

    def _end_process(self, is_first: bool) -> None:
        if self._depth == 0 and self._signalled_at is None:
            signal.signal(SIGNAL, signal.SIG_DFL)
            os.kill(os.getpid(), SIGNAL)
        elif is_first or self._runs >= Runs.ENDED:
            threading.Thread(target=self._exit_in_the_end, daemon=True).start()
            raise SystemExit(TERMINATED)

    def _exit_in_the_end(self) -> None:
        left = None
        while left is not self._left:  # another function may have been entered since
            left = self._left
            if left.wait(self._timeout_s):
                time.sleep(_AFTERWARDS_S)
        self._end_runs(TERMINATED, _OVERTIME_S)  # a `finally` block may have opened a run
        os._exit(TERMINATED)

    # In the reader and the ender

    def _watch(self, wakeup: WakeupFd) -> None:
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
            if _SYNC in signals:
                self._in_sync.set()
            if SIGNAL in signals and self._server is None:
                # In a thread of its own: other signals are forwarded meanwhile.
                self._server = threading.Thread(
                    target=self._serve, name="flyteplugins_tracking.sigterm.end", daemon=True
                )
                self._server.start()

    def _late_at(self) -> float | None:
        """Return until when the program's handlers may be put off for a signal that comes now; None if they are not."""
        return time.monotonic() + HANDLERS.patience_s if HANDLERS.patience_s else None

    def _let_function_end(self) -> None:
        if self._postponement is not None:
            super()._let_function_end()
            self._due_at = time.monotonic()
            self._signal_if_answered()

    def _wait_for_unwinding(self, ends_process: bool) -> bool:
        if ends_process and self._signal_until(_ANSWER_S, self._has_answered):
            since_s = time.monotonic() - (self._signalled_at or 0.0)
            unwinding_s = min(_UNWINDING_S, max(_ANSWER_S, _LATEST_UNWINDING_S - since_s))
            self._signal_until(max(unwinding_s, self._closing_s))
        return self._left.is_set()

    def _await_effect(self, handler: _Handler | None, ends_process: bool) -> None:
        if ends_process:
            if not self._signal_until(_ANSWER_S, self._has_answered):
                os._exit(TERMINATED)
        elif handler is not None:
            self._signal_if_answered()
            since_s = time.monotonic() - (self._signalled_at or 0.0)
            self._signal_until(self._timeout_s - since_s, lambda: self._effect is not Effect.NONE)

    def _has_answered(self) -> bool:
        return self._effect is not Effect.NONE or self._was_put_off

    def _signal_again(self) -> None:
        if self._was_put_off:
            self._signal_main_thread()

    def _signal_if_answered(self) -> None:
        """Send the signal again. If our handler has not run yet, it will: the main thread is in a C call."""
        if self._is_due and self._answered_at:
            self._signal_main_thread()

    def _signal_main_thread(self) -> None:
        """Have the main thread run our handler, also out of a sleep."""
        with self._lock:
            if not self._left.is_set() and self._current_handler() is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


class LoopWatcher(SigtermWatcher):
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
            False also on the main thread; if that runs no asyncio loop, or one that does not answer; and if the signal
            is watched for a function in the main thread.
        """
        if _is_main():
            return False
        self.wait_for_user_handler()
        is_watched = super().start(package, timeout_s)
        if is_watched:
            self._opening.add(threading.get_ident())
        return is_watched

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
        self.wait_for_user_handler()
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._left.set()
                self._uninstall()

    def wait_for_user_handler(self, any_thread: bool = False) -> None:  # noqa: ARG002 all threads wait
        """Wait until a signal that has come has taken effect. Its handler, in the main thread, may log meanwhile."""
        while self._signalled_at is not None and self._runs is not Runs.REOPENING:
            if self._effect is not Effect.NONE and _is_main():
                return
            time.sleep(_POLL_S)

    # Installation

    def _install(self) -> bool:
        self._loop = loop = _main_threads_loop()
        if loop is None:
            return False
        tried = threading.Event()
        with suppress(RuntimeError):  # closed since
            loop.call_soon_threadsafe(self._install_on_loop, loop, tried)
            if tried.wait(_ANSWER_S) and self._current_handler() is not None:
                return True
            self._uninstall()  # the loop may install it later
        return False

    def _uninstall(self) -> None:
        with suppress(RuntimeError):  # closed since
            self._loop.call_soon_threadsafe(self._uninstall_on_loop, self._loop)

    def _install_on_loop(self, loop: Any, tried: threading.Event) -> None:
        """Install our handler, unless the signal is ignored, already watched, or handled in C."""
        previous = signal.getsignal(SIGNAL)
        if previous not in (None, signal.SIG_IGN) and not is_watched():
            signal.signal(SIGNAL, _Handler(self, previous))
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
        threading.Thread(target=self._serve, name="flyteplugins_tracking.sigterm", daemon=True).start()

    def _end_process(self, is_first: bool) -> None:  # noqa: ARG002
        signal.signal(SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), SIGNAL)
        os._exit(TERMINATED)  # process 1 of a container survives the default action

    # In the ender

    def _end_open_runs(self, timeout_s: float) -> None:
        """End the runs that are open, and wait for those that threads open or close."""
        self._signal_until(_OPENING_S, lambda: not self._opening)
        deadline = time.monotonic() + timeout_s
        super()._end_open_runs(timeout_s)
        self._signal_until(deadline - time.monotonic(), lambda: not self._closing)

    def _await_effect(self, handler: _Handler | None, ends_process: bool) -> None:  # noqa: ARG002
        """Signal the main thread again: the user's handler runs, raises and is interrupted there as without us."""
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        has_returned = self._signal_until(
            _ANSWER_S if ends_process else _HANDLER_S, lambda: self._effect is Effect.DONE
        )
        if ends_process:
            os._exit(TERMINATED)
        if has_returned:
            time.sleep(_AFTERMATH_S)


def _main_threads_loop() -> Any:
    """Return the asyncio loop that the main thread runs right now; None if it runs none, or one of another library."""
    kind = getattr(sys.modules.get("asyncio"), "AbstractEventLoop", ())
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_forever" and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
