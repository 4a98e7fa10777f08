"""An open Trackio run: its rows, its status and its end within the deadline."""

from __future__ import annotations

import functools
import os
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import prefix_of, status_of
from flyteplugins_tracking.trackers.config import OWN, own_values
from flyteplugins_tracking.trackers.journal import Line, event_values
from flyteplugins_tracking.trackers.kept import OutboxHandle
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError, may_pass
from flyteplugins_tracking.trackers.rows import MetricSanitizer, Steps
from flyteplugins_tracking.trackers.trackio import EXIT_CODE, STATUS, default_directory, page_address, vendor
from flyteplugins_tracking.trackers.trackio.store import Database, Store, Stored, text_of

# How often the end looks whether the client's threads have ended, in seconds.
_POLL_S = 0.25
# The HTTP statuses by which a server refuses a client, and not what it sends: a token may be renewed.
_UNAUTHORIZED = (401, 403)


class TrackioHandle(OutboxHandle):
    """An open Trackio run."""

    vendors_keys = ("_",)

    def __init__(self, request: RunRequest, tracker: Tracker, run: Any, store: Store, stored: Stored | None) -> None:
        self._store = store
        values = MetricSanitizer(tracker.title, prefix_of(request))
        steps = Steps(values)
        self._rows = TrackioSink(store, run, steps, request.plan.ends_run)
        self._stored = stored
        super().__init__(request, tracker, self._rows, values, steps)
        run.resumed = self._is_retry
        run.tracking, self.run = self, run
        try:
            self._put_status("running", None, request.deadline - time.monotonic())
        except Exception as error:
            raise cannot_write(store.place, error) from error
        self.undo.callback(vendor.make_current(run))

    @property
    def url(self) -> str | None:
        """The run's page; None for a run in files."""
        return page_address(self.run.url, self.run.project, self.id) if self.run.url else None

    @functools.cached_property
    def _is_retry(self) -> bool:
        """Whether what is stored is an earlier attempt's, and not this one's, of another rank."""
        had_rows = self._stored is not None
        has_resumed = had_rows if self._barrier is None else self._barrier.has_resumed(had_rows)
        return had_rows and has_resumed

    def stored_step(self) -> int:
        last_step = self._stored.last_step if self._stored is not None and self._is_retry else None
        return -1 if last_step is None else last_step

    def exit_code_after(self, time_s: float) -> int | None:
        stored = self._stored
        if stored is None or stored.last_at <= time_s:
            return None
        ended_with = own_values(stored.config).get(EXIT_CODE)
        return ended_with if isinstance(ended_with, int) else None

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        at = self.steps.take(step)
        for prepared in self.run.prepared(row, at):
            self.put_row(prepared, at)

    def join(self, given: Mapping[str, Any]) -> None:
        """Add the config of a `trackio.init` of the function."""
        self.run.config.update(
            self.describe("trackio.init", given, {"project": self.run.project, "name": self.run.name})
        )

    def end(self, exit_code: int) -> None:
        limit = self.end_limit()
        ending = threading.Thread(target=vendor.finish, args=(self.run,), daemon=True)
        ending.start()
        self.close_outbox(exit_code, limit)
        while limit.lasts() and not threads.join(ending, _POLL_S):
            pass

    def end_run(self, exit_code: int, timeout_s: float) -> None:
        threads.call_within(timeout_s, self._put_status, status_of(exit_code), exit_code, timeout_s)

    def unsent(self) -> Sequence[str]:
        # Trackio's default directory is lost with a pod. A directory that the user has chosen is not.
        is_chosen = self.run.url is not None or "TRACKIO_DIR" in os.environ or "HF_HOME" in os.environ
        return [*([default_directory()] if self.request.leads_node and not is_chosen else []), *super().unsent()]

    def how_to_send(self, directory: str) -> str:
        is_kept = os.path.basename(directory) == os.path.basename(self.directory())
        return super().how_to_send(directory) if is_kept else f"TRACKIO_DIR={shlex.quote(directory)} trackio show"

    def how_to_view(self) -> str:
        is_chosen = any(name in os.environ for name in ("TRACKIO_DIR", "HF_HOME", "XDG_CACHE_HOME"))
        place = f"TRACKIO_DIR={shlex.quote(default_directory())} " if is_chosen else ""
        return self.url or f"{place}trackio show --project {shlex.quote(self.run.project)}"

    def _put_status(self, status: str, exit_code: int | None, timeout_s: float) -> None:
        config, store = self.run.config, self._store
        if not self.request.plan.ends_run:
            return
        own = {key: value for key, value in own_values(config).items() if key != EXIT_CODE}
        config[OWN] = {**own, STATUS: status, **({} if exit_code is None else {EXIT_CODE: exit_code})}
        if isinstance(store, Database):
            store.put_config(self.id, self.run.name, config, timeout_s)
        elif exit_code is not None:  # when the run opens, its config goes with the first row
            self._rows.send_config()


class TrackioSink:
    """Writes lines to a run. They can be written twice: Trackio knows the rows that it has by their `log_id`."""

    def __init__(self, store: Store, run: Any, steps: Steps, owns_config: bool) -> None:
        """`owns_config` is whether the run's config is written: with the next row, if it has changed."""
        self._store, self._run, self._steps = store, run, steps
        self._owns_config = owns_config
        self._stored_config: dict[str, Any] = {}
        self._last = self._entry({"row": {}, "time": time.time(), "id": f"{run.id}/config"}, 0)

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:  # noqa: ARG002 the store has a limit of its own
        entries = [entry for line in lines if "row" in line for entry in self._entries(line)]
        if entries:
            self._log(entries)
            self._last = entries[-1]
        for line in lines:
            if "event" in line:
                values = event_values(line)
                self._run.config.update(values)  # which is sent with the status
                for key in [key for key, value in values.items() if value is None]:
                    del self._run.config[key]

    def send_config(self) -> None:
        """Send the run's config, with a row that it has."""
        self._log([self._last])

    def _log(self, entries: list[dict[str, Any]]) -> None:
        config = dict(self._run.config)
        is_due = self._owns_config and config != self._stored_config
        try:
            self._store.log([{**entries[0], "config": config if is_due else None}, *entries[1:]])
            self._stored_config = config
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", 500)
            is_refusal = not may_pass(status) and status not in _UNAUTHORIZED
            if is_refusal or isinstance(error, (TypeError, ValueError, OverflowError)):
                raise RejectedError(str(error)) from None
            raise AwayError(f"{self._store.place} cannot be written to at present: {error}") from None

    def _entries(self, line: Line) -> list[dict[str, Any]]:
        step = self._steps.take(line["step"])
        rows = self._run.prepared(line["row"], step) if line.get("is_kept") else [line["row"]]
        return [self._entry({**line, "row": row}, step) for row in rows]

    def _entry(self, line: Line, step: int) -> dict[str, Any]:
        return {
            "project": self._run.project,
            "run": self._run.name,
            "run_id": self._run.id,
            "metrics": line["row"],
            "step": step,
            "timestamp": text_of(line["time"]),
            "config": None,
            "log_id": line["id"],
        }


def cannot_write(place: str, error: Exception) -> AwayError:
    """Return the error for a directory or a server to which runs cannot be written."""
    return AwayError(
        f"runs cannot be kept in {place}: {error}. Set TRACKIO_DIR to a directory that can be written, or log to a "
        "server (server_url=)",
        is_outage=is_outage(error),
    )


def is_outage(error: Exception) -> bool:
    """Whether an error of a directory or a server is of an outage: see `TrackerUnavailableError`."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return not isinstance(error, (PermissionError, ValueError)) and (status is None or may_pass(status))
