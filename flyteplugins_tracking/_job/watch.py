"""The watch: the one thread of a process that looks after the job's other ranks while a function runs.

It starts with the first duty, and ends with the last one. A rank without a run has none, unless it asks for something:
`hang_timeout_s`, `pulse_s`, `should_stop`. All duties share one board. It is the process's own until a duty needs the
job's, and while the job has no store. It moves to the store of a process group that the function makes, and back when
that ends.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.board import STORE_TIMEOUT, Board, OwnStore, connected_store, job_board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

_TOPIC = "ranks"
# How long the end of a duty waits for the thread, whose store may not answer.
_STOP_S = 3.0
# The thread wakes at least this often: a longer time may be too long for the system.
_LONGEST_SLEEP_S = 3600.0
# A process without a launcher: it answers its own roll, and has a pulse.
ALONE = DistributedInfo(0, 1, 0, 1, 0, 1, launcher="no launcher")


class Duty:
    """A task of the thread, which alone calls these methods but one. If the board has gone, they raise a RuntimeError.

    Attributes:
        topic: The topic of its board; empty if it needs no board of the job.
        board: Its board, from `begin` on.
        descriptor: A file; `look` is called when that can be read too. None for none.
        due_at: When the next call is due, in seconds of `time.monotonic`.
    """

    topic = ""
    board = Board(OwnStore(), topic)
    descriptor: int | None = None
    due_at = 0.0

    def next_wait_s(self) -> float:
        """Return how long the thread waits before the next `look`. Called once for each."""
        return math.inf

    def begin(self, board: Board) -> None:
        """Begin, with the job's board; again if the job has another one now."""
        self.board = board.of_topic(self.topic)

    def look(self) -> None:
        """Do what there is to do."""

    def at_sigterm(self) -> None:
        """SIGTERM has come. Not called by the thread, but in the signal's handler, for one: waits for no lock."""

    def end(self, has_failed: bool) -> None:
        """Called last, when the function has ended or has failed. Frees what the duty holds, even if it raises."""


class Watch(PerProcess):
    """The thread and its duties.

    Attributes:
        awake_since: When the thread has woken last; None while it sleeps, and so notices immediately that a
            process has ended.
    """

    _wake: tuple[int, int] | None = None  # the ends of a pipe, from the first duty to the end of the process

    def __init__(self) -> None:
        """Nothing is done before the first duty."""
        self.awake_since: float | None = None
        self._changed = threading.Condition()  # notified when duties have ended
        self._duties: dict[Duty, Board | None] = {}  # and the board that each has begun with
        self._leaving: dict[Duty, bool] = {}  # the duties to end, and whether the function has failed
        self._thread: threading.Thread | None = None
        self._info = ALONE
        self._board = Board(OwnStore(), _TOPIC)
        self._first_board: Board | None = None  # the job's, before it has moved to the store of a process group
        self._store: Any = None  # the last one that it has moved to

    def after_fork_in_child(self) -> None:
        """Have no duty: they are the parent's."""
        for end in self._wake or ():
            os.close(end)
        self._wake = None
        self.__init__()  # type: ignore[misc]

    def add(self, info: DistributedInfo, *duties: Duty, without: str) -> bool:
        """Give the thread more duties. Called in the thread of the function.

        Args:
            info: This rank.
            *duties: The duties.
            without: What follows if they cannot be done.

        Returns:
            False, with a warning, if they cannot: watching the training must not change its outcome.
        """
        try:
            board = None
            if any(duty.topic for duty in duties):
                # Here and not in the thread: it may import torch, which two threads must not do together.
                # All ranks connect at about the same time, and must be on one board: the last ones get their time.
                of_job = None if info.world_size == 1 else job_board(info, os.environ, _TOPIC, STORE_TIMEOUT)
                board = of_job or Board(OwnStore(), _TOPIC)
            with self._changed:
                if board is not None and self._first_board is None:
                    self._info, self._board, self._first_board, self._store = info, board, board, board.store
                self._duties.update(dict.fromkeys(duties))
                if self._thread is None:
                    self._start()
        except Exception:
            logger.warning("%s: the other ranks cannot be watched", without, exc_info=True)
            return False
        self.wake()
        return True

    def remove(self, *duties: Duty, has_failed: bool = False) -> None:
        """End duties. Waits for the thread a moment: its store may not answer.

        Args:
            *duties: The duties.
            has_failed: Whether the function has raised.
        """
        with self._changed:
            thread = self._thread
            self._leaving.update(dict.fromkeys((duty for duty in duties if duty in self._duties), has_failed))
        self.wake()
        with self._changed:
            self._changed.wait_for(lambda: self._leaving.keys().isdisjoint(duties), _STOP_S)
            has_ended = self._thread is None
        if thread is not None and has_ended:
            threads.join(thread, _STOP_S)

    def does(self, *kinds: type[Duty]) -> bool:
        """Whether the thread has a duty of one of these kinds."""
        return any(isinstance(duty, kinds) for duty in list(self._duties))

    def wake(self, duty: Duty | None = None) -> None:
        """Have the thread look, at this duty if there is one. Takes no lock: handlers of signals call it."""
        if duty is not None:
            duty.due_at = 0.0
        if self._wake is not None:
            with suppress(BlockingIOError):  # it will look
                os.write(self._wake[1], b".")

    def at_sigterm(self) -> None:
        """Have the duties see what was before SIGTERM: the thread may wait for the interpreter's lock."""
        for duty in list(self._duties):
            with suppress(Exception):  # it ends just now
                duty.at_sigterm()

    def _start(self) -> None:
        if self._wake is None:
            self._wake = os.pipe()
            for end in self._wake:
                os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._watch, name="flyteplugins_tracking.watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread to be had
            self._thread = None
            self._duties.clear()
            raise

    # In the thread

    def _watch(self) -> None:
        progress.ignore_this_thread()  # what it logs with the run is no progress
        while self._thread is threading.current_thread():
            ready = self._sleep()
            self._follow_process_group()
            for duty in list(self._duties):
                if duty in self._leaving:
                    self._end(duty)
                elif duty.descriptor in ready or duty.due_at <= time.monotonic():
                    self._look(duty)

    def _sleep(self) -> set[int]:
        """Sleep until a duty is due, a file can be read or somebody wakes the thread. Returns the files."""
        reader = -1 if self._wake is None else self._wake[0]
        poll = select.poll()
        duties = list(self._duties)
        for descriptor in (reader, *(duty.descriptor for duty in duties)):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        ready = poll.poll(0)
        if not ready:
            self.awake_since = None
            sleep_s = min(_LONGEST_SLEEP_S, *(duty.due_at - time.monotonic() for duty in duties))
            ready = poll.poll(max(0, math.ceil(sleep_s * 1000)))
            self.awake_since = time.monotonic()
        with suppress(BlockingIOError):
            os.read(reader, 512)
        return {descriptor for descriptor, _ in ready}

    def _look(self, duty: Duty) -> None:
        try:
            if self._duties[duty] is self._board:
                duty.look()
            else:
                duty.begin(self._board)
                self._duties[duty] = self._board
        except Exception as error:
            if duty.topic and isinstance(error, (RuntimeError, OSError)) and not isinstance(error, RecursionError):
                self._leave_board()
                return
            # A string of the board must not end the thread, which has other duties.
            _warn_once(type(duty).__name__, "what the ranks tell each other cannot be read", exc_info=True)
        duty.due_at = time.monotonic() + duty.next_wait_s()

    def _end(self, duty: Duty) -> None:
        try:
            duty.end(self._leaving[duty])
        except (RuntimeError, OSError):
            pass  # the board has gone
        except Exception:
            _warn_once(type(duty).__name__, "what the ranks tell each other cannot be read", exc_info=True)
        with self._changed:
            del self._duties[duty], self._leaving[duty]
            if not self._duties:
                self._thread = self._first_board = self.awake_since = None
            self._changed.notify_all()

    def _follow_process_group(self) -> None:
        """Move to the store of a process group that the function has made: it reaches the ranks of all nodes."""
        if self._first_board is None or self._info.world_size == 1 or self._info.launcher == "torchelastic":
            return  # torchelastic's store is better
        with suppress(RuntimeError, ValueError):  # the group has ended just now
            store = connected_store(self._info, os.environ)
            if store is not None and store != self._store:
                self._store = store
                self._use(Board(store, _TOPIC))

    def _leave_board(self) -> None:
        """Go back to the first board if a process group has ended. Else the job ends, and its board with it."""
        if self._first_board is not None and self._board is not self._first_board:
            self._use(self._first_board)
            return
        self._first_board = None
        for duty in list(self._duties):
            if duty.topic:
                duty.due_at = math.inf

    def _use(self, board: Board) -> None:
        self._board = board
        for duty in list(self._duties):
            if duty.topic:
                duty.due_at = 0.0


WATCH = register(Watch())
