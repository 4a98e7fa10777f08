"""The gate of a run: whether what the function logs passes, waits or is lost while the run ends early and opens again.

    open      What is logged passes, of several threads at the same time.
    ending    A thread ends the run: what others log is held.
    ended     A signal has ended the run, or the service's process has died. The next row opens the run again, and
              what was held passes first.
    finished  The function has ended.
    lost      The run has ended, and could not be opened again.

Each handle has a gate. It knows neither the service nor what passes: these are functions that it is given.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import SigtermWatch

logger = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["open", "ending", "ended", "finished", "lost"]

NOT_OPEN = "is not open in this process: its function has ended, or another process opened it. Rows are lost"
_LOST = "has ended and cannot be opened again. Rows are lost from now on"

# How long a signal waits for a call to return, in seconds: an exception in the middle would leave half of a row.
_PATIENCE_S = 1.0
# How long the end of a run waits for threads that are in a call, in seconds. A call may never return.
_CALLERS_S = 1.0
_POLL_S = 0.001
# How often the run is opened again if the service's process dies again immediately.
_TRIES = 3
_NOT_PASSED: Any = object()
# The states in which nothing passes anymore.
_SHUT = ("finished", "lost")


class Gate(PerProcess):
    """Lets through what is logged, or holds it while the run ends. Threads and signal handlers may share it.

    Attributes:
        state: See the module.
        openings: How often the run was open.
    """

    def __init__(
        self,
        title: str,
        run_id: str,
        watch: SigtermWatch,
        reopen: Callable[[], object],
        *,
        one_at_a_time: bool = False,
        deaths: Callable[[], tuple[type[BaseException], ...]] = tuple,
        on_death: Callable[[BaseException], object] = lambda _: None,
        hint: Callable[[], str] = str,
    ) -> None:
        """Initialize the gate of a run that is open.

        Args:
            title: The service's name in messages.
            run_id: The run's id in messages.
            watch: The run's watch for SIGTERM.
            reopen: Opens the run again. If it raises, the run is lost. If it returns False, the run is not open yet,
                and `open_again` asks for it once more.
            one_at_a_time: Whether only one thread is let through at a time.
            deaths: Returns the errors by which a call tells that the service's process has died. The run is opened
                again then, and the call is repeated.
            on_death: Called with the first such error of an opening.
            hint: Returns the end of the message that the run is lost: what to do.
        """
        self.state: State = "open"
        self.openings = 1
        self._title, self._run_id, self._watch = title, run_id, watch
        self._reopen_run, self._deaths, self._on_death, self._hint = reopen, deaths, on_death, hint
        self._is_cut = False  # whether it has ended in the middle, without its true status
        self._held: deque[Callable[[], object]] = deque()
        self._inside: set[int] = set()  # the ids of the threads that are in a call
        self._enders: set[int] = set()  # those that end the run or open it: their own calls pass
        # Reentrant, since a signal handler may log. `_changing` is held while the run ends or opens, which may take
        # long; `_lock` for a moment, to read the state together with what is held.
        self._changing, self._lock = threading.RLock(), threading.RLock()
        self._turn: Any = threading.RLock() if one_at_a_time else nullcontext()
        self._warn_once = WarnOnce(logger)
        register(self)

    def after_fork_in_child(self) -> None:
        """Refuse everything: the run is the parent's, and the locks may be held forever."""
        self.state = "finished"

    def __repr__(self) -> str:
        return f"Gate({self._run_id}, {self.state}, opened {self.openings} times, {len(self._held)} rows held)"

    # What is logged

    def refuses(self) -> bool:
        """Whether nothing passes anymore, with one warning."""
        is_shut = self.state in _SHUT
        if is_shut:
            self._warn(_LOST if self.state == "lost" else NOT_OPEN)
        return is_shut

    def row(self, log: Callable[[], object]) -> None:
        """Log a row: now, or if the run is ending, when it is open again.

        Args:
            log: Logs the row. It may be called later and in another thread; again if the service's process dies.
        """
        if self._pass(log) is _NOT_PASSED:
            self._pass_late(log, is_row=True)

    def call(self, method: Callable[[], T], *, while_ending: bool = False) -> T | None:
        """Return what `method` returns. If the run is ending, wait for the end, and open the run again.

        Args:
            method: A call of the run that is not a row.
            while_ending: Whether to pass without waiting while the run ends.

        Returns:
            None if the run is not open.
        """
        result: T | None = self._pass(method, while_ending)
        return self._pass_late(method, is_row=False) if result is _NOT_PASSED else result

    # The run ends and opens

    @property
    def is_ender(self) -> bool:
        """Whether this thread ends the run, or opens it."""
        return threading.get_ident() in self._enders

    @property
    def has_callers(self) -> bool:
        """Whether a thread is in a call, and does not end the run or open it."""
        return bool(self._inside - self._enders)

    def join_enders(self) -> None:
        """Count this thread as one that ends the run: the ending thread has started it for that."""
        self._enders.add(threading.get_ident())

    def end_early(self, finish: Callable[[], object], timeout_s: float = 0.0) -> None:
        """End the run by `finish`, while its function may go on. Does nothing if it has ended already.

        Args:
            finish: Ends the run.
            timeout_s: How long after its first death a process of the service is replaced, in seconds.
        """
        with self._changing:
            if self._held or self._is_cut:
                self._reopen()
            if self.state == "open":
                self._end(finish, timeout_s)

    def finish(self, finish: Callable[[], object], timeout_s: float = 0.0) -> None:
        """As `end_early`, after the function's end: nothing passes from then on."""
        with self._changing:
            try:
                self.end_early(finish, timeout_s)
            finally:
                with self._lock:
                    is_left, self.state = bool(self._held), "lost" if self.state == "lost" else "finished"
                    self._held.clear()
                if is_left:
                    self._warn(NOT_OPEN)

    def open_again(self) -> bool:
        """Open the run if it has ended. Returns whether it is open."""
        with self._changing:
            self._reopen()
            return self.state == "open"

    def mark_dead(self, error: BaseException, opening: int | None = None) -> None:
        """Take the run for ended, since the service's process has died.

        Args:
            error: How a call has told so.
            opening: The value of `openings` at that call: does nothing if the run was opened since.
        """
        with self._changing:
            if self.state in ("open", "ending") and opening in (None, self.openings):
                self._on_death(error)
                self._is_cut, self.state = True, "ended"

    def lose(self) -> None:
        """Give the run up, with one warning: it cannot be opened again."""
        with self._lock:
            self.state = "lost"
            self._held.clear()
        self._warn(_LOST, self._hint())

    @critical_section(_PATIENCE_S)
    def _pass(self, action: Callable[[], Any], while_ending: bool = False) -> Any:
        """Return what `action` returns if the run is open; `_NOT_PASSED` if it is not."""
        me = threading.get_ident()
        if me in self._inside or me in self._enders:  # a call of a call, or of a signal handler in a call
            return _NOT_PASSED if self.state in _SHUT else action()
        passing = ("open", "ending") if while_ending else ("open",)
        if self.state not in passing:
            return _NOT_PASSED
        opening = self.openings
        try:
            with self._turn:
                try:
                    with self._lock:
                        if self.state not in passing:
                            return _NOT_PASSED
                        self._inside.add(me)
                        opening = self.openings
                    return action()
                finally:
                    self._inside.discard(me)
        except self._deaths() as error:
            self.mark_dead(error, opening)
            return _NOT_PASSED

    def _pass_late(self, action: Callable[[], Any], is_row: bool) -> Any:
        """As `_pass` for a run that is not open: hold a row, or open the run again."""
        for _ in range(_TRIES):
            if self.refuses():
                return None
            self._watch.wait_for_user_handler()  # first: if it ends the process, a row that is held is lost
            if is_row and self._holds(action):
                return None
            if not self.open_again():
                with self._lock:  # another thread may open it
                    if is_row and self.state == "ended":
                        self._held.append(action)
                        return None
            if self.refuses():
                return None
            result = self._pass(action)
            if result is not _NOT_PASSED:
                return result
        return None

    def _holds(self, log: Callable[[], object]) -> bool:
        """Hold a row if the time is not right for it. Returns whether it is held."""
        with self._lock:
            if self.state == "ending":
                self._held.append(log)
            return self.state == "ending"

    def _end(self, finish: Callable[[], object], timeout_s: float) -> None:
        until: float | None = None
        while self.state == "open":
            with self._lock:
                self.state = "ending"
            self._enders.add(threading.get_ident())
            self._await_callers()
            try:
                with self._turn:
                    finish()
                return
            except self._deaths() as error:
                self.mark_dead(error)
            finally:
                self._enders.clear()
                with self._lock:
                    if self.state == "ending":
                        self.state = "ended"
            until = time.monotonic() + timeout_s if until is None else until
            if time.monotonic() >= until:
                self.lose()
            self._reopen()

    def _await_callers(self) -> None:
        """Wait for other threads: what they are logging comes before the run's end."""
        deadline = time.monotonic() + _CALLERS_S
        while self.has_callers and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @critical_section(_PATIENCE_S)
    def _reopen(self) -> None:
        """Open the run if it has ended. It is lost if the service's process dies again each time."""
        for _ in range(_TRIES):
            if self.state != "ended":
                return
            self._enders.add(threading.get_ident())
            try:
                with self._turn:
                    if self._reopen_run() is False:
                        return
                    self.openings += 1
                    self._pass_rest()
            except self._deaths() as error:
                self._on_death(error)
            except Exception:
                self.lose()
            finally:
                self._enders.clear()
        if self.state == "ended":
            self.lose()

    def _pass_rest(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._is_cut = False
                    self.state = "open"
                    return
                log = self._held[0]
            try:
                log()
            except self._deaths():
                raise
            except Exception:
                self._warn("could not be logged to. A row is lost")
            self._held.popleft()

    def _warn(self, text: str, hint: str = "") -> None:
        """Warn about the run, once for each text: the training's loop may repeat the cause."""
        has_error = sys.exc_info()[0] is not None
        said = f"{text}. {hint}" if hint else text
        self._warn_once(text, "%s: run %s %s", self._title, self._run_id, said, exc_info=has_error)
