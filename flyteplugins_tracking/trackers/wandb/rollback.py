"""Keep the rows of a job that goes back to its checkpoint, and logs steps that the run has already.

W&B drops a row whose step is below the run's last one. Here such a row lands at the run's next step instead, with the
step in a column of its own, and with the number of the restart, which tells the attempts apart. With
`rollback="rewind"`, W&B drops the earlier rows from that step on, if it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.trackers.client import RESTART_COUNT

logger = logging.getLogger(__name__)


class Rollback:
    """Places the rows of one attempt. The distance is the same for all its steps: calls of one step stay one row."""

    def __init__(
        self,
        column: str,
        restart_count: int,
        first_step: Callable[[], int],
        next_step: Callable[[], int],
        rewind: Callable[[int], str | None] | None = None,
    ) -> None:
        """Initialize the placing of an attempt that has not gone back yet.

        Args:
            column: The column for steps.
            restart_count: The number of this attempt.
            first_step: Returns the first step of this attempt: the run has those below it from earlier ones.
            next_step: Returns the run's next step.
            rewind: Drops the run's rows from a step on, and returns why it cannot; None to keep all rows.
        """
        self._column = column
        self._restart_count = restart_count
        self._first_step, self._next_step = first_step, next_step
        self._rewind = rewind
        self._distance = 0

    @property
    def rewinds(self) -> bool:
        """Whether the run is rewound at the next step that it has already."""
        return self._rewind is not None

    @property
    def has_gone_back(self) -> bool:
        """Whether rows are placed elsewhere than at their own steps."""
        return self._distance > 0

    def place(self, data: Any, step: Any, define: Callable[[], object]) -> tuple[Any, Any]:
        """Return the row and the step with which W&B keeps them.

        Args:
            data: The user's row.
            step: The user's step; None if the user gives none.
            define: Called before the first row that is placed elsewhere.
        """
        if step is not None and not self._distance and step < self._first_step():
            self._go_back(step, define)
        if not self._distance:
            return data, step
        return self._with_columns(data, step), None if step is None else step + self._distance

    def _go_back(self, step: int, define: Callable[[], object]) -> None:
        next_step = self._next_step()
        if next_step <= step:
            return
        obstacle = self._rewind(step) if self._rewind is not None else None
        if self._rewind is not None and obstacle is None:
            logger.warning(
                "W&B: the job continues at step %s: its run had steps up to %d, and was rewound", step, next_step - 1
            )
            return
        self._rewind = None
        self._distance = next_step - step
        define()
        logger.warning(
            "W&B: the job continues at step %s, and its run has the steps up to %d already%s. All rows are kept: those "
            "of this attempt are at the run's next steps, with their own steps in %r and %s=%d",
            step,
            next_step - 1,
            "" if obstacle is None else f", and cannot be rewound: {obstacle}",
            self._column,
            RESTART_COUNT,
            self._restart_count,
        )

    def _with_columns(self, data: Any, step: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # wandb raises, and says why
        columns = {} if step is None else {self._column: step}
        return {**columns, RESTART_COUNT: self._restart_count, **data}
