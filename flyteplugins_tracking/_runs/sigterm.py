"""SIGTERM: ends the open runs in time, and lets the signal have its usual effect.

torchrun, Kubernetes and Slurm send SIGTERM, and SIGKILL `kill_after_s` later: 30 s. The service must know the run's
end before that. The rules:

1. The interpreter writes the number of each signal to the wakeup fd immediately, wherever the main thread is. One
   thread of this module reads it, and ends the runs in time: `_watch`. Nothing else watches.
2. Nobody has a handler for SIGTERM, or only torchelastic's agent, which its workers inherit: ours is installed. It
   raises SystemExit(143) in the main thread: `finally` blocks run with the run open, then the call closes it with 143.
   While a critical section (`_util.signals`), a fork or a destructor is on the stack, the exit waits. If the handler
   does not run within 1 s, the main thread is in a C call: the thread ends the runs with 143, and the process. If
   Python has dropped the exit, and the function still runs after 1 s, it is raised once more.
3. The program has a handler: that is called as ever, at once. The thread tells the services, which takes 1 s at most.
   If the function has not ended `kill_after_s` less 5 s after the signal, the thread ends the runs. What the function
   logs then is kept.
4. The functions run in other threads than the main one, which runs an asyncio loop (Flyte 2), and nobody has a
   handler: nothing can be unwound. The thread ends the runs, and the process.
5. A DataLoader's handler for SIGCHLD is put off while a run is opened or closed, and the first Ctrl-C too
   (`_util.signals`). No other handler of the program is.

With `should_stop()`, the signal waits first, as long as the ranks may still agree and stop by themselves.

This is what a rank with a run does if SIGTERM comes while its main thread is in `all_reduce`, and nobody has a handler:
the interpreter writes 15 to the pipe. The thread reads it (`_read`), notes the time, and has the job's watch look which
ranks have ended before (`_note`). It asks for our handler (`_unwound`, `_poke`), which cannot run before `all_reduce`
returns. After 1 s it has every run ended (`Run.end_early`), each in a thread of its own: that asks which rank has
failed first, sends the rows, and ends the run with 143. Then it calls `os._exit(143)`. If `all_reduce` returns within
the 1 s, our handler runs (`_handle`), and the function is unwound.

May enter: the handling of signals. Must not: a vendor, a rank, another module's name. Runs are ended by functions that
this is given; a tracker sees its `request.sigterm` and nothing else of this module.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

from flyteplugins_tracking._job.watch import WATCH
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import PerProcess
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.signals import WakeupFd, patience_s

SIGNAL = signal.SIGTERM
# Interrupts what the main thread waits in. By default it is ignored, so it does no harm when our handler is gone.
_POKE = signal.SIGURG
# What wakes the thread, beside the signals' numbers.
_WAKE = 0
# How long the main thread may take to answer. One that runs Python takes milliseconds.
_ANSWER_S = 1.0
_POLL_S = 0.005
# How long telling the services may take: the program's handler may end the process meanwhile.
_TELL_S = 1.0
# How long a run that is being closed may take after `kill_after_s` less 5 s: `ending.EndLimit` gives it less.
_CLOSING_S = 4.0
# How long the signal waits for a vendor's code: an exception there would break its locks.
_VENDOR_S = 1.0
# A process that the signal would have ended ends this long after its function, whatever threads nobody stops.
_AFTERWARDS_S = 10.0
# The callbacks of weak references, where Python drops an exception as in a destructor.
_CALLBACKS = frozenset({"weakref", "_weakrefset"})
# The package of torchelastic's agent. Nothing else tells its handler, which is a private function, from a user's.
_ELASTIC = "torch.distributed.elastic."


class Postponement(Protocol):
    """The delay of the signal for a function whose loop ends by itself: it calls `should_stop()`."""

    def on_sigterm(self) -> None:
        """SIGTERM has come. May be called more than once."""

    def lasts(self) -> bool:
        """Whether the signal still waits."""


class _Exit(SystemExit):
    """What our handler raises. It can be referred to weakly: if it is gone and the function runs, it was dropped."""


class Sigterm(PerProcess):
    """Listens for SIGTERM while decorated functions are running that have a run.

    The handler takes no lock: the functions, the handler and the thread only set values that the others read.
    """

    _functions = 0  # how many are running
    _thread: threading.Thread | None = None  # while it listens
    _previous: Any = None  # the handler that ours has replaced

    def __init__(
        self,
        end_runs: Callable[[float], object],
        tell_services: Callable[[float], object],
        before_row: Callable[[], None],
    ) -> None:
        """Does not listen yet.

        Args:
            end_runs: Ends all open runs of this process with status 143. Returns after a number of seconds at most.
            tell_services: Prepares them for a handler that may end the process. Returns as `end_runs` does.
            before_row: Counts a row, and calls `listen_again` now and then.
        """
        self._end_runs, self._tell_services, self.before_row = end_runs, tell_services, before_row
        self._pipe = WakeupFd()
        self._changing = threading.Lock()  # held while a function is added or removed
        self._reading = threading.Lock()  # held until it is known what was read
        self._masks: dict[int, Any] = {}  # the signal masks of the threads that fork right now
        self._reset()

    def _reset(self) -> None:
        self._came: set[int] = set()  # the signals that have come since the first function was entered
        self._signalled_at: float | None = None
        self._due_at = math.inf  # from when on the signal may take effect
        self._answered_at = 0.0  # when our handler has run last
        self._is_over = False  # whether the last function has ended
        self._unwinds = False  # whether the functions run in the main thread
        self._exits: list[weakref.ref[SystemExit]] = []  # those that were raised
        self._closing: set[int] = set()  # the threads that close a run right now
        self._timeout_s = 0.0  # `kill_after_s` less 5 s
        self._packages: frozenset[str] = frozenset()  # the vendors'
        self._postponement: Postponement | None = None
        self.interrupted_at: float | None = None  # when Ctrl-C came while a run is closed

    # A fork. The child puts back the handlers before it gets a signal, which would reach the parent's thread.

    def before_fork(self) -> None:
        if self._thread is not None:
            self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def after_fork_in_parent(self) -> None:
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_fork_in_child(self) -> None:
        """Put back the handlers and the wakeup fd: the runs are the parent's."""
        mask = self._masks.get(threading.get_ident())
        if self._thread is not None:
            self._restore()
        self._pipe.close()
        self._functions, self._thread = 0, None
        self.__init__(self._end_runs, self._tell_services, self.before_row)  # type: ignore[misc]
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Called by the call of a decorated function

    def start(self, package: str | None, timeout_s: float) -> bool:
        """Listen for one more function's run. Called in a critical section, before the run is opened.

        Args:
            package: The vendor's package, as the tracker imports it.
            timeout_s: Seconds that finishing the run may take.

        Returns:
            False if SIGTERM cannot be listened for here: it is ignored, or was handled in C before Python started; the
            function is not in the main thread, which runs no asyncio loop; or it is in the main thread, and functions
            in other threads are listened for, or the other way round.
        """
        with self._changing:
            if self._functions == 0 and not self._listen():
                return False
            if self._unwinds != _is_main():
                return False
            self._functions += 1
            self._timeout_s = max(self._timeout_s, timeout_s)
            self._packages |= {package} if package else set()
            return True

    def _listen(self) -> bool:
        if signal.getsignal(SIGNAL) in (None, signal.SIG_IGN):
            return False
        self._reset()
        self._pipe.received()  # what nobody has read
        self._unwinds = _is_main()
        thread = threading.Thread(target=self._watch, name="flyteplugins_tracking.sigterm", daemon=True)
        thread.start()
        self._thread = thread
        if not _on_main_thread(self._install):
            self._stop_thread()
        return self._thread is not None

    def run_opened(self) -> None:
        """Let a signal take effect that has come while the run was opened, even if a client has dropped the exit.

        Raises:
            SystemExit: It has.
        """
        is_due = self._unwinds and self._has_handler and time.monotonic() > self._due_at
        if is_due and not self._is_unwinding:
            raise self._make_exit()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Put the signal off while the run is closed."""
        self._closing.add(threading.get_ident())
        try:
            yield
        finally:
            self._closing.discard(threading.get_ident())
            self.interrupted_at = None

    def stop(self, error: BaseException | None = None) -> None:
        """Listen for one function less. After the last one, the process ends if the signal would have ended it.

        Args:
            error: What ends the function. A `finally` block, or a worker that was signalled too, may have raised it.

        Raises:
            SystemExit: The signal has come, nobody has a handler, and the function ends in another way.
        """
        with self._changing, self.closing():
            if self._functions > 1:
                self._functions -= 1
                return
            if self.has_come():
                self._end_runs(self._timeout_s)  # those of other threads
            had_handler = self._has_handler
            _on_main_thread(self._restore)
            is_terminated = self.has_come()
            self._stop_thread()
            self._functions = 0
        if not is_terminated or not had_handler:
            return
        if not self._unwinds:
            os._exit(TERMINATED)
        with suppress(RuntimeError):  # there is no thread to be had
            threading.Thread(target=self._exit_late, daemon=True).start()
        if not isinstance(error, SystemExit):
            raise self._make_exit() from error

    def _stop_thread(self) -> None:
        self._is_over = True
        self._pipe.add(_WAKE)
        if self._thread is not None:
            threads.join(self._thread)
        self._thread = None
        self._pipe.forget()

    def _exit_late(self) -> None:
        """End a process that does not end by itself."""
        time.sleep(_AFTERWARDS_S)
        while self._functions:  # a `finally` block has entered another one
            time.sleep(_ANSWER_S)
        os._exit(TERMINATED)

    def postpone(self, postponement: Postponement | None) -> None:
        """Have a signal that comes from now on wait for this; for nothing, with None."""
        self._postponement = postponement

    def signal_self(self) -> None:
        """Do as if SIGTERM had come, from any thread, for a function in the main thread: others have no other ranks."""
        with self._changing:
            if self._functions and self._unwinds and self._signalled_at is None:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def has_come(self, number: int = SIGNAL) -> bool:
        """Whether this signal has come, even just now: a handler that the function has installed tells nobody."""
        self._read()
        return number in self._came

    # Called by trackers

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM has come since the first of the functions was entered."""
        return self.terminated_at is not None

    @property
    def terminated_at(self) -> float | None:
        """When that SIGTERM came, in seconds of `time.monotonic`; None if none has."""
        return self._signalled_at if self._functions else None

    def listen_again(self) -> None:
        """Take the wakeup fd back from an asyncio loop of the function's, if this is the main thread."""
        if self._functions and _is_main():
            self._pipe.divert()

    # Installation, in the main thread

    def _install(self) -> None:
        self._pipe.divert()
        if signal.getsignal(_POKE) is signal.SIG_DFL:
            signal.signal(_POKE, self._handle)
        previous = signal.getsignal(SIGNAL)
        if previous is signal.SIG_DFL or (getattr(previous, "__module__", None) or "").startswith(_ELASTIC):
            self._previous = previous
            signal.signal(SIGNAL, self._handle)

    def _restore(self) -> None:
        if self._has_handler:
            signal.signal(SIGNAL, self._previous)
        if signal.getsignal(_POKE) == self._handle:
            signal.signal(_POKE, signal.SIG_DFL)
        self._pipe.give_back()  # last: a signal that our handler does not get any more is in the pipe

    @property
    def _has_handler(self) -> bool:
        """Whether ours is installed: neither had the program one when the function was entered, nor has it one now."""
        return signal.getsignal(SIGNAL) == self._handle

    # The handler, in the main thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._thread is None:  # a handler that chains to ours has kept it
            self._act_as_previous(number, frame)
            return
        if number == SIGNAL:
            self._note()
        self._answered_at = time.monotonic()
        # The handler that has replaced ours may call it, as Lightning's does to have all ranks end the same batch: that
        # one decides how the function ends.
        if not self._unwinds or not self._has_handler or self._closing or self._is_forking:
            return
        due_s = self._answered_at - self._due_at
        if due_s < max(map(self._patience_s, _stack(frame)), default=0.0):
            return
        was_dropped = len(self._exits) == 1 and not self._is_unwinding and due_s > _ANSWER_S
        if not self._exits or was_dropped:
            raise self._make_exit()

    @property
    def _is_unwinding(self) -> bool:
        """Whether an exit that was raised is still there: a `finally` block runs, or somebody has kept it."""
        return any(made() is not None for made in self._exits)

    def _act_as_previous(self, number: int, frame: FrameType | None) -> None:
        if number == SIGNAL and callable(self._previous):
            self._previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _make_exit(self) -> SystemExit:
        if callable(signal.getsignal(signal.SIGCHLD)):
            # A DataLoader's raises, since its workers get the signal too: that would take the place of the exit.
            signal.signal(signal.SIGCHLD, lambda *_: None)
        made = _Exit(TERMINATED)
        self._exits.append(weakref.ref(made))
        return made

    def _patience_s(self, frame: FrameType) -> float:
        """Return how long the signal waits for a function on the stack."""
        module = f"{frame.f_globals.get('__name__')}"
        if frame.f_code.co_name == "__del__" or module in _CALLBACKS:
            return math.inf
        is_vendors = any(f"{module}.".startswith(f"{package}.") for package in self._packages)
        return max(patience_s(frame.f_code), _VENDOR_S if is_vendors else 0.0)

    @property
    def _is_forking(self) -> bool:
        """Whether the main thread forks: Python drops what is raised in the hooks of a fork."""
        return threading.main_thread().ident in self._masks

    def _note(self) -> None:
        """Note that the signal has come."""
        self._came.add(SIGNAL)
        if self._signalled_at is None:
            WATCH.at_sigterm()
            self._signalled_at = time.monotonic()
            if self._postponement is not None:  # the next `should_stop()` knows it
                self._postponement.on_sigterm()
            self._pipe.add(_WAKE)  # the thread, if it has not read the signal itself

    # The thread

    def _watch(self) -> None:
        while self._signalled_at is None and not self._has_ended(within_s=None):
            pass
        if self._signalled_at is not None:
            self._end_in_time()
        while not self._has_ended(within_s=None):
            pass

    def _has_ended(self, within_s: float | None) -> bool:
        """Wait for a signal, or for so long, and return whether the last function has ended."""
        if not self._is_over:
            self._pipe.wait(within_s)
            self._read()
        return self._is_over

    def _read(self) -> None:
        """Read which signals have come, and pass them on to the wakeup fd that was replaced. In any thread."""
        with self._reading:
            numbers = self._pipe.received()
            self._came.update(numbers)
            if SIGNAL in numbers:
                self._note()
            if signal.SIGINT in numbers and self._closing:
                self.interrupted_at = self.interrupted_at or time.monotonic()
            self._pipe.forward(numbers.replace(bytes([_WAKE]), b""))

    def _end_in_time(self) -> None:
        """Let the signal take effect, and end the runs before the launcher kills, if the functions do not."""
        if not self._has_handler:
            self._tell_services(_TELL_S)
        while (postponement := self._postponement) is not None and postponement.lasts():
            postponement.on_sigterm()
            if self._has_ended(_POLL_S):
                return
        self._due_at = time.monotonic()
        if self._has_handler:
            self._end_with_process()
            return
        while self._left_s() > 0:
            self._poke()  # the signal may have come just before the main thread waits
            if self._has_ended(min(_ANSWER_S, self._left_s())):
                return
        self._end_runs(_ANSWER_S)

    def _end_with_process(self) -> None:
        """Unwind the function. If that is not possible, end the runs and the process."""
        if self._unwinds and self._unwound():
            return
        while not self._unwinds and self._is_in_section():
            if self._has_ended(_POLL_S):
                return
        self._end_runs(max(_ANSWER_S, self._left_s()))
        # The function may have been unwound meanwhile, or may end just now.
        while (self._exits and self._left_s() > 0) or (self._closing and self._left_s() > -_CLOSING_S):
            if self._has_ended(_POLL_S):
                return
        os._exit(TERMINATED)

    def _unwound(self) -> bool:
        """Have the handler called until the function has ended. False if the main thread does not answer in time."""
        until = time.monotonic() + max(_ANSWER_S, self._left_s())
        while time.monotonic() < until:
            self._poke()
            if self._has_ended(_ANSWER_S if self._exits else _POLL_S):
                return True
            if not self._exits and time.monotonic() > max(self._due_at, self._answered_at) + _ANSWER_S:
                return False
        return False

    def _is_in_section(self) -> bool:
        """Whether some thread opens or closes a run: the signal waits for its critical section."""
        waited_s, stacks = time.monotonic() - self._due_at, map(_stack, sys._current_frames().values())
        return any(patience_s(frame.f_code) > waited_s for stack in stacks for frame in stack)

    def _left_s(self) -> float:
        """Return for how long the runs may stay open from now on, in seconds."""
        return (self._signalled_at or 0.0) + self._timeout_s - time.monotonic()

    def _poke(self) -> None:
        """Have the main thread call the handlers of the signals that have come, even out of a wait."""
        if signal.getsignal(_POKE) == self._handle and not self._is_forking:  # the system begins a fork again for it
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _on_main_thread(action: Callable[[], object]) -> bool:
    """Call an action there: here, or in the asyncio loop that the main thread runs. False if there is none."""
    if _is_main():
        action()
        return True
    loop, done = _main_threads_loop(), threading.Event()
    if loop is not None:
        with suppress(RuntimeError):  # closed since
            called = loop.call_soon_threadsafe(lambda: [action(), done.set()])  # type: ignore[func-returns-value]
            if not done.wait(_ANSWER_S):  # it does not answer: not later either
                called.cancel()
    return done.is_set()


def _main_threads_loop() -> Any:
    """Return the asyncio loop that the main thread runs right now; None if it runs none, or one of another library."""
    kind = getattr(sys.modules.get("asyncio"), "AbstractEventLoop", ())
    for frame in _stack(sys._current_frames().get(threading.main_thread().ident or 0)):
        if frame.f_code.co_name == "run_forever" and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
    return None
