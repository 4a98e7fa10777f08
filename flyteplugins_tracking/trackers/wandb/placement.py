"""The step at which W&B keeps a row, and the columns that the row gets if that is not its own one.

W&B drops a row whose step is below its run's current one. Here it lands in the run's current row or behind it, with its
step in a column, if it is

- of a job that has gone back to its checkpoint: all rows of the attempt follow those of the attempts before, in the
  same distance to their own steps, and with the number of the restart, which tells the attempts apart;
- late: its step is below that of an earlier row of the same attempt, as of an evaluation. It lands in the run's current
  row, or in the next one if that has one already.

A run without such rows has the steps and columns that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT
from flyteplugins_tracking.trackers.wandb import outbox

logger = logging.getLogger(__name__)


class _Row:
    """What a row of the run has got from this attempt.

    Attributes:
        place: Its step in the run.
        step: That in the column; None if it has none.
        keys: The keys that came in time.
        late: Those of late rows.
    """

    def __init__(self, place: int) -> None:
        self.place, self.step = place, None
        self.keys, self.late = set[str](), set[str]()


class Placement:
    """Places the rows of an attempt.

    Attributes:
        distance: Between the steps of a job that has gone back and the run's. The same for all rows: calls of one step
            stay one row.
        has_definitions: Whether the function, or a job that goes back, has defined how columns are drawn.
    """

    def __init__(self, run: Any, kind: Any, request: RunRequest, warn_once: WarnOnce) -> None:
        """`kind` is the client's own class of the run."""
        self._run, self._kind, self._outbox, self._warn_once = run, kind, outbox.of(run), warn_once
        self._column, self._restart_count = request.config.step_metric, request.restart_count
        known = self._outbox.next_step  # after the rows that were sent of earlier attempts
        self._first_step = int(run.starting_step) if known is None else known
        self.distance, self.has_definitions = 0, False
        self._last = -1  # the highest step that was given
        self._row = _Row(-1)  # the last one
        self._drawn: set[str] = set()  # the keys of rows that are not late, or are drawn over the column

    def place(self, row: Any, step: Any) -> tuple[Any, Any]:
        """Return the row and the step with which W&B keeps it; the step is None if the user gives none.

        Called for a row with a step, and for each row of a job that has gone back.
        """
        # A run without an earlier attempt has no step below 0 to go back to: W&B drops such a row.
        if step is not None and not self.distance and max(step, 0) < self._first_step:
            self._go_back(step)
        if not isinstance(row, Mapping):  # wandb says why
            return row, step
        if not self.distance:
            return self._place(row, step, step)
        row = {**({} if step is None else {self._column: step}), RESTART_COUNT: self._restart_count, **row}
        return row, None if step is None else self._place(row, step, step + self.distance)[1]

    def _go_back(self, step: int) -> None:
        known, run = self._outbox.next_step, self._run
        # W&B says 0 until a row was logged.
        next_step = max(int(run.step), int(run.starting_step)) if known is None else known
        if next_step <= step:
            return
        self.distance = next_step - step
        run.define_metric("*", step_metric=self._column)
        logger.warning(
            "W&B: the job continues at step %s, and its run has the steps up to %d already. All rows are kept: those "
            "of this attempt are at the run's next steps, with their own steps in %r and %s=%d",
            step,
            next_step - 1,
            self._column,
            RESTART_COUNT,
            self._restart_count,
        )

    def _place(self, row: Mapping[str, Any], step: Any, place: Any) -> tuple[Mapping[str, Any], Any]:
        """Return a row that belongs at a place in the run, and the place at which W&B keeps it."""
        current = self._outbox.next_step
        if current is None or place < 0:  # others log into the run too; or W&B says that there is no such step
            return row, place
        self._last = max(self._last, step)
        if self._row.place != current:
            self._row = _Row(current)
        # Otherwise its values would replace those of a late row.
        if place > current or (place == current and self._row.late.isdisjoint(row)):
            if place > current:
                self._row = _Row(place)
            if place != step:  # after a rollback, all rows have the column
                self._row.step = step
            self._row.keys.update(row)
            self._drawn.update(row)
            return row, place
        has_column = self._row.step not in (None, step)
        if has_column or place == current or not self._row.keys.isdisjoint(row):
            self._row = _Row(current + 1)
        self._row.step = step
        self._row.late.update((self._column, *row))
        if step < self._last:
            self._tell_late(row, step)
        return {self._column: step, **row}, self._row.place

    def _tell_late(self, row: Mapping[str, Any], step: Any) -> None:
        """Have W&B draw the keys that only late rows have over the column, unless the function says how it draws.

        Rows without a value of the column get none.
        """
        new = set() if self.has_definitions else row.keys() - self._drawn - {self._column}
        for key in (key for key in new if "*" not in key):
            self._kind.define_metric(self._run, key, step_metric=self._column, step_sync=False)
        self._drawn |= new
        text = (
            "W&B: run %s: a row at step %s comes after step %s. W&B drops such rows, so it is kept in the run's "
            "current or next row, as later ones are, with its step in %r"
        )
        self._warn_once("late", text, self._run.id, step, self._last, self._column)
