"""What one process has logged to an MLflow run, on its way to the server: in a thread, in order, and until it is there.

A batch that is sent twice is there once: points with the same key, step, time and value are one to MLflow.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from flyteplugins_tracking._util.timeout import run_with_timeout
from flyteplugins_tracking.trackers.mlflow.service import RejectedError, Service, UnavailableError, entities

logger = logging.getLogger(__name__)

# How long rows wait for others to go with, in seconds; and how many values go at once, MLflow's most.
_WAIT_S = 0.5
_MOST_AT_ONCE = 1000
_MOST_PARAMS = 100
# How many values wait in memory for a server that is away: some 60 MB.
MOST_WAITING = 250_000
# The pauses between tries, in seconds: an outage's end is to be noticed before the end of a run gives up.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0, 1.0
# How many rows in a row the server refuses before the rest of a batch is given up.
_MOST_REFUSED = 5


@dataclass(frozen=True)
class Item:
    """A row, params or tags.

    Attributes:
        kind: What it is.
        data: Its values by their keys.
        step: A row's step.
        time_ms: When it was logged, in milliseconds since the epoch.
    """

    kind: Literal["row", "params", "tags"]
    data: Mapping[str, Any]
    step: int
    time_ms: int


class Sender:
    """One process's way to a run. Its thread starts with the first thing to send."""

    def __init__(self, service: Service, run_id: str, label: str) -> None:
        """Send to the run that the server calls `run_id` and messages `label`."""
        self._service, self._run_id, self._label = service, run_id, label
        self._waiting: deque[Item] = deque()
        self._size = 0  # values that wait
        self._changed = threading.Condition()  # reentrant: by a signal handler that logs
        self._thread: threading.Thread | None = None
        self._until: float | None = None  # when what waits must have been sent
        self._told: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether it takes more."""
        return self._size < MOST_WAITING

    def put(self, item: Item) -> bool:
        """Have `item` sent. False where too much waits already."""
        with self._changed:
            if not self.has_room:
                return False
            self._waiting.append(item)
            self._size += len(item.data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="flyteplugins-tracking-mlflow")
                self._thread.start()
            elif len(self._waiting) == 1 or self._size >= _MOST_AT_ONCE:
                self._changed.notify()
        return True

    def flush(self, until: float) -> list[Item]:
        """Wait until all is sent, at most `until`, in seconds of `time.monotonic`.

        Returns:
            What could not be sent. It is this one's no more.
        """
        with self._changed:
            self._until = self._service.deadline = until
            self._changed.notify()
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))
            left = list(self._waiting)
            self._waiting.clear()
            self._size = 0
            self._thread = self._until = self._service.deadline = None  # a thread that is in a call ends after it
            self._changed.notify()
        return left

    def _run(self) -> None:
        pause_s, down_since = 0.0, None
        while (batch := self._next(pause_s)) is not None:
            try:
                self._send(batch)
            except UnavailableError as error:
                down_since = down_since or time.monotonic()
                pause_s = min(max(_SHORTEST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
                self._tell("outage", "%s. What is logged is kept, and sent when it answers", error)
                continue
            except Exception:
                logger.warning("MLflow: run %s: what was logged is lost", self._label, exc_info=True)
            if down_since is not None:
                logger.warning("MLflow: run %s: the server answers again", self._label)
                self._told.discard("outage")
            pause_s, down_since = 0.0, None
            self._done(len(batch))

    def _next(self, pause_s: float) -> Sequence[Item] | None:
        """What is to be sent next; None for a thread that is not needed any more."""
        me = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._thread is not me)
            if pause_s:
                self._pause(pause_s)
            elif self._size < _MOST_AT_ONCE and self._until is None:
                self._changed.wait_for(
                    lambda: self._size >= _MOST_AT_ONCE or self._until is not None or self._thread is not me, _WAIT_S
                )
            return None if self._thread is not me else self._batch()

    def _pause(self, pause_s: float) -> None:
        if self._until is None:
            self._changed.wait_for(lambda: self._until is not None or self._thread is None, pause_s)
        else:
            self._changed.wait(min(pause_s, _LAST_PAUSE_S))

    def _batch(self) -> Sequence[Item]:
        """The next rows that go in one call; or params, or tags, which the server may refuse."""
        size, count = 0, 0
        for item in islice(self._waiting, _MOST_AT_ONCE):
            size += len(item.data)
            if count and (item.kind != "row" or size > _MOST_AT_ONCE):
                break
            count += 1
            if item.kind != "row":
                break
        return list(islice(self._waiting, count))

    def _done(self, count: int) -> None:
        with self._changed:
            if self._thread is not threading.current_thread():
                return
            for _ in range(count):
                self._size -= len(self._waiting.popleft().data)
            if not self._waiting:
                self._changed.notify_all()

    def _send(self, batch: Sequence[Item]) -> None:
        if batch[0].kind != "row":
            self._send_values(batch[0])
            return
        try:
            self._log(batch)
        except RejectedError as error:
            self._send_one_by_one(batch, error)

    def _send_values(self, item: Item) -> None:
        kind = "Param" if item.kind == "params" else "RunTag"
        values = entities(kind, item.data)
        for first in range(0, len(values), _MOST_PARAMS):
            chunk = values[first : first + _MOST_PARAMS]
            try:
                self._call(**{item.kind: chunk})
            except RejectedError:
                for one in chunk:
                    self._send_value(item.kind, one)

    def _send_value(self, kind: str, value: Any) -> None:
        try:
            self._call(**{kind: [value]})
        except RejectedError as error:
            self._tell(value.key, f"the {kind[:-1]} {value.key!r} is not taken: %s", error)

    def _send_one_by_one(self, batch: Sequence[Item], error: RejectedError) -> None:
        """Find what the server does not take: it takes all of a batch, or nothing."""
        refused = 0
        for number, item in enumerate(batch):
            try:
                self._log([item])
                refused = 0
            except RejectedError as own:
                refused, error = refused + 1, own
                self._tell(",".join(item.data), f"a row of {', '.join(item.data)} is not taken: %s", own)
            if refused == _MOST_REFUSED:
                lost = len(batch) - number - 1
                self._tell("rows", f"{lost} more rows are given up: %s", error)
                return

    def _log(self, items: Sequence[Item]) -> None:
        from mlflow.entities import Metric

        points = [Metric(key, value, item.time_ms, item.step) for item in items for key, value in item.data.items()]
        for first in range(0, len(points), _MOST_AT_ONCE):  # a single row may have more
            self._call(metrics=points[first : first + _MOST_AT_ONCE])

    def _call(self, **what: Sequence[Any]) -> None:
        self._service.call("log_batch", self._run_id, **{"metrics": [], "params": [], "tags": [], **what})

    def _tell(self, key: str, text: str, *args: object) -> None:
        """Once: it is said for each batch."""
        if key not in self._told:
            self._told.add(key)
            logger.warning(f"MLflow: run %s: {text}", self._label, *args)


def flush_vendors(service: Service, timeout_s: float) -> bool:
    """Send what the user's own calls have left to MLflow's queue. Returns whether that was done in time."""
    queue = getattr(service.vendors_store, "_async_logging_queue", None)
    if queue is None or queue.is_idle():
        return True

    def flush() -> None:
        with contextlib.suppress(Exception):
            service.vendors_store.flush_async_logging()

    return run_with_timeout(timeout_s, flush)


def now_ms() -> int:
    """The time as MLflow has it."""
    return time.time_ns() // 1_000_000
