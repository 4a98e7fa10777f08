"""A run that is logged offline, sent while it is logged: it is open at W&B, and gets what its file gets.

How far that is, W&B and its own files tell. In a run with one writer, rows have steps: W&B has those up to its last
one. `run-ID.wandb.syncstate`, which `wandb sync` has too, is the step at which it has the file's step 0. In a run with
several writers, rows have numbers: see `roles`. So whoever sends next, or opens the run, continues where this ended.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flyteplugins_tracking._job.failure import FAILURE_KEYS
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.wandb import datastore, outbox, roles, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Row
from flyteplugins_tracking.trackers.wandb.outbox import Left, attempt_at
from flyteplugins_tracking.trackers.wandb.send import Files, LaterEnd, label_in, place_of, require_unwritten

# The records beside rows that are sent as they are. Of the first ones W&B keeps the last, of the second ones all. In a
# shared run, those of the third kind are the primary's. Saved files and artifacts are sent at the end.
_REPLACING, _ADDING = ("config", "metric", "environment"), ("stats", "output", "output_raw")
_OF_PRIMARY = ("environment", *_ADDING)
# W&B's own 15 s between requests would come on top of the time between two looks. The rows are in a file already.
_SETTINGS = {
    **{"x_file_stream_transmit_interval": 2.0, "x_skip_transaction_log": True},
    **{f"x_{what}_retry_wait_max_seconds": 8 for what in ("file_stream", "graphql", "file_transfer")},
    **{f"x_{what}_retry_max": 10_000 for what in ("graphql", "file_transfer")},
}
# How many rows are sent at once: wandb-core has them in memory.
_MOST = 20_000
# How long W&B may take to count the rows of an earlier sender, in seconds.
_COUNTED_S = 15.0
# How long W&B may take to say that it has the last row, and how often it is asked, in seconds.
_CONFIRMED_S, _POLL_S = 30.0, 0.5
# How long wandb-core may take to close a run that it does not end, in seconds.
_LET_GO_S = 5.0
# How often W&B is asked which rows it has. If none of those that it lacks arrives meanwhile, the run is opened again:
# the first time after the second time here. Then each time after twice as long, up to the third one.
_ASKED_S, _STALLED_S, _LONGEST_STALLED_S = 15.0, 30.0, 600.0
# What wandb-core says of a run whose id it has open: it opens each once, so one writer of a run is live at a time.
_IN_USE = "is in use"
# The directory of W&B's client that sends, in the run's directory: see `outbox.SENDERS_LOG`.
_FOLDER = "sender-"


class _File:
    """The file of one attempt, which is read as it is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first_at = outbox.starting_step(directory)  # the step that its step 0 gets; None before its first row
        self._attempt, self._position = attempt_at(directory), 0
        first = next(iter(self._attempt.rows()), None)
        self._is_placed = first is not None and first.is_placed
        self.known: set[float] = set()  # the rows that W&B had before: their numbers, or else their times
        self.described: dict[str, Any] | None = None  # with which arguments, as its last record says
        self.is_done = False  # whether its process has ended, and all was read: it may be long

    @property
    def step_metric(self) -> str | None:
        """The column for the steps of rows that get others."""
        return self._attempt.step_metric

    def records(self, *, is_written: bool) -> Iterator[tuple[str, Any, bytes]]:
        """Yield the kind, the content and the bytes of each new record."""
        path = datastore.file_in(self.directory)
        new = datastore.records_from(path, self._position, is_written=is_written) if path is not None else ()
        for self._position, data in new:
            yield *vendor.parse_record(data), data

    def moved(self, row: Row) -> Row:
        """Return a row at the step that it gets."""
        values = self._attempt.with_columns(row._replace(is_placed=self._is_placed)) if self.first_at else row.values
        return Row(row.step + (self.first_at or 0), values)


class Taken:
    """Whether W&B takes what it is handed: one refusal ends wandb-core's sending for good, and it does not tell.

    Attributes:
        is_stalled: Whether it does not, since the last time that it did.
    """

    is_stalled = False
    _rows: int | None = None
    _ask_at = _since = 0.0
    _limit_s = _STALLED_S

    def look(self, run: LiveRun) -> bool:
        """Ask W&B, now and then. Returns whether the run is to be opened again.

        Raises:
            TrackerUnavailableError: W&B does not say.
        """
        now = time.monotonic()
        if not self.is_stalled and now < self._ask_at:
            return False
        before, self._rows = self._rows, None  # an outage is no refusal
        self._rows, lacks = run.count()
        self._ask_at = now + _ASKED_S
        if not lacks or self._rows != before:
            if not lacks or (before is not None and self._rows > before):
                self.is_stalled, self._limit_s = False, _STALLED_S
            self._since = now
        if now < self._since + self._limit_s:
            return False
        self.is_stalled, self._since, self._limit_s = True, now, min(2 * self._limit_s, _LONGEST_STALLED_S)
        return True


class LiveRun:
    """A run that is open at W&B, and gets the rows of attempts that log offline.

    Attributes:
        place: The run.
        rows: How many rows were sent.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """Open it.

        Args:
            directories: Those of the attempts in their order, and of the ranks that share the run.

        Raises:
            TrackerUnavailableError: W&B cannot be used, or the run is not there yet that another writer makes.
        """
        primary = [path for path in directories if not label_in(path)] or directories
        first = next((path for path in primary if datastore.description(path) is not None), primary[0])
        described, attempt, self.rows = datastore.description(first), attempt_at(first), 0
        # The journals have the server that was set up where they were written.
        self.place, self._kept = (place_of(attempt, described, is_set_up_here=is_here) for is_here in (True, False))
        self._column, self._label = roles.column_in(attempt), label_in(first)
        self._files: dict[Path, _File] = {}
        self._columns: set[str] = set()  # those of rows
        self._summary: dict[tuple[str, ...], Any] = {}  # of these columns, as the files have it
        vendor.drop_unusable_service()
        self._reader, self._later = vendor.Reader(self.place), None
        settings, found = {**_SETTINGS, "console": vendor.leave_console_alone()}, self._reader.stored()
        if self._column is None:
            outbox.await_count(first.parent, self.place.run_id, time.monotonic() + _COUNTED_S)
            found = self._reader.stored()
            require_unwritten(found, first.parent, self.place.run_id)
            self._later = LaterEnd.of([attempt_at(path) for path in directories], found)
        elif found is None and self._label:
            raise TrackerUnavailableError(f"W&B has no run {self.place.run_id} yet, which {self._label} has joined")
        else:
            # One client for all ranks: wandb-core opens a run once. Their rows' numbers tell them apart.
            settings |= roles.shared_settings(self._label or roles.role_of(self._column), ends_run=not self._label)
        # W&B shows a run as running again that a client opens which says on which host it is.
        if described is not None and self._later is None:
            settings |= {"host": described.host, "x_disable_machine_info": False}
        is_described = described is not None and (found is None or self._column is None) and self._later is None
        folder = tempfile.mkdtemp(prefix=_FOLDER, dir=first)
        arguments = datastore.arguments_of(described) if is_described else {}
        try:
            self._run = vendor.open_to_send(self.place, arguments, folder, settings)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if _IN_USE not in str(error):
                raise
            text = (
                f"{self.place.run_id} is open here for another role, node or project: this one is sent when that ends"
            )
            raise TrackerUnavailableError(text) from error
        self._rows_before = 0 if found is None else found.rows
        self._next_step = int(self._run.starting_step)

    def send(self, directories: Sequence[Path], *, is_written: bool = True) -> int:
        """Send what is new, or a part of it. Returns how many rows it was.

        Args:
            directories: Those of the attempts, in their order.
            is_written: Whether a process may still write the last one.
        """
        count = 0
        for directory in directories:
            if directory not in self._files:
                self._files[directory] = _File(directory)
                if self._column is not None:
                    self._files[directory].known |= self._arrived(directory)
                else:
                    self._look(self._files[directory])
            file, is_last = self._files[directory], directory == directories[-1] or self._column is not None
            if file.is_done:
                continue
            is_ended = not is_written or not (is_last or attempt_at(directory).is_open())
            rows = self._rows_of(file, is_written=not is_ended)
            count += self._log(file, islice(rows, _MOST))
            if count >= _MOST or not (is_ended or is_last):  # a later attempt's rows come behind all of an earlier one
                break
            if is_ended and self._column is None:
                count += self._log(file, self._new(file, attempt_at(directory).missing()))
            file.is_done = is_ended
            file.known.clear()  # what is new from here on, W&B lacks
        self.rows += count
        return count

    def is_lost(self, error: Exception) -> bool:
        """Whether an error says that wandb-core has died: then the run is opened again, and goes on."""
        return isinstance(error, vendor.service_gone(self._run, error))

    def count(self) -> tuple[int, bool]:
        """Return how far W&B is with the run, and whether it lacks rows that it was handed.

        Raises:
            TrackerUnavailableError: It does not say.
        """
        found = self._reader.stored()
        if self._column is None:
            count, wanted = (0 if found is None else found.last_step + 1), self._next_step
        else:
            count, wanted = (0 if found is None else found.rows), self._rows_before + self.rows
        return count, count < wanted

    def let_go(self) -> None:
        """Leave the run as it is: another process writes it, or its files are not here any more."""
        vendor.let_go(self._run, _LET_GO_S)

    def finish(self, directories: Sequence[Path]) -> int:
        """Send the rest, and end the run, as a failure if its process was killed before it could tell its exit code.

        Returns:
            The run's exit code.

        Raises:
            TrackerUnavailableError: W&B lacks a file or an artifact.
        """
        sizes = dict(zip(directories, map(outbox.file_size, directories), strict=True))
        while self.send(directories, is_written=False):
            pass
        left, run, later = self._left(directories), self._run, self._later
        exit_code = attempt_at(directories[-1]).exit_code if later is None else later.exit_code
        exit_code = 1 if exit_code is None else exit_code
        files = Files(self.place, left)
        vendor.forward_summary(run, self._summary.values())
        if self._column is None:
            files.ask(vendor.stored_run(self.place))
            files.send(run)
            if later is not None:
                later.restore(run)
            if exit_code == 0:
                vendor.forget(run, FAILURE_KEYS)
        if exit_code == TERMINATED:
            run.mark_preempting()
        run.finish(exit_code=exit_code)
        if self._column is None:  # or else `send` looks which rows W&B has
            self._require_last_row()
            left.clear()
            outbox.mark_all_synced(sizes)
            if later is not None:
                later.path.unlink(missing_ok=True)
            files.require_sent(directories[-1])
        of_id = outbox.directories_of(directories[0].parent, self.place.run_id)
        of_run = (path for path in of_id if outbox.project_of(path) == outbox.project_of(directories[0]))
        for folder in chain.from_iterable(path.glob(f"{_FOLDER}*") for path in of_run):
            shutil.rmtree(folder, ignore_errors=True)
        return exit_code

    def _look(self, file: _File) -> None:
        """Look whether another attempt has logged since a file was begun, or written: then W&B's steps do not tell."""
        found, begun = self._reader.stored(), file.first_at
        rows = chain(datastore.rows(file.directory), attempt_at(file.directory).missing())
        times = [row.time for row in rows if begun is None or row.step + begun < self._next_step]
        last_at = None if found is None else found.last_at
        if found is None or last_at is None or not times:
            return
        if last_at >= times[0] if begun is None else last_at != times[-1]:
            file.known, file.first_at = found.times(begun or 0), None

    def _require_last_row(self) -> None:
        """Wait until W&B has the last row. Its client may have given up in an outage.

        Raises:
            TrackerUnavailableError: W&B does not have it.
        """
        until = time.monotonic() + _CONFIRMED_S
        while (found := self._reader.stored()) is None or found.last_step < self._next_step - 1:
            if time.monotonic() > until:
                raise TrackerUnavailableError(f"W&B has not confirmed the last rows of run {self.place.run_id}")
            time.sleep(_POLL_S)

    def _arrived(self, directory: Path) -> set[int]:
        """Return the numbers of the rows of a directory that W&B has."""
        rows = roles.NumberedRows(self._left([directory]), str(self._column))
        if self._reader.stored() is not None:
            time.sleep(rows.late_s())
            rows.look(roles.numbers_at(self.place, str(self._column), rows.since))
        return rows.known

    def _left(self, directories: Sequence[Path]) -> Left:
        return Left(self._kept, directories[0].parent, lambda other: other.directory in directories)

    def _log(self, file: _File, rows: Iterable[Row]) -> int:
        media = [file.directory / "files"]
        return len(outbox.log_again(self._run, type(self._run), rows, file.step_metric, media))

    def _rows_of(self, file: _File, *, is_written: bool) -> Iterator[Row]:
        """Yield the new rows of a file. What else it has is sent on the way."""
        run, left_out = self._run, _OF_PRIMARY if label_in(file.directory) else ()
        passed: list[bytes] = []  # an earlier sender has sent it, if a row behind it has arrived
        for kind, record, data in file.records(is_written=is_written):
            if kind == "history":
                logged = datastore.row_of(record)
                self._columns.update(logged.values)
                for row in self._new(file, [logged]):
                    self._forward(passed)
                    yield row
                passed.clear()
            elif kind == "run" and self._column is None:
                self._describe(file, datastore.arguments_of(record))
            elif kind == "preempting":
                run.mark_preempting()
            elif kind == "summary":
                self._summarize(record)
            elif kind in _REPLACING and kind not in left_out:
                vendor.forward(run, data)
            elif kind in _ADDING and kind not in left_out:
                passed.append(data)
        self._forward(passed)

    def _describe(self, file: _File, described: dict[str, Any]) -> None:
        """Send the config, and what the process has changed. What it began with an earlier sender has sent.

        A user may have changed that at W&B since.
        """
        self._run.config.update(described["config"], allow_val_change=True)
        before, file.described = file.described, described
        for name in ("name", "notes", "tags"):
            is_new = file.first_at is None if before is None else described[name] != before[name]
            if is_new and described[name] is not None:
                setattr(self._run, name, described[name])

    def _summarize(self, record: Any) -> None:
        """Send the summary that the function has set. That of columns, such as a minimum, wandb-core makes of the rows.

        If it was given one, it would make none. So what the files have of columns is sent at the end.
        """
        new = []
        for item in record.update:
            path = tuple(item.nested_key) or (item.key,)
            if path[0] in self._columns:
                self._summary[path] = item
            elif not path[0].startswith("_"):
                new.append(item)
        vendor.forward_summary(self._run, new, record.remove)

    def _forward(self, records: list[bytes]) -> None:
        for record in records:
            vendor.forward(self._run, record)
        records.clear()

    def _new(self, file: _File, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows that W&B lacks, as they are logged."""
        for row in rows:
            if self._column is not None:
                number = row.values.get(self._column)
                if isinstance(number, (int, float)) and int(number) not in file.known:
                    yield row._replace(step=-1)
                continue
            if row.time in file.known:
                continue
            if file.first_at is None:
                file.first_at = max(0, self._next_step - row.step)
                outbox.keep_starting_step(file.directory, file.first_at)
            if row.step + file.first_at >= self._next_step:
                self._next_step = row.step + file.first_at + 1
                yield file.moved(row)
