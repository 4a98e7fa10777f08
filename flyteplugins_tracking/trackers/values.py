"""The values of a row, as services take them: what one would drop in silence is said, once for each key."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


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
