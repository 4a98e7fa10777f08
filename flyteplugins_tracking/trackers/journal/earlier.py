"""The rows that earlier attempts of a run have left in journals here, for the attempt that opens it again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.journal.files import StoredJournal, stored
from flyteplugins_tracking.trackers.journal.lines import decode_all
from flyteplugins_tracking.trackers.journal.local import directory_of, remove_if_empty
from flyteplugins_tracking.trackers.journal.relog import relog

logger = logging.getLogger(__name__)


class EarlierAttempts:
    """The pending lines of a run's earlier attempts.

    Attributes:
        lines: The lines, in the order of the attempts.
        count: How many of them were handed to the client.
    """

    def __init__(self, directory: str, journals: Sequence[StoredJournal]) -> None:
        self.lines: list[Mapping[str, Any]] = [line for journal in journals for line in decode_all(journal.pending())]
        self.count = 0
        self._directory = directory
        self._journals = journals

    @classmethod
    def of(cls, request: RunRequest, tracker: Tracker, run_id: str) -> EarlierAttempts:
        """Return those of a run, for one rank of each node. Journals of processes that live are left out."""
        directory = directory_of(tracker.name, run_id)
        journals: list[StoredJournal] = []
        if request.plan.run_id is not None and (request.plan.primary or request.leads_node):
            journals = [journal for journal in stored(Path(directory)) if not journal.is_open()]
        return cls(directory, journals)

    def log(self, run_id: str, title: str) -> None:
        """Log how many lines are sent, if there are any."""
        if self.count:
            text = (
                "%s: run %s: sent %d rows again that earlier attempts had logged and %s may not have received, from %s"
            )
            logger.warning(text, title, run_id, self.count, title, self._directory)
        else:
            self.acknowledged()

    def keep(self) -> None:
        """Leave the journals to a later attempt: there is no room for all of their lines."""
        self._journals = []

    def relog(self, handle: ClientHandle, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of a run that was logged to files. Its service was away then: it has none of them.

        A call that fails is lost, with a warning. The run stays open.
        """
        for line in lines:
            self.count += "row" in line
            try:
                relog(handle, [line], self._directory)
            except TrackerUnavailableError as error:
                logger.warning("%s: of an earlier attempt, in %s", error, self._directory)
            except Exception:  # what was left behind must not keep the training from its run
                logger.warning("a line of an earlier attempt is lost, in %s", self._directory, exc_info=True)

    def acknowledged(self) -> None:
        """Remove the journals: the service has everything."""
        for journal in self._journals:
            journal.remove()
        self._journals = []
        remove_if_empty(self._directory)
