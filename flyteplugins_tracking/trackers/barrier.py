"""The primary's wait for the other writers of a run, through the store of the launcher or of the ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from flyteplugins_tracking._job.board import Board, job_board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.ending import EndLimit

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class WriterBarrier:
    """Lets the primary end the run when the other writers have written all their rows.

    Without a store, or when the store has gone, nobody waits.

    The keys in the store outlive an attempt of the job, whose writers may have been killed. So the primary counts how
    often it has entered, and so does each other writer. A writer that leaves stores both counts, and the primary
    compares them with the counts of its own attempt. A writer that has come and gone before the primary entered is
    recognized too, and not waited for.

    The store may be the process group's own, which ends with the process of rank 0. If another rank is the primary, it
    waits no longer then.

    Attributes:
        is_retry: Whether the run may exist from an earlier attempt. The service itself would also call a run "resumed"
            that another writer has just created.
    """

    def __init__(self, board: Board | None, label: str = "", others: Sequence[str] = ()) -> None:
        """Does nothing on the board yet.

        Args:
            board: Where the run's writers leave their counts; None for none.
            label: This writer's name. The primary needs none.
            others: The names of the writers that the primary waits for. A writer does not wait for itself.
        """
        self._board = board
        self._label, self._others = label, [other for other in others if other != label]
        self._entry = 0
        self._is_primary = self.is_retry = False

    @classmethod
    def of_ranks(cls, request: RunRequest, title: str) -> WriterBarrier | None:
        """Enter the barrier of a run to which each rank writes with a client of its own, before the run is opened.

        Args:
            request: The run that is opened.
            title: The service's name. It separates the runs of two services.

        Returns:
            None if the run has one writer.
        """
        info, config = request.info, request.config
        if info is None or config.run_mode != "shared":
            return None
        if config.rank_scope == "global":
            label, others = f"rank-{info.rank}", [f"rank-{rank}" for rank in range(info.world_size)]
        else:
            local_ranks = range(info.local_world_size or 1)
            label, others = f"local-rank-{info.local_rank}", [f"local-rank-{rank}" for rank in local_ranks]
        barrier = cls(_board(info, title, f"writers/{title}/{request.planned_run_id}"), label, others)
        barrier.enter(is_primary=request.plan.primary)
        barrier.is_retry |= request.restart_count > 0
        return barrier

    def enter(self, *, is_primary: bool) -> None:
        """Enter, as the writer that ends the run or as another one. In another attempt, it may be the other way."""
        self._is_primary = is_primary
        if self._board is not None:
            with suppress(RuntimeError):
                own_entries = self._board.count(f"entries/{self._label}", 1)
                self._entry = self._board.count("entries", int(is_primary))
                self.is_retry = own_entries > 1 or self._entry > 1

    def has_resumed(self, had_rows: bool) -> bool:
        """Return whether the run is an earlier attempt's. Called before this writer's first row.

        Args:
            had_rows: Whether the run had rows when this writer has opened it. They may be another writer's of this
                attempt: what the first writer has found counts, or without a board what the primary has found.
        """
        if self._board is not None and not self.is_retry:
            with suppress(RuntimeError):
                return self._board.put_first("had_rows", str(had_rows)) == str(True)
        return self.is_retry or (had_rows and self._is_primary)

    def leave(self) -> None:
        """Tell the primary that this writer has written all its rows."""
        if self._board is None or self._is_primary:
            return
        with suppress(RuntimeError):
            entries = self._board.count("entries")
            self._board.put(f"left/{self._label}", f"{entries} {self._board.count(f'entries/{self._label}')}")

    def wait(self, limit: EndLimit) -> list[str]:
        """On the primary, wait until the others have left, while there is time and not after a SIGTERM.

        Returns:
            The labels of the writers that have not left.
        """
        if self._board is None or not self._is_primary:
            return []
        with suppress(RuntimeError):
            while (late := self._missing(self._board)) and not limit.is_terminated:
                if not limit.lasts():
                    return late
                time.sleep(_POLL_S)
        return []

    def _missing(self, board: Board) -> list[str]:
        self._others = [label for label in self._others if not self._has_left(board, label)]
        return self._others

    def _has_left(self, board: Board, label: str) -> bool:
        try:
            entries, own_entries = map(int, (board.get(f"left/{label}") or "").split())
        except ValueError:  # there is none, or another program's
            return False
        is_of_this_entry = own_entries >= self._entry and own_entries == board.count(f"entries/{label}")
        return entries >= self._entry or is_of_this_entry


def _board(info: DistributedInfo, title: str, topic: str) -> Board | None:
    try:
        return job_board(info, os.environ, topic)
    except RuntimeError as error:
        logger.warning(
            "%s: the store that the ranks share does not answer (%s). So the primary cannot wait for other writers, "
            "and the run may end before their last rows",
            title,
            error,
        )
        return None
