"""A run to which every rank that has it writes with a client of its own: what such trackers have in common.

A tracker gives three methods, `write`, `end` and `resume`; when they are called is decided here.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from flyteplugins_tracking.signals import TERMINATED
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.peers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.rows import Values

logger = logging.getLogger(__name__)

_NOT_OPEN = "is not open here, and what is logged is lost: its function has ended, or is another process's"


class Run:
    """What `get_run` gives where the service's client has no run object.

    Attributes:
        id: The run's id.
    """

    def __init__(self, handle: ClientHandle) -> None:
        self.id = handle.id
        self._handle = handle

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row: values by their keys, at `step`."""
        self._handle.log(data, step)

    def finish(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __reduce__(self) -> Any:
        refuse_to_pickle()


class ClientHandle(Handle):
    """An open run that this process writes to, alone or beside other ranks.

    `write`, `end` and `resume` are called one at a time, and not by several threads at once.

    Attributes:
        request: What was asked for.
        ends_run: Whether `end` tells the service how the run has ended: on the primary rank; and where the rows of
            others are sent later and alone, to a service for which whoever attaches begins the run again.
    """

    def __init__(self, request: RunRequest, title: str, values: Values | None = None) -> None:
        """Called when the run is open.

        Args:
            request: What was asked for.
            title: What messages call the service.
            values: What makes rows of what is logged.
        """
        self.id = request.plan.run_id or new_id()
        self.run: Any = Run(self)
        self.request = request
        self.ends_run = request.plan.primary
        self._title = title
        prefix = prefix_of(request)
        self._values = values or Values(title, prefix)
        self._barrier = WriterBarrier.of_ranks(request, title)
        self._lock = threading.RLock()  # held while the run is written to, ended or resumed
        self._holding = threading.RLock()  # held to look at the state and at what is held at once
        self._held: list[tuple[dict[str, Any], Any, dict[str, Any]]] = []  # what is logged while the run ends
        self._ending = self._ended = self._finished = False
        self._has_failed = False
        self._pid = os.getpid()

    @abstractmethod
    def write(self, row: Mapping[str, Any], step: Any, **more: Any) -> None:
        """Log a row. It does not wait for the service, and does not raise for its absence."""

    @abstractmethod
    def end(self, exit_code: int) -> None:
        """Send all, within `finish_timeout_s`; then, on the primary rank, tell the service how the run has ended."""

    def resume(self) -> None:
        """Go on after `end`, which a signal has caused: the function has logged something since."""

    def log(self, data: Mapping[str, Any], step: Any = None, **more: Any) -> None:
        """Log a row: what the run's `log` does. An outage of the service neither raises nor blocks.

        Raises:
            TypeError: `data` is no mapping of text to values.
        """
        if self._finished or os.getpid() != self._pid:  # a forked child may have our locks for good
            self._warn(_NOT_OPEN)
            return
        self.request.watch.renew()
        row = self._values.of(data)
        with self._holding:
            if self._ending:
                self._held.append((row, step, more))
                return
        if self._ended:
            self.request.watch.await_handler()
        with self._lock:
            if self._finished:  # while the lock was waited for
                self._warn(_NOT_OPEN)
                return
            self._go_on()
            self._write(row, step, more)

    def replay(self, row: Mapping[str, Any], step: Any, time_s: float) -> None:  # noqa: ARG002 where the service has it
        """Log a row that was logged at `time_s`, in seconds since the epoch, and kept since then."""
        with self._lock:
            self.write(row, step)

    def finish(self, exit_code: int) -> None:
        """See `Handle.finish`."""
        if self._barrier is not None and exit_code == 0:
            self._barrier.wait_for_run(self.request, self._title)
            if self.request.watch.terminated:  # since another rank has failed, perhaps: the job has not succeeded
                exit_code = TERMINATED
        with self._lock:
            try:
                if self._held:
                    self._go_on()
                if not self._ended:
                    self._end(exit_code)
            finally:
                self._finished = True
                if self._barrier is not None:
                    self._barrier.leave()

    def end_early(self, exit_code: int) -> None:
        """See `Handle.end_early`."""
        with self._lock:
            if self._held:  # while an earlier signal ended it, and nothing was logged since
                self._go_on()
            if self._ended:
                return
            with self._holding:
                self._ending = True
            self._end(exit_code)

    def _go_on(self) -> None:
        if self._ended:
            self._ended = False
            try:
                self.resume()
            except Exception:
                self._warn("has ended, and what is logged now is lost")
        with self._holding:
            held, self._held = self._held, []
        for row, step, more in held:
            self._write(row, step, more)

    def _write(self, row: Mapping[str, Any], step: Any, more: Mapping[str, Any]) -> None:
        try:
            self.write(row, step, **more)
        except Exception:
            self._warn("cannot be logged to; that row is lost")

    def _end(self, exit_code: int) -> None:
        try:
            self.end(exit_code)
        finally:
            with self._holding:
                self._ended, self._ending = True, False

    def _warn(self, what: str) -> None:
        """Once: it is said in a training's loop."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s: run %s %s", self._title, self.id, what, exc_info=sys.exc_info()[0] is not None)


def refuse_to_pickle() -> NoReturn:
    """What pickling a run comes to."""
    raise TypeError("a run is of the process that has opened it: pass what is needed of it, or call get_run() there")


def prefix_of(request: RunRequest) -> str:
    """What the keys of this rank's rows gain: see `rank_prefix`."""
    is_shared = request.config.run_mode == "shared" and request.config.rank_prefix
    return f"rank_{request.info.rank if request.info else 0}/" if is_shared else ""


def run_config(request: RunRequest) -> dict[str, Any]:
    """The run's config: the user's over the facts. For the primary rank to pass."""
    config = request.config.config
    return {**request.facts, **(config if isinstance(config, Mapping) else {})}


def new_id() -> str:
    """A random id, for a run that needs none that others know."""
    return f"run-{secrets.token_hex(4)}"
