"""The rows that a rank logs: which values a service takes, and how the ranks of a shared run keep their rows apart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

Log = Callable[[Any], Any]
# Services have steps of 64 bits, and the next step needs room.
_LARGEST_STEP = 2**62


class RowBuffer:
    """Holds one rank's rows until they are committed, and turns `step=` into a column.

    A shared run has one step counter, and the service drops rows with a lower step: another rank may be ahead. A row
    that is not committed must wait here: in the shared writer, another rank's row would be added to it.

    Attributes:
        next_step: The step of the next row, if rows that are logged without one are counted; else None.
    """

    def __init__(
        self, step_metric: str, prefix: str, define_step: Callable[[], object], next_step: int | None = None
    ) -> None:
        """Initialize the buffer.

        Args:
            step_metric: The column for steps.
            prefix: Goes before each key.
            define_step: Called before the first row with a step: says to the service what the column of steps is for.
            next_step: The step of the first row, if rows that are logged without one are counted.
        """
        self._step_metric = step_metric
        self._prefix = prefix
        self._define_step: Callable[[], object] | None = define_step
        self._last_step: Any = None
        self.next_step = next_step
        self._waiting = NextRow()  # values that are not committed
        self.logged = 0
        self._lock = threading.RLock()

    def log(self, log: Log, data: Mapping[str, Any], step: Any = None, commit: bool | None = None) -> Any:
        """Call `log` with a row of `data` and the values that wait for it.

        Args:
            log: The run's own `log`.
            data: The values by their keys. Keys get the prefix, except the column of steps and keys that begin with _.
            step: The row's value in the column of steps. By default, this rank's last one: the service would take
                another rank's.
            commit: If False, the values wait for the next row.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            return log(data)  # it raises, and says why
        row = {self._key(key): value for key, value in data.items()}
        if self.next_step is not None:
            step = self._counted(row.get(self._step_metric) if step is None else step)
        if step is not None:
            row[self._step_metric] = self._last_step = step
            self._define()
        elif self._last_step is not None:
            row.setdefault(self._step_metric, self._last_step)
        with self._lock:  # no row of another thread comes between the values that are taken and those that wait again
            waiting = self._waiting.take()
            if waiting.get(self._step_metric, row.get(self._step_metric)) != row.get(self._step_metric):
                self._log(log, waiting)  # of an earlier step
                waiting = {}
            if commit is False:
                self._waiting.add({**waiting, **row})
                return None
        return self._log(log, {**waiting, **row})

    def commit(self, log: Log) -> None:
        """Log the values that still wait for a row. Raises nothing, since the run is ending."""
        waiting = self._waiting.take()
        if waiting:
            try:
                self._log(log, waiting)
            except Exception:
                logger.warning(
                    "values that were logged with commit=False are lost: %s", ", ".join(waiting), exc_info=True
                )

    def _log(self, log: Log, row: dict[str, Any]) -> Any:
        self.logged += 1
        return log(row)

    def _key(self, key: str) -> str:
        is_own = key.startswith("_") or key == self._step_metric
        return key if is_own else self._prefix + key

    def _counted(self, step: Any) -> Any:
        """Return the step of a row: its own one, that of the values which wait for it, or the next one."""
        with self._lock:
            step = self._waiting.waiting.get(self._step_metric, self.next_step) if step is None else step
            with suppress(TypeError, ValueError, OverflowError):
                self.next_step = int(step) + 1
        return step

    def _define(self) -> None:
        with self._lock:
            define, self._define_step = self._define_step, None
        if define is not None:
            define()


class NextRow:
    """Values that wait for the next row that the function logs. They replace the earlier ones, which may be too old.

    Attributes:
        waiting: These values. Only for asking whether there are any.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Any] = {}
        self._lock = threading.RLock()  # a signal handler may log

    def add(self, values: Mapping[str, Any]) -> None:
        """Have these values wait."""
        with self._lock:
            self.waiting = dict(values)

    def take(self) -> dict[str, Any]:
        """Return the values that wait; from then on none does."""
        with self._lock:
            values, self.waiting = self.waiting, {}
        return values


class Steps:
    """Gives a step to rows that are logged without one: the next one of this process.

    Ranks that share a run, and must not share a step, each have their own steps: those with an offset, of a stride.

    Attributes:
        last: The last step.
    """

    def __init__(
        self, values: MetricSanitizer, last: int = -1, smallest: int = -_LARGEST_STEP, stride: int = 1, offset: int = 0
    ) -> None:
        """Initialize the steps, which the service takes from `smallest` on. `values` warns about others."""
        self.last = last
        self._lock = threading.RLock()  # the outbox's thread takes the steps of kept rows
        self._values, self._smallest, self._stride, self._offset = values, smallest, stride, offset

    def take(self, step: Any) -> int:
        """Return `step` if the service takes it, or the next one."""
        number = None if step is None else self._whole(step)
        with self._lock:
            if number is None:
                number = (self.last // self._stride + 1) * self._stride + self._offset
            self.last = max(self.last, number)
        return number

    def _whole(self, step: Any) -> int | None:
        try:
            number = int(step)
        except (TypeError, ValueError, OverflowError):
            number = _LARGEST_STEP
        if self._smallest <= number < _LARGEST_STEP:
            return number
        text = f"the service takes whole numbers from {self._smallest} on as steps: the row gets the next step"
        self._values.warn_once(f"step={step!r}", text)
        return None


class MetricSanitizer:
    """Makes plain rows of what a rank logs, for a service that takes numbers. W&B's client gets what was logged."""

    def __init__(self, title: str, prefix: str = "") -> None:
        """Initialize the sanitizer.

        Args:
            title: The service's name in messages.
            prefix: Goes before each key.
        """
        self._title = title
        self._prefix = prefix
        self._warn_once = WarnOnce(logger)

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of `data`: numbers, also those of NumPy and torch, as Python's. Other values stay as they are.

        Raises:
            TypeError: `data` is not a mapping with strings as keys.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise TypeError(f"log() takes a mapping of strings to values, got {data!r:.100}")
        row = {}
        for key, value in data.items():
            plain = self._number(key, value)
            if plain is not None:
                row[self._prefix + key] = plain
        return row

    def warn_once(self, key: str, text: str) -> None:
        """Warn about the values of `key`, once."""
        self._warn_once(key, "%s: %r: %s", self._title, key, text)

    def _number(self, key: str, value: Any) -> Any:
        if type(value) is float or type(value) is int:
            return value
        if value is None:
            self.warn_once(key, "None is left out: it is not a value")
            return None
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # of NumPy and torch
            value = value.item()
        return int(value) if isinstance(value, bool) else value
