"""The rows that earlier attempts of a run have left in journals here, for trackers without an outbox."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.journal import Journal, StoredJournal, encode, stored
from flyteplugins_tracking.trackers.kept import REPEATED, _header, directory_of

logger = logging.getLogger(__name__)


def remove_if_empty(directory: str) -> None:
    """Remove a run's directory and its parent, if nothing is in them."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)
        os.rmdir(os.path.dirname(directory))


class RunFile:
    """One process's journal of a run: what it has logged, with what another process needs to open the run."""

    def __init__(
        self,
        request: RunRequest,
        tracker: Tracker,
        run_id: str,
        directory: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the journal of the run `run_id`. The first line creates it.

        Args:
            request: The decorator's request for the run.
            tracker: The tracker.
            run_id: The run's id.
            directory: Where the journal is. By default, in the directory that the run's attempts have in common.
            more: What else its readers need to know: values of JSON.
        """
        self.directory = directory or directory_of(tracker.name, run_id)
        header = {**_header(request, tracker, run_id), **(more or {})}
        rank = request.info.rank if request.info else 0
        # Sorted by name, the journals are in the order of the attempts, each attempt's primary rank first.
        who = f"{0 if request.plan.primary else 1}-rank-{rank}-{secrets.token_hex(3)}"
        name = f"{header['attempt']:04}-{int(time.time()):x}-{who}"
        self.journal = Journal(Path(self.directory), name, header)

    def row(self, row: Mapping[str, Any], step: Any, time_s: float | None = None) -> None:
        """Keep a row."""
        self._add({"row": row, "step": step, "time": time_s or time.time()})

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep a call of a method of the run object."""
        self._add({"call": method, "args": args, "kwargs": kwargs})

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Keep what the run tells of its job: see `Handle.record_event`."""
        self._add({"event": name, "values": dict(values), "text": text})

    def queue(self, directory: str) -> None:
        """Keep that the rows are in files of the service's client, beside the journal."""
        self._add({"queue": directory})

    def end(self, exit_code: int) -> None:
        """Keep the run's end."""
        self._add({"exit_code": exit_code})

    def remove(self) -> None:
        """Remove the journal, and its directory if it is the last one: the service has everything."""
        self.journal.remove()
        remove_if_empty(self.directory)

    def _add(self, line: Mapping[str, Any]) -> None:
        self.journal.add(encode(line))


class EarlierAttempts:
    """The pending lines of a run's earlier attempts.

    Attributes:
        lines: The lines, in the order of the attempts.
        count: How many of them were handed to the client.
    """

    def __init__(self, directory: str, journals: Sequence[StoredJournal]) -> None:
        self.lines: list[Mapping[str, Any]] = [line for journal in journals for line in journal.lines()]
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


def relog(handle: ClientHandle, lines: Sequence[Mapping[str, Any]], directory: str) -> None:
    """Log lines to an open run: its rows, calls and events. The run's end is left out.

    Args:
        handle: The run.
        lines: The lines.
        directory: Where their journal is.

    Raises:
        TrackerUnavailableError: The service does not answer to a call.
    """
    for line in lines:
        if "row" in line:
            handle.replay(line["row"], line["step"], line["time"])
        elif "call" in line:
            _call(handle, line["call"], line["args"], line["kwargs"])
        elif "event" in line:
            handle.record_event(line["event"], line["values"], line["text"])
        elif "queue" in line:
            handle.replay_queue(directory, line["queue"])


def _call(handle: ClientHandle, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Repeat a kept call. A call that can never succeed must not keep the rest from being sent."""
    if name not in REPEATED:
        text = "run %s: the kept call of %s() fails, and is lost: of kept calls only these are repeated: %s"
        logger.warning(text, handle.id, name, ", ".join(sorted(REPEATED)))
        return
    try:
        getattr(handle.run, name)(*args, **kwargs)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        logger.warning(
            "run %s: the kept call of %s() fails, and is lost: %s: %s", handle.id, name, type(error).__name__, error
        )
    except Exception as error:
        raise TrackerUnavailableError(
            f"the kept call of {name}() has failed: {type(error).__name__}: {error}"
        ) from error
