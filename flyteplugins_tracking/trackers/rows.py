"""The rows that a rank logs: which values a service takes, and how they stand beside other ranks' in a shared run."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

Log = Callable[[Any], Any]


class Rows:
    """One rank's rows.

    A run has one step counter, and a service drops what is below it: another rank may be ahead. So `step=` becomes a
    column. Rows that are not committed are kept here: in the writer they would be mixed with another rank's.
    """

    def __init__(self, step_metric: str, prefix: str, define_step: Callable[[], object]) -> None:
        """`define_step` tells the service, before the first row that has a step, what the steps' column is for."""
        self._step_metric = step_metric
        self._prefix = prefix
        self._define_step: Callable[[], object] | None = define_step
        self._last_step: Any = None
        self._waiting: dict[str, Any] = {}  # what is not committed
        self.logged = 0
        self._lock = threading.RLock()

    def log(self, log: Log, data: Mapping[str, Any], step: Any = None, commit: bool | None = None) -> Any:
        """Hand `log` the row of `data`, and of what has been waiting for it.

        Args:
            log: The run's own.
            data: The values by their keys. Keys get the prefix, but for the column of steps and the service's own (_).
            step: The row's value in the column of steps. Left out, it is the last one of this rank: the service would
                take another rank's.
            commit: False: keep it for the next row.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            return log(data)  # which says what is wrong
        row = {self._key(key): value for key, value in data.items()}
        if step is not None:
            row[self._step_metric] = self._last_step = step
            self._define()
        elif self._last_step is not None:
            row.setdefault(self._step_metric, self._last_step)
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            if waiting.get(self._step_metric, row.get(self._step_metric)) != row.get(self._step_metric):
                self._log(log, waiting)  # of an earlier step
                waiting = {}
            if commit is False:
                self._waiting = {**waiting, **row}
                return None
        try:
            return self._log(log, {**waiting, **row})
        except Exception:
            if waiting:  # it may have what cannot be logged; this row shall not be lost for that
                self._log(log, row)
            raise

    def commit(self, log: Log) -> None:
        """Log what still waits for its row. A tracking run's end raises nothing."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        if waiting:
            try:
                self._log(log, waiting)
            except Exception:
                logger.warning("what was logged with commit=False is lost: %s", ", ".join(waiting), exc_info=True)

    def _log(self, log: Log, row: dict[str, Any]) -> Any:
        self.logged += 1
        return log(row)

    def _key(self, key: str) -> str:
        is_own = key.startswith("_") or key == self._step_metric
        return key if is_own else self._prefix + key

    def _define(self) -> None:
        with self._lock:
            define, self._define_step = self._define_step, None
        if define is not None:
            define()


class Values:
    """One rank's rows, on their way to a service that takes numbers."""

    def __init__(self, title: str, prefix: str = "", odd_floats: str | None = None) -> None:
        """Of the service called `title`.

        Args:
            title: What messages call the service.
            prefix: What each key gains in front.
            odd_floats: What the service does to NaN and infinities; None where it keeps them.
        """
        self._title = title
        self._prefix = prefix
        self._odd_floats = odd_floats
        self._told: set[str] = set()

    def of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The row of `data`: numbers, of NumPy and torch too, as Python's; and what else the service may take.

        Raises:
            TypeError: It is no mapping with text as its keys.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise TypeError(f"log() takes a mapping of text to values, not {data!r:.100}")
        row = {}
        for key, value in data.items():
            plain = self._number(key, value)
            if plain is not None:
                row[self._prefix + key] = plain
        return row

    def tell(self, key: str, what: str) -> None:
        """Warn about the values of `key`, once."""
        if key not in self._told:
            self._told.add(key)
            logger.warning("%s: %r: %s", self._title, key, what)

    def _number(self, key: str, value: Any) -> Any:
        if type(value) is float or type(value) is int:
            plain: Any = value
        else:
            plain = self._unusual(key, value)
        if isinstance(plain, float) and self._odd_floats is not None and not math.isfinite(plain):
            self.tell(key, f"{plain} is {self._odd_floats}")
        return plain

    def _unusual(self, key: str, value: Any) -> Any:
        if value is None:
            self.tell(key, "None is no value: it is left out")
            return None
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # of NumPy and torch
            value = value.item()
        if isinstance(value, bool):
            self.tell(key, "a truth value is no number: it is logged as 1 or 0")
            return int(value)
        return value
