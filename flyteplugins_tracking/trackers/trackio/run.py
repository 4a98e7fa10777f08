"""An open Trackio run: its rows, its status and its end within the deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import ClientHandle, status_of
from flyteplugins_tracking.trackers.earlier import EarlierAttempts, RunFile
from flyteplugins_tracking.trackers.journal import encode, stored
from flyteplugins_tracking.trackers.kept import what_is_kept
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.trackio import EXIT_CODE, STATUS, page_address, vendor

logger = logging.getLogger(__name__)

# The database's limit for a step, with room for the steps that follow.
_MOST_STEPS = 2**62
# The part of finish_timeout_s that is kept for the status, after the rows.
_STATUS_SHARE = 0.1
# The method of the run that queues a row of a journal.
_REQUEUE = "requeue"


class TrackioHandle(ClientHandle):
    """An open Trackio run."""

    def __init__(self, request: RunRequest, tracker: Any, run: Any, store: Any, resumed: Any) -> None:
        super().__init__(request, tracker.title)
        self._tracker = tracker
        self.run, self._store = run, store
        is_retry = request.plan.primary or self._barrier is None or self._barrier.is_retry
        last_step = None if resumed is None or not (store.knows_times or is_retry) else resumed.last_step
        self._next_step = 0 if last_step is None else last_step + 1
        self._summary: dict[str, Any] = {}
        self._kept_in: str | None = None  # the directory of rows that were not written in time
        self._warn_once = WarnOnce(logger)
        run.resumed = resumed is not None and (request.plan.primary or last_step is not None)
        run.tracking = self
        self._file = RunFile(request, tracker, self.id)
        self._earlier = EarlierAttempts.of(request, tracker, self.id)
        self._write_earlier()
        if request.plan.primary:
            self._send_status("running", None, request.deadline)
        self._restore = vendor.make_current(run)

    @property
    def url(self) -> str | None:
        """The run's page; None for a run in files."""
        return page_address(self.run.url, self.run.project, self.id) if self.run.url else None

    def summary(self) -> Mapping[str, Any]:
        return self._summary

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        step = self._next_step if step is None else int(step)
        if abs(step) > _MOST_STEPS:  # the database would refuse the other rows of the batch too
            raise ValueError(f"step={step} must be between -2**62 and 2**62, since Trackio's steps have 64 bits")
        self._next_step = max(self._next_step, step + 1)
        entry = self.run.queue(row, step)
        if entry is not None:
            self._keep_entry(entry)
        self._summary.update({key: value for key, value in row.items() if isinstance(value, (int, float))})

    @property
    def last_step(self) -> Any:
        """The step of the last row."""
        return max(0, self._next_step - 1)

    def keep_end(self, exit_code: int) -> None:
        self._file.end(exit_code)

    def end(self, exit_code: int) -> None:
        timeout_s = self.request.config.finish_timeout_s
        deadline = time.monotonic() + timeout_s
        if self.request.plan.primary and not self._store.shows_config:
            self._send_status(status_of(exit_code), exit_code, deadline)
        self.run.stop(deadline - timeout_s * _STATUS_SHARE)
        if self.request.plan.primary and self._store.shows_config:
            self._send_status(status_of(exit_code), exit_code, deadline)
        unwritten = self.run.unwritten()
        if unwritten:
            self._keep(unwritten, exit_code)
        else:
            self._file.remove()
            self._file = RunFile(self.request, self._tracker, self.id)

    def resume(self) -> None:
        self.run.resume()

    def finish(self, exit_code: int) -> None:
        try:
            super().finish(exit_code)
        finally:
            self._tracker.reset_start()
            self._restore()

    def unsent(self) -> Sequence[str]:
        # Trackio's default directory is lost with a pod. A directory that the user has chosen is not.
        is_chosen = self.run.url is not None or "TRACKIO_DIR" in os.environ or "HF_HOME" in os.environ
        directories = [str(vendor.directory())] if self.request.leads_node and not is_chosen else []
        return directories if self._kept_in is None else [*directories, self._kept_in]

    def how_to_send(self, directory: str) -> str:
        is_journal = self._kept_in is not None and directory.endswith(os.path.basename(self._kept_in))
        return (
            how_to_send(directory, self.request.config.options)
            if is_journal
            else f"TRACKIO_DIR={directory} trackio show"
        )

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.run.config.update({**values, f"{name}/text": text})  # which is sent with the status

    def how_to_view(self) -> str:
        is_chosen = any(name in os.environ for name in ("TRACKIO_DIR", "HF_HOME", "XDG_CACHE_HOME"))
        place = f"TRACKIO_DIR={shlex.quote(str(vendor.directory()))} " if is_chosen else ""
        return self.url or f"{place}trackio show --project {shlex.quote(self.run.project)}"

    def warn_of_delay(self, error: Exception) -> None:
        """Warn, once, that rows could not be written and are kept in memory."""
        text = "Trackio: run %s cannot be written to %s at present: %s. Its rows are kept, and written later"
        self._warn_once("delay", text, self.id, self._store.place, error)

    def _send_status(self, status: str, exit_code: int | None, deadline: float) -> None:
        config = self.run.config
        config.pop(EXIT_CODE, None)
        config.update({STATUS: status} if exit_code is None else {STATUS: status, EXIT_CODE: exit_code})
        if self._store.shows_config:
            self._put_config(deadline, is_opening=exit_code is None)
        elif exit_code is not None:
            self.run.send_config()  # when the run opens, Trackio sends the config with the first row

    def _put_config(self, deadline: float, is_opening: bool) -> None:
        try:
            self._store.put_config(self.id, self.run.name, vendor.serialized(self.run.config), deadline)
        except Exception as error:
            if is_opening:
                raise TrackerUnavailableError(cannot_write(self._store.place, error)) from error
            logger.warning("Trackio: the status of run %s could not be written: %s", self.id, error)

    def writing(self) -> Callable[[], None]:
        """Return what to call when the rows that are queued now are written."""
        journal, count = self._file.journal, self._file.journal.added

        def written() -> None:
            if self._earlier.count:
                self._earlier.acknowledged()
            if count:
                journal.acknowledged(count)

        return written

    def _write_earlier(self) -> None:
        """Queue the rows that earlier attempts had logged. Trackio knows those that it has by their `log_id`."""
        for line in self._earlier.lines:
            if line.get("call") == _REQUEUE:
                (entry,) = line["args"]
                self.run.requeue(entry)
                self._earlier.count += 1
                self._next_step = max(self._next_step, entry["step"] + 1)
            else:
                self._earlier.relog(self, [line])
        self._earlier.log(self.id, self._title)

    def _keep_entry(self, entry: dict[str, Any]) -> None:
        line = {"call": _REQUEUE, "args": [entry], "kwargs": {}}
        with contextlib.suppress(TypeError, ValueError):  # such as an image
            self._file.journal.add(encode(line))

    def _keep(self, rows: Sequence[Mapping[str, Any]], exit_code: int) -> None:
        """Leave the journal, with what is not written, to who sends it later."""
        self._file.end(exit_code)
        self._file.journal.close()
        self._kept_in = self._file.directory
        self._file = RunFile(self.request, self._tracker, self.id)
        kept = {entry["log_id"] for entry in _entries(Path(self._kept_in))}
        logger.warning(
            "Trackio: %d rows of run %s could not be written to %s within %s. %s Send them later: %s",
            len(rows),
            self.id,
            self._store.place,
            self.request.config.finish_limit,
            what_is_kept(len(rows), sum(row["log_id"] not in kept for row in rows)),
            how_to_send(self._kept_in, self.request.config.options),
        )


def _entries(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that the journals of a directory have, as Trackio queues them."""
    for journal in stored(directory):
        for line in journal.lines():
            if line.get("call") == _REQUEUE:
                yield line["args"][0]


def cannot_write(place: str, error: Exception) -> str:
    """Return the message for a directory or a server to which runs cannot be written."""
    return (
        f"Trackio cannot keep runs in {place}: {error}. Set TRACKIO_DIR to a directory that can be written, or log to "
        "a server (server_url=)."
    )
