"""Runs that are kept in local files while their service cannot be used, and are sent to it later.

This is for services whose own clients have no such files. A run is a directory, with a journal for each process that
has written to it: the rows, the calls on the run object, and the run's end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, Run, restart_count_of
from flyteplugins_tracking.trackers.journal import how_to_send, lines
from flyteplugins_tracking.trackers.journal.files import Journal
from flyteplugins_tracking.trackers.journal.relog import REPEATED

logger = logging.getLogger(__name__)

# The parent of the runs' directories, in the job's working directory.
FOLDER = "tracking-offline"
# The arguments that mean nothing to the process that sends the run later. The address of a webhook is a password.
_OF_THIS_JOB = ("secret", "tracker", "primary_rank", "webhook_url", "webhook_min_level")


def open_or_keep(request: RunRequest, tracker: Tracker, open_run: Callable[[], ClientHandle]) -> ClientHandle:
    """Open the run by `open_run`. If the service cannot be used and `if_unavailable` allows it, open a local run.

    Raises:
        TrackerUnavailableError: The service cannot be used, and `if_unavailable` is "raise".
    """
    try:
        return open_run()
    except TrackerUnavailableError as error:
        if request.config.if_unavailable == "raise":
            raise
        handle = LocalHandle(request, tracker)
        if request.plan.primary or (request.node_leader is not None and request.leads_node):
            logger.warning(
                "%s This run is logged to files. Send it when %s answers: %s",
                error,
                tracker.title,
                handle.how_to_send(handle.directory),
            )
        return handle


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
        self.journal.add(lines.encode(line))


def directory_of(tracker: str, run_id: str) -> str:
    """Return the directory with the journals of a run."""
    return os.path.abspath(os.path.join(FOLDER, f"{tracker}-{run_id}"))


def remove_if_empty(directory: str) -> None:
    """Remove a run's directory and its parent, if nothing is in them."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)
        os.rmdir(os.path.dirname(directory))


class LocalRun(Run):
    """The object that `get_run` returns for a run in files. Calls on it are kept, and made when the run is sent."""

    def __init__(self, handle: LocalHandle) -> None:
        super().__init__(handle)
        self._kept = handle.file
        self._warn_once = WarnOnce(logger)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._keep(name, args, kwargs)

    def _keep(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if name not in REPEATED:
            text = "run %s is logged to files: a call of %s() will not be repeated when it is sent. Repeated are: %s"
            self._warn_once(name, text, self.id, name, ", ".join(sorted(REPEATED)))
        try:
            self._kept.call(name, args, kwargs)
        except (TypeError, ValueError):
            text = "run %s is logged to files as JSON: a call of %s() is lost, since JSON cannot hold its arguments"
            self._warn_once(name, text, self.id, name)


class LocalHandle(ClientHandle):
    """An open run that is kept in files."""

    def __init__(self, request: RunRequest, tracker: Tracker) -> None:
        super().__init__(request, tracker.title)
        self.file = RunFile(request, tracker, self.id)
        self.directory = self.file.directory
        self.run = LocalRun(self)

    @property
    def url(self) -> str | None:
        """A run in files has no page."""
        return None

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        row = {key: value for key, value in row.items() if self._fits(key, value)}
        if row:
            self.file.row(row, step.item() if callable(getattr(step, "item", None)) else step)

    def _fits(self, key: str, value: Any) -> bool:
        if isinstance(value, (int, float, str)):
            return True
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            self._values.warn_once(
                key, f"a value of type {type(value).__name__} is left out: the run is logged to files as JSON"
            )
            return False
        return True

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.file.event(name, values, text)

    def end(self, exit_code: int) -> None:
        journal = self.file.journal
        if journal.lost:
            text = "%s: run %s: %d of %d rows and calls are lost: the files in %s could not be written"
            logger.warning(text, self._title, self.id, journal.lost, journal.added, self.directory)
        self.file.end(exit_code)

    def finish(self, exit_code: int) -> None:
        super().finish(exit_code)
        self.file.journal.close()

    def unsent(self) -> Sequence[str]:
        return [self.directory]

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory, self.request.config.options)

    def how_to_view(self) -> str:
        command = self.how_to_send(self.directory)
        return f"{command}, or with --tracker trackio to look at it without {self._title}"


def _header(request: RunRequest, tracker: Tracker, run_id: str) -> dict[str, Any]:
    arguments = {name: value for name, value in request.config.arguments.items() if name not in _OF_THIS_JOB}
    return {
        "tracker": tracker.name,
        "id": run_id,
        "group": request.plan.group,
        "primary": request.plan.primary,
        "attempt": restart_count_of(request),
        "arguments": {**arguments, "run_mode": "auto", "if_unavailable": "raise", "rank_prefix": False},
        "run_metadata": dict(request.run_metadata),
    }
