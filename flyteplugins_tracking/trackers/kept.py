"""Runs of MLflow, Pluto and Trackio, whose lines go through an outbox, online too, which keeps them on this disk.

If the service is away when a run is opened, and `if_unavailable="degrade"`, the outbox has no sink: the run is only
kept. Its directory is sent later, by the next attempt of the job or by `flyteplugins-tracking send`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers import client
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.journal import Journal, Line, StoredJournal, encode, stored
from flyteplugins_tracking.trackers.outbox import AwayError, Outbox, RejectedError, Sink, how_to_send, servers_of
from flyteplugins_tracking.trackers.rows import MetricSanitizer, Steps

logger = logging.getLogger(__name__)

# The parent of the runs' directories, in the job's working directory.
FOLDER = "tracking-offline"
# The arguments that mean nothing to the process that sends the run later. The address of a webhook is a password.
_OF_THIS_JOB = ("secret", "tracker", "primary_rank", "webhook_url", "webhook_min_level")
# The trackers whose kept runs the next attempt sends, or `send`; with the calls of the run object that are kept too.
SENT_LATER: Mapping[str, Sequence[str]] = {
    "mlflow": ("log_param", "log_params", "set_tag", "set_tags"),
    "pluto": (),
    "trackio": (),
}
# The part of a run's end that is kept for sending the status: seconds, and the largest share of finish_timeout_s.
_STATUS_S, _STATUS_SHARE = 3.0, 0.25


class OutboxHandle(client.ClientHandle):
    """An open run whose lines go through an outbox.

    A tracker implements `end_run`, and gives a sink.

    Attributes:
        header: What the journal's readers need to know beside what they need of each tracker.
        steps: The steps of the rows.
        undo: Undoes, at the run's end, what was done to the process.
        earlier_exit_code: The status that the first journal of earlier attempts ends with, which are sent; 1 if its
            process was killed before it could tell.
    """

    header: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        request: RunRequest,
        tracker: Tracker,
        sink: Sink | None,
        values: MetricSanitizer | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Initialize the handle of a run that is open.

        Args:
            request: The decorator's request for this run.
            tracker: The tracker.
            sink: Where lines go; None to keep them.
            values: Makes rows of logged values.
            steps: The steps of the rows.
        """
        super().__init__(request, tracker.title, values)
        self._tracker, self._sink = tracker, sink
        self.steps = steps or Steps(self._values)
        self.undo = ExitStack()
        self._left_in: str | None = None  # the directory of what was not sent in time
        self._has_earlier = False  # whether attempts are sent that this machine has kept
        self.steps.last = max(self.steps.last, self.stored_step())  # before the outbox sends the first row
        self._open_outbox()

    def stored_step(self) -> int:
        """Return the last step that the run has at its service; -1 for none. Called once, before anything is sent."""
        return -1

    def exit_code_after(self, time_s: float) -> int | None:  # noqa: ARG002 as trackers need it
        """Return the status with which the run had ended when it was opened here, if it had rows after a time."""
        return None

    def end_run(self, exit_code: int, timeout_s: float) -> None:  # noqa: ARG002 as trackers need it
        """Send the run's status within `timeout_s` seconds, after its lines. Called in every rank's end.

        Raises:
            RejectedError: The service will never take it.
            Exception: The service has not taken it.
        """
        return

    @property
    def rejected_rows(self) -> int:
        """How many rows the service has rejected."""
        return self._outbox.rejected_rows

    def before_removal(self, journal: StoredJournal) -> None:
        """Remove what an earlier attempt has left beside its journal, whose lines are sent."""

    def sendable(self) -> RunRequest:
        """Return the request with which another process opens the run, to send what is kept."""
        return self.request

    def put(self, line: Line) -> None:
        """Send a line, and keep it until then."""
        self.pass_on(lambda: self._outbox.put(line))

    def put_row(self, row: Mapping[str, Any], step: int | None, time_s: float | None = None) -> None:
        """Send a row, from within `write`. `time_s` is when it was logged, in seconds since the epoch: now if None."""
        self._outbox.put({"row": dict(row), "step": step, "time": time.time() if time_s is None else time_s})

    @property
    def last_step(self) -> Any:
        """The step of the last row."""
        return max(0, self.steps.last)

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        self.put_row(row, self.steps.take(step))

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.put({"event": name, "values": dict(values), "text": text})

    def forget_event(self, name: str, keys: Sequence[str]) -> None:
        if self._has_earlier or getattr(self.run, "resumed", True):  # who sends a kept run may have an earlier attempt
            self.put({"event": name, "values": dict.fromkeys(keys), "text": None})

    def end(self, exit_code: int) -> None:
        self.close_outbox(exit_code, self.end_limit())

    def finish(self, exit_code: int) -> None:
        with self.undo:
            super().finish(exit_code)

    def close_outbox(self, exit_code: int, limit: EndLimit) -> None:
        """Send all lines, and then the status, as long as `limit` lasts. What is left stays in files."""
        reserve_s = min(_STATUS_S, limit.left_s * _STATUS_SHARE)
        self._outbox.put({"exit_code": exit_code})
        is_sent = self._outbox.close(limit, reserve_s)
        is_complete = self._sink is not None and self._send_end(exit_code, limit.left_s) and is_sent
        self._left_in = None if is_complete else self._outbox.directory
        if is_complete:
            self._outbox.remove()
        else:
            self._outbox.keep()
        if self._outbox.rows or not is_complete:
            self._warn_of_left("more waited than memory has room for" if self._outbox.is_full else limit.why)

    def _send_end(self, exit_code: int, timeout_s: float) -> bool:
        """Send the run's status. Returns False if the service may still take it."""
        try:
            self.end_run(exit_code, timeout_s)
        except RejectedError:
            self._gate.warn("keeps its status: the service has rejected the new one")
        except Exception as error:
            logger.debug("%s: run %s: its status is not sent: %s", self._title, self.id, error)
            return False
        return True

    def resume(self) -> None:
        self._open_outbox()  # what the last one has left is an earlier attempt's for it

    def mark_preempting(self, timeout_s: float) -> None:
        if self._sink is not None:
            self._outbox.wait(timeout_s)

    def unsent(self) -> Sequence[str]:
        return [self._left_in] if self._left_in is not None and os.path.isdir(self._left_in) else []

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory, self.sendable().config.options)

    def _open_outbox(self) -> None:
        request = self.sendable()
        header = {**_header(request, self._tracker, self.id), **self.header, "is_kept": self._sink is None}
        rank = request.info.rank if request.info else 0
        # Sorted by name, the journals are in the order of the attempts, each attempt's primary rank first.
        who = f"{0 if request.plan.primary else 1}-rank-{rank}-{secrets.token_hex(3)}"
        name = f"{header['attempt']:04}-{int(time.time() * 1000):x}-{who}"
        earlier = self._find_earlier()
        self._has_earlier |= bool(earlier)
        self._read(earlier)
        journal = Journal(Path(self.directory()), name, header)
        # `send` may be killed when it has removed them, and before the run has its end.
        if earlier and request.earlier:
            journal.add(encode({"exit_code": self.earlier_exit_code}))
        self._outbox = Outbox(self._title, self.id, journal, self._sink, earlier, self.before_removal)

    def directory(self) -> str:
        """Return where what is not sent is kept: one directory for all attempts and ranks of the run."""
        of_earlier = self.request.earlier
        of_run = os.path.abspath(os.path.join(FOLDER, f"{self._tracker.name}-{self.id}"))
        return str(of_earlier[0].path.parent) if of_earlier else of_run

    def _find_earlier(self) -> Sequence[StoredJournal]:
        """Return what earlier attempts have left here, for one rank of each node. Journals that are written are not."""
        if self.request.earlier or self._sink is None or self.request.plan.run_id is None:
            return self.request.earlier
        if not (self.request.plan.primary or self.request.leads_node):
            return ()
        return [left for left in stored(Path(self.directory())) if self._is_of_run(left) and not left.is_open()]

    def _read(self, earlier: Sequence[StoredJournal]) -> None:
        """Read what must be known of earlier attempts before their lines are sent."""
        if self.request.earlier:
            self.earlier_exit_code = self._exit_code_of(earlier)
            return
        for left in earlier:
            for line in left.lines():  # one at a time: there may be millions
                if isinstance(step := line.get("step"), int):  # the function's rows come behind it
                    self.steps.last = max(self.steps.last, step)

    def _exit_code_of(self, journals: Sequence[StoredJournal]) -> int:
        """Return the status that the first of these journals ends with, or that of a later attempt at the service."""
        exit_code, last_at = 1, 0.0
        for journal in journals:
            for line in journal.lines(also_sent=True):
                last_at = max(last_at, line.get("time", 0.0))
                if journal is journals[0]:
                    exit_code = line.get("exit_code", exit_code)
        later = self.exit_code_after(last_at)
        return exit_code if later is None else later

    def _is_of_run(self, left: StoredJournal) -> bool:
        """Whether a journal is of this run: another project may have a run with its id."""
        header, arguments = left.header, left.header.get("arguments")
        project = arguments.get("project") if isinstance(arguments, Mapping) else None
        of_run = (self._tracker.name, self.id, self.request.config.project)
        return (header.get("tracker"), header.get("id"), project) == of_run

    def _warn_of_left(self, why: str) -> None:
        rows, lost = self._outbox.rows, self._outbox.lost_rows
        what = f"{rows} rows" if rows else "its end"
        kept = "They are kept in files."
        if lost:
            kept = f"{rows - lost} of them are kept in files, and {lost} are lost: the files could not be written."
        text = "%s: run %s has ended, and %s has not taken %s: %s. %s Send the rest when it answers: %s"
        command = self.how_to_send(self._outbox.directory)
        logger.warning(text, self._title, self.id, self._title, what, why, kept, command)


class KeptRun(client.Run):
    """The object that `get_run` returns for a run that is only kept. Calls other than `calls` and `log` are lost."""

    _handle: KeptHandle

    def __init__(self, handle: KeptHandle, calls: Sequence[str]) -> None:
        super().__init__(handle)
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._keep(name, args, kwargs)

    def _keep(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if name not in self._calls:
            text = "run %s is logged to files: calls of %s() are lost. Kept are those of: %s"
            self._handle.warn_once(name, text, self.id, name, ", ".join(("log", *self._calls)))
            return
        self._handle.put({"call": name, **plain_config({"args": args, "kwargs": kwargs})})


class KeptHandle(OutboxHandle):
    """An open run that is only kept."""

    def __init__(self, request: RunRequest, tracker: Tracker) -> None:
        super().__init__(request, tracker, None)
        self.run = KeptRun(self, SENT_LATER.get(tracker.name, ()))

    @property
    def url(self) -> str | None:
        """A run in files has no page."""
        return None

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        plain = plain_config(row)
        for key, value in row.items():
            if isinstance(plain.get(key), str) and not isinstance(value, str):
                self._values.warn_once(key, "is kept as text: the run is logged to files, as JSON")
        self.put_row(plain, None if step is None else self.steps.take(step))

    def how_to_send(self, directory: str) -> str:
        is_known = self._tracker.name in SENT_LATER
        return super().how_to_send(directory) if is_known else f"as the documentation of {self._title} says"

    def how_to_view(self) -> str:
        return self.how_to_send(self._outbox.directory)

    @property
    def last_step(self) -> Any:
        """The step of the last row that was logged with one: only the service knows the others."""
        return self._last_step

    def _warn_of_left(self, why: str) -> None:  # noqa: ARG002
        if self._outbox.lost_rows:
            text = "%s: run %s: %d of %d rows and calls are lost: the files in %s could not be written"
            counts = self._outbox.lost_rows, self._outbox.rows
            logger.warning(text, self._title, self.id, *counts, self._outbox.directory)


def open_or_keep(
    request: RunRequest, tracker: Tracker, open_run: Callable[[], client.ClientHandle]
) -> client.ClientHandle:
    """Open the run by `open_run`. If the service is away, open a local run, unless `if_unavailable` is "raise".

    Raises:
        TrackerUnavailableError: The service is away and `if_unavailable` is "raise", or it refuses.
    """
    try:
        return open_run()
    except TrackerUnavailableError as error:
        unavailable = error
    except (AwayError, RejectedError) as error:
        text, is_outage = f"{tracker.title} cannot be used: {error}. {error.fix}", error.is_outage
        unavailable = TrackerUnavailableError(text, client.LOCAL_FILES if is_outage else "", is_outage=is_outage)
        unavailable.__cause__ = error
    if not client.degrades(request, unavailable):
        raise unavailable
    kept = KeptHandle(request, tracker)
    if request.plan.primary or (request.info is not None and request.info.local_rank == 0):
        logger.warning(
            "%s This run is logged to files in %s.%s %s when %s answers: %s",
            unavailable.reason,
            kept.directory(),
            client.LOST_WITH_POD if client.dies_with_pod(request) else "",
            "The next attempt that finds them sends them. Or send them" if tracker.name in SENT_LATER else "Send them",
            tracker.title,
            kept.how_to_send(kept.directory()),
        )
    return kept


def _header(request: RunRequest, tracker: Tracker, run_id: str) -> dict[str, Any]:
    arguments = {name: value for name, value in request.config.arguments.items() if name not in _OF_THIS_JOB}
    return {
        "tracker": tracker.name,
        "id": run_id,
        "group": request.plan.group,
        "primary": request.plan.primary,
        "attempt": request.restart_count,
        "host": socket.gethostname(),
        "arguments": {**arguments, "run_mode": "auto", "if_unavailable": "raise", "rank_prefix": False},
        "run_metadata": dict(request.run_metadata),
        "servers": servers_of(tracker.name),
    }
