"""The steps of each attempt of a run, in files of this machine: a restart reads what the attempts before it have made.

An attempt may be killed at any moment. So its steps are noted every few seconds, by the monitor's thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

from flyteplugins_tracking._job.agreement import CallCounter
from flyteplugins_tracking._job.board import Board, DirectoryStore, user_directory
from flyteplugins_tracking._job.goodput import Attempt, metrics
from flyteplugins_tracking._runs.calls import OpenRun

_NOTE_S = 5.0
_TOPIC = "goodput"


class GoodputDuty:
    """Notes the steps of this attempt."""

    def __init__(self, board: Board, counter: CallCounter, step: int) -> None:
        """Begin an attempt.

        Args:
            board: Where the run's attempts are.
            counter: Has the last step of this one.
            step: The first step of this one.
        """
        self._board = board
        self._counter = counter
        self._number = board.count("attempts", 1)
        self._began = self._last = (time.time(), step)
        self._note()

    @classmethod
    def of(cls, run: OpenRun, counter: CallCounter, step: int) -> GoodputDuty:
        """Begin an attempt of this run.

        Raises:
            OSError: The directory cannot be written.
        """
        name = "\0".join((run.tracker, run.config.project or "", run.handle.id))
        directory = user_directory() / f"goodput-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return cls(Board(DirectoryStore(directory), _TOPIC), counter, step)

    def next_wait_s(self) -> float:
        """Return how long the thread waits before the next `look`."""
        return _NOTE_S

    def begin(self, board: Board) -> None:
        """Do nothing: the job's board ends with the job."""

    def look(self, board: Board) -> None:  # noqa: ARG002 as for `begin`
        """Note the last step."""
        step = self._counter.step
        if step is not None and step != self._last[1]:
            self._last = (time.time(), step)
            self._note()

    def end(self, board: Board, has_failed: bool) -> None:  # noqa: ARG002
        """Note the last step."""
        self.look(board)

    def close(self) -> None:
        """Do nothing."""

    def values(self) -> Mapping[str, float]:
        """Return the run's `goodput/*`; nothing in its first attempt."""
        texts = self._board.get_all(str(number) for number in range(1, self._number + 1))
        return metrics([Attempt.from_json(text) for text in texts if text is not None])

    def forget(self) -> None:
        """Remove the run's attempts: it has ended."""
        self._board.remove()

    def _note(self) -> None:
        attempt = Attempt(self._began[0], self._began[1], self._last[0], self._last[1])
        self._board.put(str(self._number), attempt.to_json())


def text_of(values: Mapping[str, float]) -> str:
    """Return the goodput in one line."""
    return (
        f"goodput {values['goodput/share']:.0%} in {values['goodput/attempts']:g} attempts: "
        f"{values['goodput/restart_s']:.0f} s between them, {values['goodput/repeated_s']:.0f} s for steps made again"
    )
