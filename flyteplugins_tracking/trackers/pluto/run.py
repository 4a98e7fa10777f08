"""One rank's Pluto run while it is open, and its end within the deadline."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import Status, join_calls, left_of_opening, prefix_of, status_of
from flyteplugins_tracking.trackers.idle import IDLE, IdleRun, is_idle, undo_later
from flyteplugins_tracking.trackers.journal import StoredJournal
from flyteplugins_tracking.trackers.kept import OutboxHandle
from flyteplugins_tracking.trackers.outbox import AwayError
from flyteplugins_tracking.trackers.pluto import vendor
from flyteplugins_tracking.trackers.pluto.open import remove_directory
from flyteplugins_tracking.trackers.pluto.sink import REQUEST_S, PlutoSink, Service
from flyteplugins_tracking.trackers.pluto.vendor import Queue
from flyteplugins_tracking.trackers.rows import MetricSanitizer, Steps

logger = logging.getLogger(__name__)

# The service's names of a run's ends.
_ENDS: Mapping[Status, str] = {"finished": "COMPLETED", "failed": "FAILED", "killed": "TERMINATED"}
# Larger integers are not JSON numbers to the service. It skips longer strings.
_LARGEST_INT, _LONGEST_STRING = 2**63, 200
# The arguments of `pluto.init` that a script's own opening of its run has.
_OPENING = {"project": "project", "name": "name", "dir": "dir", "settings": "settings", "run_id": "id"}
# The longest time for the end of the client's threads, in seconds: they may wait for the service.
_CLOSE_S = 3.0


class PlutoHandle(OutboxHandle):
    """An open run of this process."""

    def __init__(self, request: RunRequest, tracker: Tracker, op: Any, queue: Queue) -> None:
        self._queue, self._op = queue, op
        self.header = {"files": queue.directory}  # who has sent the rows removes them
        values = PlutoSanitizer(tracker.title, prefix_of(request))
        steps = _steps(request, values)
        self._rows = PlutoSink(op, str(request.plan.run_id), steps, values.accepted)
        super().__init__(request, tracker, self._rows, values, steps)
        self.run = op
        self._take_over()

    @property
    def url(self) -> str | None:
        """The run's page."""
        address: str | None = self.run.settings.url_view
        return address

    def write(self, row: Mapping[str, Any], step: Any, timestamp: float | None = None, **_: Any) -> None:
        at = self.steps.take(step)
        plain = {key: value for key, value in row.items() if isinstance(value, (int, float, str))}
        if plain:
            self.put_row(plain, at, timestamp)
        if len(plain) < len(row):  # the client makes files of media
            type(self.run).log(self.run, {key: row[key] for key in row.keys() - plain.keys()}, step=at)

    def end(self, exit_code: int) -> None:
        limit = self.end_limit()
        limit.asks = self._rows.answers
        # First, since the client then hands over the console's last lines.
        run_with_timeout(min(_CLOSE_S, self.request.config.finish_timeout_s / 2), type(self.run).close, self.run)
        self.close_outbox(exit_code, limit)
        if self._left_in is None:
            self._remove_files(self._queue.directory)

    def before_removal(self, journal: StoredJournal) -> None:
        self._remove_files(str(journal.header.get("files")))

    def _remove_files(self, directory: str) -> None:
        """Remove the directory of a client, unless it may have files that could not be sent."""
        if vendor.is_clients_directory(directory, self.id) and not self._rows.has_files:
            remove_directory(directory)

    def end_run(self, exit_code: int, timeout_s: float) -> None:
        if self.ends_run and not self._rows.is_off:
            self._rows.post_end(_ENDS[status_of(exit_code)], timeout_s)

    def resume(self) -> None:
        super().resume()  # the client stays closed: only media need it
        self._queue.connect(self._outbox.put)

    def _take_over(self) -> None:
        """Have calls on the client's run object come here if they would end the run or write to it."""
        import pluto

        self.run.log = self._log
        self.run.finish, self.run.close = self._finish, _do_nothing
        join_clients_calls()
        _open.handles.append(self)
        self.undo.callback(lambda: _open.handles.remove(self))
        pluto.log = self.run.log
        self._queue.connect(self._outbox.put)

    def stored_step(self) -> int:
        """Ask for the last step of a run that exists: rows with its steps would replace its rows in charts."""
        if self._rows.is_off or (self.request.plan.ends_run and not self._op.resumed):
            return -1
        try:
            until = min(time.monotonic() + REQUEST_S / 2, self.request.deadline)
            return int(Service(self._op.settings, until).post("/step", "").json()["step"])
        except Exception as error:
            if self.request.earlier:  # nobody waits for it
                raise AwayError(f"the service does not say the run's last step ({type(error).__name__})") from error
            logger.warning(
                "Pluto: the service does not say the last step of run %s (%s): rows that are logged without step= may "
                "replace an earlier attempt's rows in charts",
                self.id,
                type(error).__name__,
            )
            return -1

    def _log(self, data: Any, step: Any = None, commit: Any = None, timestamp: Any = None) -> None:  # noqa: ARG002
        """Log a row: the `log` of the run object. The client itself does nothing with `commit`."""
        self.log(data, step, timestamp=timestamp)

    def _finish(self, code: Any = None) -> None:
        """End nothing: the `finish` of the run object."""
        self.tell_end(vendor.status_of_end(code))

    def join(self, given: Mapping[str, Any]) -> Any:
        """Add the config and the tags of a `pluto.init` of the function, and return the run."""
        run, name = self.run, self.request.config.name or self.id
        new = self.describe("pluto.init", given, {"project": run.settings.project, "name": name, "run_id": self.id})
        if new:
            run.update_config(new)
        if given.get("tags") and self.request.plan.primary:
            run.add_tags(given["tags"])
        return run


class _Open(PerProcess):
    """The runs that are open in this process, the latest one last."""

    def __init__(self) -> None:
        self.handles: list[PlutoHandle] = []


_open = register(_Open())


def join_clients_calls(_: object = None) -> None:
    """Have `pluto.init` join the open run from now on."""
    import pluto

    join_calls(pluto.init, _join)


def _join(given: Mapping[str, Any]) -> Any:
    """Return the run of the decorated function for a `pluto.init`; None if this process has none."""
    given = left_of_opening("pluto", given, _OPENING)
    if _open.handles or not is_idle("pluto"):
        return _open.handles[-1].join(given) if _open.handles else None
    import pluto

    values = {"id": None, "run_id": IDLE, "resumed": False, "fork_run_id": None, "fork_step": None}
    config = dict(given.get("config") or {})
    run = IdleRun("pluto", "Pluto", **values, settings=pluto.Settings(), config=config)
    undo_later("pluto", functools.partial(vars(pluto).update, log=pluto.log, alert=pluto.alert, watch=pluto.watch))
    pluto.log, pluto.alert, pluto.watch = run.log, run.alert, run.watch
    return run


def _do_nothing(*_: Any, **__: Any) -> None:
    """The run ends when the decorated function does."""


def _steps(request: RunRequest, values: MetricSanitizer) -> Steps:
    """Return the steps, from 1 on. Where ranks share a run without a prefix, each takes steps that no other rank takes.

    Pluto's charts have one value for a key and a step, the latest.
    """
    info, config = request.info, request.config
    if info is None or config.run_mode != "shared" or config.rank_prefix:
        return Steps(values, last=0, smallest=0)
    stride = request.plan.writers or 1
    position = info.local_rank if config.rank_scope == "worker" else info.rank
    return Steps(values, last=0, smallest=0, stride=stride, offset=(position or 0) % stride)


class PlutoSanitizer(MetricSanitizer):
    """Makes rows of what a rank logs, and warns about values that Pluto's client drops silently."""

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return self.accepted(super().clean(data))

    def accepted(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the service takes of a row, which another process may have kept."""
        return {key: plain for key, value in row.items() if (plain := self._accepted(key, value)) is not None}

    def _accepted(self, key: str, value: Any) -> Any:
        if not (key.isascii() and key.isprintable()):
            self.warn_once(key, "Pluto replaces each character of a key that is not printable ASCII by '-'")
        if isinstance(value, int) and abs(value) >= _LARGEST_INT:
            return float(value) if value.bit_length() < sys.float_info.max_exp else None
        if isinstance(value, str) and len(value) > _LONGEST_STRING:
            self.warn_once(key, f"a string of more than {_LONGEST_STRING} characters is left out: Pluto takes labels")
            return None
        return value if isinstance(value, (int, float, str)) else self._media(key, value)

    def _media(self, key: str, value: Any) -> Any:
        from pluto import Data, File

        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, (int, float)) for item in items):
            self.warn_once(key, "Pluto keeps only the last number of a list")
            return items[-1] + 0  # a bool is 1 or 0
        if items and all(isinstance(item, (int, float, str, File, Data)) for item in items):
            return value
        kind = type(value).__name__
        self.warn_once(key, f"the value is left out: Pluto takes numbers, strings and its media classes, not {kind}")
        return None
