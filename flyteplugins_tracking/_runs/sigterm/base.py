"""What both listeners have in common: when the signal takes effect, and when the ender ends the runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

from flyteplugins_tracking._job.watch import WATCH
from flyteplugins_tracking._util.fork import PerProcess
from flyteplugins_tracking._util.handlers import HANDLERS
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.signals import WakeupFd

SIGNAL = signal.SIGTERM

# How long the main thread may take to answer a signal. One that runs Python takes milliseconds; the C calls of a
# training step take longer.
ANSWER_S = 1.0
POLL_S = 0.005
# How long a run that is being closed may take after `finish_timeout_s`: `ending.EndLimit` gives it less.
CLOSING_S = 4.0
# How long the user's handler, which may end the process, waits for the services to be told, and for rows to be sent.
_TELL_S = 1.0
# How long after `finish_timeout_s` the ender waits for runs that are ended: SIGKILL comes 5 s after it.
_LATEST_END_S = 3.0
# The package of torchelastic's agent, whose handler its workers may inherit. This is the only name of a module that a
# signal asks for: that handler is a private function, and nothing else distinguishes it from a handler of the user's.
_ELASTIC = "torch.distributed.elastic."


class Postponement(Protocol):
    """The delay of the signal for a function whose loop ends by itself: it calls `should_stop()`."""

    def on_sigterm(self) -> None:
        """SIGTERM has come. Takes no lock: also called in the signal's handler. May be called more than once."""

    def lasts(self) -> bool:
        """Whether the signal still waits."""


class ForkMask(PerProcess, threading.local):
    """Blocks SIGTERM in a thread that forks, and in the child.

    Until the child has put back the old handler and wakeup fd, a signal to it would reach the reader in the parent.
    Registered after the listeners, so that it unblocks the signal when they have done that.
    """

    _old: set[Any] | None = None

    def before_fork(self) -> None:
        self._old = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def after_fork_in_parent(self) -> None:
        if self._old is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old)

    after_fork_in_child = after_fork_in_parent


class Handler:
    """Our handler, and the one that it replaces."""

    def __init__(self, listener: SigtermListener, previous: Any) -> None:
        self.listener = listener
        self.previous = previous

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.listener.handle(self, signum, frame)

    @property
    def is_default(self) -> bool:
        """Whether the signal would only have ended the process: no handler, or the one of torchelastic's agent."""
        module = getattr(self.previous, "__module__", None) or ""
        return self.previous is signal.SIG_DFL or module.startswith(_ELASTIC)


def is_installed() -> bool:
    """Whether a listener has its handler installed."""
    return isinstance(signal.getsignal(SIGNAL), Handler)


def is_main() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


class SigtermListener(PerProcess, ABC):
    """Listens for SIGTERM while decorated functions are running that have a run.

    Its two subclasses differ in who installs the handler, and in whether the main thread has a function to unwind.
    """

    _functions = 0  # how many are running
    _wakeup: WakeupFd | None = None

    # Whether the last function has ended, and the process ends, by a signal for which nobody has a handler.
    ends_process: bool

    def __init__(
        self,
        end_runs: Callable[[float], object],
        tell_services: Callable[[float], object] = lambda _: None,
        on_row: Callable[[], object] = lambda: None,
    ) -> None:
        """Does not listen yet.

        Args:
            end_runs: Ends all open runs of this process with status 143. Returns after a number of seconds at most.
            tell_services: Prepares them for a handler that may end the process. Returns as `end_runs` does.
            on_row: Called before each row.
        """
        self._end_runs, self._tell_services, self._on_row = end_runs, tell_services, on_row
        # Held while the number of functions and the installation change. The handler, and what a loop calls, must
        # never take it.
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._timeout_s = 0.0
        self._packages: frozenset[str] = frozenset()  # the vendors'
        self._signalled_at: float | None = None
        self._due_at = 0.0  # since when the signal could have taken effect
        self._answered_at = 0.0  # when our handler has run last
        self._may_act = False  # whether the ender lets a handler of the user's be called. Only that thread changes it
        self._has_acted = False  # whether the signal has taken effect. Only the main thread changes it
        self._sent_at: float | None = None  # when the ender has sent the signal, if our handler has not run since
        self._postponement: Postponement | None = None
        self._ended = threading.Event()  # the last function has ended
        self.ends_process = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._functions} functions, terminated={self.terminated})"

    def after_fork_in_child(self) -> None:
        """Put back the handler and the wakeup fd: the runs are the parent's."""
        self._restore()
        self._close()
        self._functions = 0
        self.__init__(self._end_runs, self._tell_services, self._on_row)  # type: ignore[misc]

    # Called by the call of a decorated function

    def start(self, package: str | None, timeout_s: float) -> bool:
        """Listen for one more function's run. Called in a critical section, before the run is opened.

        Args:
            package: The vendor's package, as the tracker imports it.
            timeout_s: Seconds that finishing the run may take.

        Returns:
            False if SIGTERM cannot be listened for here: if it is ignored, or if Python does not know its handler.
        """
        with self._lock:
            if self._functions == 0:
                self._reset()
            self._functions += 1
            self._timeout_s = max(self._timeout_s, timeout_s)
            self._packages |= {package} if package else set()
            can_listen = self._functions > 1
            try:
                can_listen = can_listen or self._install()
            finally:
                if not can_listen:
                    self._functions -= 1
            return can_listen

    def run_opened(self) -> None:
        """Let a signal take effect that has come while the run was opened."""

    @abstractmethod
    def closing(self) -> AbstractContextManager[None]:
        """Put the signal off while the run is closed."""

    @abstractmethod
    def stop(self, error: BaseException | None = None) -> None:
        """Listen for one function less. After the last one, a signal takes effect that was put off.

        Args:
            error: What ends the function. If it ends after a signal that would only have ended the process, it does so
                as by the signal: a handler, a worker that was signalled too, or a `finally` block may have raised.
        """

    def postpone(self, postponement: Postponement | None) -> None:
        """Have a signal that comes from now on wait for this; for nothing, with None."""
        self._postponement = postponement

    def await_signals(self) -> None:
        """Wait until it is known which signals have come: a handler that the function has installed tells nobody."""

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
        return self._signalled_at if self._functions > 0 else None

    # Called by trackers

    def before_row(self) -> None:
        """Count a row, and install our handler again if the function has replaced it. Fast: called before each row."""
        self._on_row()

    # Installation

    @abstractmethod
    def _install(self) -> bool:
        """Install our handler. Returns False if the signal cannot be listened for."""

    def _current_handler(self) -> Handler | None:
        """Return the installed handler if it is this listener's."""
        current: Any = signal.getsignal(SIGNAL)
        return current if isinstance(current, Handler) and current.listener is self else None

    def _restore(self) -> Handler | None:
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

    def handle(self, handler: Handler, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, for our handler."""
        if self._functions == 0:  # somebody who chained to our handler has kept it, or the loop has yet to uninstall it
            self._act(handler, signum, frame)
            return
        if self._note_signal():
            self._start_ender()
        self._answered_at = time.monotonic()
        sent_at, self._sent_at = self._sent_at, None
        if sent_at is not None and self._has_acted:  # it has taken effect before this one came
            return
        if self._postponement is not None:
            self._postponement.on_sigterm()
        if self._current_handler() is not handler:
            # Called by the handler that has replaced it, as Lightning's does to have all ranks end the same batch. That
            # handler decides how the function ends.
            self._has_acted = True
            if callable(handler.previous):
                handler.previous(signum, frame)
        else:
            self._act_if_ready(handler, frame)

    def _note_signal(self) -> bool:
        """Note when the signal came. Returns whether it is the first one."""
        is_first = self._signalled_at is None
        if is_first:
            WATCH.at_sigterm()
            self._signalled_at = self._due_at = time.monotonic()
        return is_first

    @abstractmethod
    def _start_ender(self) -> None:
        """Have the ender started, once."""

    @abstractmethod
    def _act_if_ready(self, handler: Handler, frame: FrameType | None) -> None:
        """Let the signal have its effect, unless that has to wait."""

    def _act(self, handler: Handler, signum: int, frame: FrameType | None) -> None:
        """Let the signal have its usual effect."""
        is_first, self._has_acted = not self._has_acted, True
        if self._wakeup is not None:
            self._wakeup.forward(bytes([signum]))
        if callable(handler.previous):
            HANDLERS.call(handler.previous, signum, frame)
        else:
            self._end_process(is_first)

    @abstractmethod
    def _end_process(self, is_first: bool) -> None:
        """Do what the signal does by default."""

    # In the ender, when the signal has come

    def _end_in_time(self) -> None:
        """Let the signal take effect, and end the runs before the launcher kills, if the functions do not."""
        self._note_signal()
        self._let_function_end()
        handler = self._current_handler()
        if handler is not None and handler.is_default:
            self._end_with_process()
            return
        self._tell_services(_TELL_S)
        self._due_at, self._may_act = time.monotonic(), True
        self._signal_if_answered()
        if not self._signal_until(self._left_s()):
            self._end_open_runs()

    @abstractmethod
    def _end_with_process(self) -> None:
        """End the runs, and the process, which the signal would only have ended."""

    def _end_open_runs(self) -> None:
        """End the runs that are open. Their functions may go on."""
        self._end_runs(max(ANSWER_S, min(self._timeout_s + ANSWER_S, self._left_s() + _LATEST_END_S)))

    def _left_s(self) -> float:
        """Return for how long the runs may stay open from now on, in seconds."""
        return (self._signalled_at or 0.0) + self._timeout_s - time.monotonic()

    def _let_function_end(self) -> None:
        """Wait as long as the function may end by itself."""
        while (postponement := self._postponement) is not None:
            postponement.on_sigterm()
            if not postponement.lasts() or self._ended.wait(POLL_S):
                self._due_at = time.monotonic()
                self._signal_if_answered()
                return

    @property
    def _is_due(self) -> bool:
        return self._signalled_at is not None and not self._has_acted

    @property
    def _was_put_off(self) -> bool:
        """Whether our handler has run since the signal has been due, and has not let it take effect."""
        return self._is_due and self._answered_at >= self._due_at

    def _has_answered(self) -> bool:
        return self._has_acted or self._was_put_off

    def _signal_until(self, timeout_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `is_done` or the end of the last function, and send the signal again if our handler puts it off.

        It is sent again too if the handler does not run: a signal that comes just before the main thread waits for a
        lock does not interrupt that wait.

        Returns:
            False after the timeout.
        """
        ended, deadline = self._ended, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if is_done() or ended.wait(POLL_S):
                return True
            sent_at = self._sent_at  # the handler, which runs in another thread, changes it
            was_missed = sent_at is not None and time.monotonic() >= sent_at + ANSWER_S
            if self._was_put_off or was_missed:
                self._signal_main_thread()
        return is_done()

    def _signal_if_answered(self) -> None:
        """Send the signal again. If our handler has not run yet, it will: the main thread is in a C call."""
        if self._is_due and self._answered_at:
            self._signal_main_thread()

    def _signal_main_thread(self) -> None:
        """Have the main thread run our handler, also out of a sleep."""
        with self._lock:
            if not self._ended.is_set() and self._current_handler() is not None:
                self._sent_at = time.monotonic()
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def end_process() -> None:
    """End this process, wherever its main thread is."""
    os._exit(TERMINATED)
