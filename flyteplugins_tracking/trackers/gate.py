"""The gate of a run, which ends once: whether what the function logs passes, is kept, or is lost.

    open      What is logged passes, of several threads at the same time.
    ending    A thread ends the run: what others log is kept.
    ended     A signal has ended the run, or the service's process has died: what is logged is kept. The run's close
              sends it, or the next attempt, or `send`.
    finished  The function has ended.

Each handle has a gate. It knows neither the service nor what passes: these are functions that it is given.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking._util.threads import wait_until
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["open", "ending", "ended", "finished"]

NOT_OPEN = (
    "is not open in this process: its function has ended, or another process opened it. Rows are lost. If a thread or "
    "task logs on, join it before the function returns, or have both in one `with tracking_run():`"
)

# How long a signal waits for a call to return, in seconds: an exception in the middle would leave half of a row.
_PATIENCE_S = 1.0
# How long the end of a run waits for threads that are in a call, in seconds. A call may never return.
_CALLERS_S = 1.0
_POLL_S = 0.001


class Gate(PerProcess):
    """Lets through what is logged, or has it kept once the run ends. Threads and signal handlers may share it.

    Attributes:
        state: See the module.
    """

    def __init__(
        self,
        title: str,
        run_id: str,
        *,
        one_at_a_time: bool = False,
        deaths: Callable[[], tuple[type[BaseException], ...]] = tuple,
        on_death: Callable[[BaseException], object] = lambda _: None,
    ) -> None:
        """Initialize the gate of a run that is open.

        Args:
            title: The service's name in messages.
            run_id: The run's id in messages.
            one_at_a_time: Whether only one thread is let through at a time.
            deaths: Returns the errors by which a call tells that the service's process has died.
            on_death: Called with the first such error.
        """
        self.state: State = "open"
        self._title, self._run_id = title, run_id
        self._deaths, self._on_death = deaths, on_death
        self._inside: set[int] = set()  # the ids of the threads that are in a call, or wait for their turn
        self._enders: set[int] = set()  # those that end the run: their own calls pass
        # Reentrant, since a signal handler may log. `_changing` is held while the run ends, which may take long.
        self._changing = threading.RLock()
        self._turn: Any = threading.RLock() if one_at_a_time else nullcontext()
        self._warn_once = WarnOnce(logger)
        register(self)

    def after_fork_in_child(self) -> None:
        """Refuse everything: the run is the parent's, and the locks may be held forever."""
        self.state = "finished"

    # What is logged

    def refuses(self) -> bool:
        """Whether nothing of this thread passes anymore, with one warning."""
        is_finished = self.state == "finished" and not self.is_ender
        if is_finished:
            self.warn(NOT_OPEN)
        return is_finished

    @critical_section(_PATIENCE_S)
    def call(
        self, method: Callable[..., T], otherwise: Callable[..., T | None] = lambda *_: None, *args: Any
    ) -> T | None:
        """Return what `method` returns if the run is open.

        Args:
            method: A call of the run.
            otherwise: Called instead if the run has ended, and if the service's process dies in the call.
            *args: Their arguments.
        """
        me = threading.get_ident()
        if me in self._enders or (me in self._inside and self.state != "finished"):
            return method(*args)  # a call of the end; or of a call, or of a signal handler in one
        if self.state == "open":
            # First this, and then a look at the state: the end changes it first, and then looks who is inside.
            self._inside.add(me)
            try:
                with self._turn:
                    if self.state == "open":
                        return method(*args)
            except self._deaths() as error:
                self.mark_dead(error)
            finally:
                self._inside.discard(me)
        return None if self.refuses() else otherwise(*args)

    # The run ends

    @property
    def is_ender(self) -> bool:
        """Whether this thread ends the run."""
        return threading.get_ident() in self._enders

    def join_enders(self) -> None:
        """Count this thread as one that ends the run: the ending thread has started it for that."""
        self._enders.add(threading.get_ident())

    def end(
        self,
        finish: Callable[[], object],
        send_kept: Callable[[], object] = lambda: None,
        *,
        is_last: bool = False,
    ) -> None:
        """End the run, once.

        Args:
            finish: Ends the run. Not called if the run has ended already.
            send_kept: Called after that in any case: sends what is kept.
            is_last: Whether the function has ended: what is logged from now on is lost.
        """
        with self._changing:
            self.join_enders()
            try:
                is_open, self.state = self.state == "open", "finished" if is_last else self.state
                if is_open:
                    self._end(finish, "finished" if is_last else "ended")
            finally:
                try:
                    send_kept()
                finally:
                    self._enders.clear()

    def _end(self, finish: Callable[[], object], after: State) -> None:
        self.state = "ending" if after == "ended" else after
        # What other threads are logging comes before the run's end.
        wait_until(lambda: not self._inside - self._enders, _CALLERS_S, _POLL_S)
        try:
            with self._turn:
                finish()
        except self._deaths() as error:
            self._on_death(error)
        finally:
            self.state = after

    def mark_dead(self, error: BaseException) -> None:
        """Take the run for ended, since the service's process has died."""
        with self._changing:
            if self.state == "open":
                self._on_death(error)
                self.state = "ended"

    def warn(self, text: str) -> None:
        """Warn about the run, once for each text: the training's loop may repeat the cause."""
        has_error = sys.exc_info()[0] is not None
        self._warn_once(text, "%s: run %s %s", self._title, self._run_id, text, exc_info=has_error)
