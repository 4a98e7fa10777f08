"""Rows that come late: their step is below that of an earlier row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LateRows:
    """Keeps rows whose step is below that of an earlier row of the same attempt, as those of an evaluation.

    W&B drops such a row. Here it lands in the run's current row, or in the next one if that has one already, and its
    step is in a column. A run without such rows has the steps and columns that it is given.
    """

    def __init__(self, handle: Any, column: str) -> None:
        """`handle` is that of the run, and `column` that of the function's own steps."""
        self._handle, self._column = handle, column
        self._last = -1  # the highest step that was given
        self._in_column: tuple[int, Any] = (-1, None)  # the last place whose step is in the column, and that step
        self._in_order: set[str] = set()  # the keys of rows that are not late
        self._current: tuple[int, set[str]] = (-1, set())  # the place of the last such row, and the keys that it has
        self._late: tuple[int, set[str]] = (-1, set())  # and of the last late one

    def place(self, row: Mapping[str, Any], step: Any, place: Any) -> tuple[Mapping[str, Any], Any]:
        """Return a row and the step at which W&B keeps it.

        Args:
            row: The row.
            step: Its step, as it was given.
            place: The step at which it belongs in the run.
        """
        current = self._handle.known_step()
        if current is None or place < 0:  # others log into the run too; or W&B says that there is no such step
            return row, place
        at, late_keys = self._late
        meets_late = at == current and not late_keys.isdisjoint(row)  # its values would replace those of a late row
        if place > current or (place == current and not meets_late):
            self._last = max(self._last, step)
            self._in_order.update(row)
            if self._current[0] != place:
                self._current = (place, set())
            self._current[1].update(row)
            if place != step:  # after a rollback, all rows have the column
                self._in_column = (place, step)
            return row, place
        has_column = self._in_column[0] == current and self._in_column[1] != step
        has_key = self._current[0] == current and not self._current[1].isdisjoint(row)
        place = current + 1 if has_column or has_key or place == current else current
        self._in_column = (place, step)
        self._late = (place, {self._column, *row} | (late_keys if at == place else set()))
        if step < self._last:
            self._define(row, step)
        self._last = max(self._last, step)
        return {self._column: step, **row}, place

    def _define(self, row: Mapping[str, Any], step: Any) -> None:
        """Have W&B draw the keys that only late rows have over the column, unless the function says how it draws."""
        if not self._handle.has_definitions:
            for key in row.keys() - self._in_order - {self._column}:
                self._handle.draw_over(key, self._column)
        self._handle.warn_once(
            "late",
            "W&B: run %s: a row at step %s comes after step %s. W&B drops such rows, so it is kept in the run's "
            "current or next row, as later ones are, with its step in %r",
            self._handle.id,
            step,
            self._last,
            self._column,
        )
