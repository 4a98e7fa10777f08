"""The thread of a rank that looks at the job's board while the function runs: roll-call, pulse, agreement to stop.

There is one for each process, with one connection. A rank without `hang_timeout_s` and `pulse_s`, and whose function
does not call `should_stop`, has none.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from flyteplugins_tracking._job import hang, progress, pulse
from flyteplugins_tracking._job.board import Board, job_board, nearest_board
from flyteplugins_tracking._job.store import STORE_TIMEOUT, job_store
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._runs.call import Call
from flyteplugins_tracking._util import proc, threads
from flyteplugins_tracking._util.modules import loaded
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import SigtermWatch
from flyteplugins_tracking.trackers.config import TrackingConfig

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

_TOPIC = "ranks"
# How long the end of a function waits for the thread, whose store may not answer.
_STOP_S = 5.0
# The monitor of this process.
_current: Monitor | None = None
# The board of the last monitor, and its process, if the next call can use it: a new connection for each costs time.
# torch asks for the names of both ends' hosts at each connection, and a busy name server answers after seconds.
_kept: tuple[int, Board] | None = None


class Duty(Protocol):
    """A task of the thread. The board goes when the job ends: then the methods raise a RuntimeError."""

    def next_wait_s(self) -> float:
        """Return how long the thread waits before the next `look`. Called once for each."""

    def begin(self, board: Board) -> None:
        """Begin; again if the job has another board now."""

    def look(self, board: Board) -> None:
        """Do what there is to do."""

    def end(self, board: Board, has_failed: bool) -> None:
        """Called last, when the function has ended."""

    def close(self) -> None:
        """Free what the duty holds. Called when the thread has ended, not by it."""


class Monitor:
    """The thread."""

    def __init__(self, info: DistributedInfo, duties: Sequence[Callable[[threading.Event], Duty]]) -> None:
        """Start the thread.

        Args:
            info: This rank.
            duties: Make the duties, each with an event that is set when the function has ended.
        """
        self.pid = os.getpid()
        self._info = info
        # Here and not in the thread: it may import torch, which two threads must not do at once.
        # All ranks connect at about the same time, and must be on one board: those that come last get their time.
        self._board = self._first_board = _kept_board() or nearest_board(
            info, os.environ, _TOPIC, timeout=STORE_TIMEOUT
        )
        # The store of the process group that the board is in. Not held: it ends with its group, and so does its port.
        self._group_store: Callable[[], Any] = lambda: None
        self._stopped = threading.Event()
        self._woken = threading.Event()  # set when the duties change, and at the end
        self._has_failed = False
        self._has_board = True
        self._duties: list[Duty] = [duty(self._stopped) for duty in duties]
        self._leaving: dict[Duty, threading.Event] = {}  # the duties that end before the thread
        self._thread = threading.Thread(target=self._watch, name="flyteplugins_tracking.monitor", daemon=True)
        self._thread.start()

    def stop(self, has_failed: bool) -> None:
        """End the thread.

        Args:
            has_failed: Whether the function has raised.
        """
        global _current, _kept
        _current = None
        self._has_failed = has_failed
        self._stopped.set()
        self._woken.set()
        if threads.join(self._thread, _STOP_S):
            for duty in self._duties:
                duty.close()
            if self._info.launcher == "torchelastic" and self._has_board:  # its store stays as long as this process
                _kept = (self.pid, self._first_board)
            if self._info.world_size == 1:
                self._first_board.remove()  # nobody else reads it

    def add(self, duty: Duty) -> None:
        """Give the thread one more duty."""
        self._duties.append(duty)
        self._woken.set()

    def remove(self, duty: Duty) -> None:
        """End a duty before the others. Waits for the thread a moment: its store may not answer."""
        self._leaving[duty] = ended = threading.Event()
        self._woken.set()
        if self._thread.is_alive():
            ended.wait(_STOP_S)
        duty.close()

    def _watch(self) -> None:
        progress.ignore_this_thread()  # what it logs with the run is no progress
        while True:
            try:
                if self._look_until_stopped():
                    break
            except (RuntimeError, OSError):
                if self._board is self._first_board:
                    self._has_board = False  # the store goes when the job ends
                    break
                self._board = self._first_board  # the process group has ended, and the function continues
        for duty in self._duties:
            with suppress(RuntimeError, OSError):
                duty.end(self._board, self._has_failed)

    def _look_until_stopped(self) -> bool:
        """Return True when the function has ended, and False when the job has another board."""
        due_at: dict[Duty, float] = {}  # of the duties that have begun
        while not self._stopped.is_set():
            self._woken.clear()
            for duty in list(self._duties):
                if duty in self._leaving:
                    self._end(duty)
                elif duty not in due_at:
                    duty.begin(self._board)
                    due_at[duty] = time.monotonic() + duty.next_wait_s()
            due = [due_at[duty] for duty in self._duties if duty in due_at]
            if self._woken.wait(max(0.0, min(due) - time.monotonic()) if due else None):
                continue
            if self._has_joined_group():
                return False
            for duty in list(self._duties):
                if due_at.get(duty, math.inf) <= time.monotonic():
                    self._look(duty)
                    due_at[duty] = time.monotonic() + duty.next_wait_s()
        return True

    def _look(self, duty: Duty) -> None:
        try:
            duty.look(self._board)
        except Exception as error:
            if isinstance(error, (RuntimeError, OSError)) and not isinstance(error, RecursionError):
                raise  # the board has gone
            # A text of the board must not end the thread, which has other duties.
            _warn_once(type(duty), "what the ranks tell each other cannot be read", exc_info=True)

    def _end(self, duty: Duty) -> None:
        self._duties.remove(duty)
        ended = self._leaving.pop(duty)
        try:
            duty.end(self._board, has_failed=False)
        finally:
            ended.set()

    def _has_joined_group(self) -> bool:
        """Move to the store of a process group that the function has made: it reaches the ranks of all nodes."""
        if self._info.launcher == "torchelastic" or loaded("torch.distributed") is None:
            return False  # torchelastic's store is better, and asking for it would connect again
        store = job_store(self._info, os.environ)
        if store is None or store is self._group_store():
            return False
        self._group_store = weakref.ref(store)
        with suppress(RuntimeError, ValueError):  # the group has ended just now
            self._board = job_board(self._info, os.environ, _TOPIC) or self._first_board
            return True
        return False


def _kept_board() -> Board | None:
    """Take the board that an earlier call of this process has left. A forked child must not use its parent's."""
    global _kept
    kept, _kept = _kept, None
    return kept[1] if kept is not None and kept[0] == os.getpid() else None


def start_monitor(call: Call, config: TrackingConfig) -> Monitor | None:
    """Start the monitor of a call that has begun. None if a function around it, or in another thread, has one."""
    info = call.info or alone()
    duties: list[Callable[[threading.Event], Duty]] = []
    if config.hang_timeout_s is not None:
        duties.append(functools.partial(_roll_call_duty, call, info, config.hang_timeout_s))
    if config.pulse_s is not None:
        duties.append(functools.partial(_pulse_duty, call, info, config.pulse_s))
    if current() is not None:
        return None
    return _start(info, duties, "hang_timeout_s and pulse_s are ignored")


def _roll_call_duty(call: Call, info: DistributedInfo, timeout_s: float, stopped: threading.Event) -> hang.RollCallDuty:
    """Return the duty of a call that has begun. On the first primary it shows the answers with the run."""
    run = call.run

    def show(roll_call: hang.RollCall) -> None:
        if run is not None:
            logger.error("%s: %s", run.tracker.name, roll_call.verdict)
            run.handle.record_event("hang", {"hang/verdict": roll_call.verdict}, roll_call.text)

    is_first = run is not None and run.plan.first
    return hang.RollCallDuty(info, timeout_s, show if is_first else None, has_run=run is not None, stopped=stopped)


def _pulse_duty(call: Call, info: DistributedInfo, pulse_s: float, _: threading.Event) -> pulse.PulseDuty:
    """Return the duty of a call that has begun. On the first primary it logs with the run."""
    run = call.run
    return pulse.PulseDuty(info, pulse_s, run.handle.add_to_next_row if run is not None and run.plan.first else None)


class ProgressWatch:
    """A watch for SIGTERM that counts each row as progress: trackers call `before_row` before each row."""

    def __init__(self, watch: SigtermWatch) -> None:
        self._watch = watch

    @property
    def terminated(self) -> bool:
        """Whether the job is being terminated."""
        return self._watch.terminated

    def before_row(self) -> None:
        """Count the row, and install our handler again."""
        progress.count_row()
        self._watch.before_row()

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Wait until the user's handler has run."""
        self._watch.wait_for_user_handler(any_thread)


def current_or_new(info: DistributedInfo) -> tuple[Monitor | None, bool]:
    """Return the monitor of this process, and whether it was started for that. None if there can be none."""
    monitor = current()
    return (_start(info, (), "only this process is asked to stop"), True) if monitor is None else (monitor, False)


def current() -> Monitor | None:
    """Return the monitor of this process; None if it has none."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def _start(
    info: DistributedInfo, duties: Sequence[Callable[[threading.Event], Duty]], consequence: str
) -> Monitor | None:
    global _current
    try:
        _current = Monitor(info, duties)
    except Exception:
        # Watching the training must not change its outcome.
        logger.warning("%s: the job's board cannot be reached", consequence, exc_info=True)
        return None
    return _current


def alone() -> DistributedInfo:
    """Return the place of a process without a launcher: it answers its own roll, and has a pulse and a board."""
    identity = f"{os.getpid()} {proc.start_time(os.getpid())}"  # others of the same shell have boards of their own
    return DistributedInfo(0, 1, 0, 1, 0, 1, launcher="no launcher", job_id=identity)
