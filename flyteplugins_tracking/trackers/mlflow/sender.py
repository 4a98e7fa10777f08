"""Sends one process's rows to an MLflow run: in a thread, in order, and again until the server takes them.

A batch can be sent twice: of two points with the same key, step, time and value, one is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.mlflow.vendor import RejectedError, Service, UnavailableError, entities

logger = logging.getLogger(__name__)

# How long rows wait for more rows, in seconds; and how many values one call may have, which is MLflow's limit.
_WAIT_S = 0.5
_MOST_AT_ONCE = 1000
_MOST_PARAMS = 100
# How many values wait in memory during an outage: about 60 MB.
MOST_WAITING = 250_000
# The pauses between tries, in seconds. They are short, so that the end of a run notices that an outage is over.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0, 1.0
# After so many rejected rows in a row, the rest of a batch is given up.
_MOST_REJECTED = 5


@dataclass(frozen=True)
class Item:
    """A row, params or tags.

    Attributes:
        kind: Which of them.
        data: The values by their keys.
        step: The row's step.
        time_ms: When it was logged, in milliseconds since the epoch.
    """

    kind: Literal["row", "params", "tags"]
    data: Mapping[str, Any]
    step: int
    time_ms: int


class Sender:
    """Sends one process's items to a run. The thread starts with the first item."""

    def __init__(self, service: Service, run_id: str, label: str, on_sent: Callable[[int], object]) -> None:
        """Initialize the sender.

        Args:
            service: The server.
            run_id: The server's id of the run.
            label: The run's id in messages.
            on_sent: Called, in the sender's thread, with the number of items that the server has by now.
        """
        self._on_sent = on_sent
        self.sent = 0
        self._service, self._run_id, self._label = service, run_id, label
        self._waiting: deque[Item] = deque()
        self._size = 0  # values that wait
        self._changed = threading.Condition()  # reentrant, since a signal handler may log
        self._thread: threading.Thread | None = None
        self._until: float | None = None  # the deadline for what waits
        self._warn_once = WarnOnce(logger)
        self._outages = 0

    @property
    def has_room(self) -> bool:
        """Whether there is room for another item."""
        return self._size < MOST_WAITING

    @property
    def taken(self) -> int:
        """How many items it has taken: those that the server has, and those that wait."""
        with self._changed:
            return self.sent + len(self._waiting)

    def put(self, item: Item) -> bool:
        """Send `item` in the background. Returns False if there is no room for it."""
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
        """Wait until all items are sent, at most until `until`, in seconds of `time.monotonic`.

        Returns:
            The items that were not sent. The sender forgets them.
        """
        with self._changed:
            self._until = self._service.deadline = until
            self._changed.notify()
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))
            unsent = list(self._waiting)
            self._waiting.clear()
            self._size = 0
            self._thread = self._until = self._service.deadline = None  # a thread that is in a call ends after it
            self._changed.notify()
        return unsent

    def _run(self) -> None:
        pause_s, down_since = 0.0, None
        while (batch := self._next(pause_s)) is not None:
            try:
                self._send(batch)
            except UnavailableError as error:
                down_since = down_since or time.monotonic()
                pause_s = min(max(_SHORTEST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
                self._warn(f"outage {self._outages}", "%s. Rows are kept, and sent when it answers", error)
                continue
            except Exception:
                logger.warning("MLflow: run %s: rows are lost", self._label, exc_info=True)
            if down_since is not None:
                logger.warning("MLflow: run %s: the server answers again", self._label)
                self._outages += 1
            pause_s, down_since = 0.0, None
            self._done(len(batch))

    def _next(self, pause_s: float) -> Sequence[Item] | None:
        """Return the next batch; None to end a thread that is not needed anymore."""
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
        """Return the rows for one call, or one item of params or tags: the server may reject those."""
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
            self.sent += count
            self._on_sent(self.sent)
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
                for value in chunk:
                    self._send_value(item.kind, value)

    def _send_value(self, kind: str, value: Any) -> None:
        try:
            self._call(**{kind: [value]})
        except RejectedError as error:
            self._warn(value.key, f"the server rejects the {kind[:-1]} {value.key!r}: %s", error)

    def _send_one_by_one(self, batch: Sequence[Item], error: RejectedError) -> None:
        """Send the rows of a rejected batch one by one: the server takes a whole batch or nothing."""
        rejected = 0
        for number, item in enumerate(batch):
            try:
                self._log([item])
                rejected = 0
            except RejectedError as row_error:
                rejected, error = rejected + 1, row_error
                self._warn(",".join(item.data), f"the server rejects a row of {', '.join(item.data)}: %s", row_error)
            if rejected == _MOST_REJECTED:
                lost = len(batch) - number - 1
                self._warn("rows", f"{lost} more rows are lost: %s", error)
                return

    def _log(self, items: Sequence[Item]) -> None:
        from mlflow.entities import Metric

        points: Sequence[Any] = [
            Metric(key, value, item.time_ms, item.step) for item in items for key, value in item.data.items()
        ]
        points = self._service.missing(self._run_id, points)
        for first in range(0, len(points), _MOST_AT_ONCE):  # a single row may have more values
            self._call(metrics=points[first : first + _MOST_AT_ONCE])

    def _call(self, **entries: Sequence[Any]) -> None:
        self._service.call("log_batch", self._run_id, **{"metrics": [], "params": [], "tags": [], **entries})

    def _warn(self, key: str, text: str, *args: object) -> None:
        """Warn, once for each key: the cause may repeat with each batch."""
        self._warn_once(key, f"MLflow: run %s: {text}", self._label, *args)


def now_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
