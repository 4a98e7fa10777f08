"""The sender of W&B's rows: it gives an open run what attempts have left on this disk, and W&B lacks.

Four call it: the next attempt, before the function's first row; the close of a run whose wandb-core has died, or whose
function logs on after its end; `send`; and `send --watch`, which keeps the run open.

What W&B has, one of two ways tells. If one process writes a run, W&B has the steps below its next one. If several do,
rows have numbers (see `roles`), and since the rows of one process arrive in their order, the last number that W&B has
tells that it has all before. If others have taken steps meanwhile, as an attempt on another disk, the times of W&B's
rows tell which are there: the others come behind, with their own steps in a column.
"""

from __future__ import annotations

import glob
import json
import logging
import secrets
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._job.failure import FAILURE_KEYS
from flyteplugins_tracking._util.files import own_file_in, own_text, replace_whole
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import first_line, listed, without_credentials
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT
from flyteplugins_tracking.trackers.config import OWNER
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.journal import Journal, encode, require_all_sent
from flyteplugins_tracking.trackers.outbox import how_to_send, require_server
from flyteplugins_tracking.trackers.wandb import attempts, datastore, outbox, roles, vendor
from flyteplugins_tracking.trackers.wandb.attempts import REPLACING, Attempt, Place, Reading, label_in
from flyteplugins_tracking.trackers.wandb.datastore import Row
from flyteplugins_tracking.trackers.wandb.ending import Upload
from flyteplugins_tracking.trackers.wandb.names import forced_run_id

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)

# Beside `REPLACING`, the records that are sent as they are: W&B keeps all. In a shared run, those of the second
# kind are the primary's. Saved files and artifacts are sent at the end.
_ADDING = ("stats", "output", "output_raw", "alert")
_OF_PRIMARY = ("run", "environment", "preempting", *_ADDING[:-1])
# W&B's own 15 s between requests would come on top of the time between two looks. The rows are on this disk already.
_SETTINGS = {**vendor.PATIENT, "x_file_stream_transmit_interval": 2.0, "x_skip_transaction_log": True}
# How many rows are sent at once: wandb-core has them in memory.
_MOST = 100_000
# After how many rows one is waited for.
_WAITING = 100
# How long W&B may take to count the rows of an earlier sender, in seconds.
_COUNTED_S = 15.0
# How long W&B may take to say that it has everything, and how often it is asked, in seconds. It counts 2 to 4 s late.
_CONFIRMED_S, _POLL_S = 30.0, 0.5
# How long wandb-core may take to close a run that it does not end, to end one whose sending has failed, and to read
# what earlier attempts have left, in seconds.
_LET_GO_S, _CUT_S, _READ_S = 5.0, 1.0, 60.0
# How often wandb-core may die before what it was sending is given up.
_DEATHS = 2
# After how long it is said that an end takes long, in seconds.
_LONG_S = 30.0
# What wandb-core says of a run whose id it has open: it opens each once, so one writer of a run is live at a time.
_IN_USE = "is in use"
# The exit codes of a run's states.
STATES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1, "preempted": TERMINATED}
# The errors of a wandb-core that dies while it starts.
_OF_SERVICE = "wandb.sdk.lib.service"
# The runs that this process could not open: wandb-core has their ids open since. And why W&B refuses some for good,
# such as one that was deleted: to ask again would stop the other runs of this wandb-core each time.
_unopened: set[Place] = set()
_refused: dict[Place, str] = {}
# The file of a `LaterEnd`, and its most bytes.
_LATER, _LONGEST_LATER = "flyteplugins-tracking-later.json", 1 << 24


class _Read(Reading):
    """How far an attempt is read and sent.

    Attributes:
        base: The run's step of its step 0; None before its first row is sent.
        known: How many rows W&B has with a number or a time, if steps do not tell: see `_key`.
        described: With which arguments the run was opened, as the last record says.
        is_last: Whether there is no later attempt.
        keys: What tells its rows, unless it is the last one: a later attempt may have logged them again.
        is_done: Whether its process has ended, and all was read.
        is_defined: Whether the run has the axes that its process has defined.
    """

    described: dict[str, Any] | None = None
    is_last = is_done = is_defined = False

    def __init__(self, attempt: Attempt, since: int, base: int | None, known: Counter[float], is_whole: bool) -> None:
        super().__init__(attempt, since, is_whole=is_whole)
        self.base, self.known, self.keys = base, known, list[float]()


class Sender:
    """Gives an open run what attempts lack at W&B. It does not know whose run that is.

    Attributes:
        place: The run.
        rows: How many rows were sent.
        files: The names of the files and artifacts that were sent.
    """

    files: Sequence[str] = ()

    def __init__(
        self,
        run: Any,
        place: Place,
        found: vendor.Stored | None,
        later: LaterEnd | None = None,
        *,
        is_shared: bool = False,
        is_whole: bool = False,
    ) -> None:
        """Begin.

        Args:
            run: The open run; None to count the rows that it lacks, and send none.
            place: Where it is.
            found: What W&B had of it before it was opened; None for nothing.
            later: How a later attempt has left it.
            is_shared: Whether it is open in W&B's shared mode.
            is_whole: Whether all is sent that W&B's files have, such as the config, and not the rows alone.
        """
        self.place, self.rows = place, 0
        self._run, self._found, self._is_whole = run, found or vendor.Stored(), is_whole
        self._next = self._found.last_step + 1 if run is None else int(run.starting_step)
        self._is_shared, self._has_step_metric = is_shared, False
        self._later, self._reads = later, dict[Path, _Read]()
        self._sent: set[float] = set()  # the keys of rows that a later attempt may have logged again
        self._columns: set[str] = set()  # those of rows
        self._summary: dict[tuple[str, ...], Any] = {}  # what the files have of the summary, and is not sent yet
        self._removed: list[Any] = []  # what was removed from it

    @classmethod
    def open(cls, directories: Sequence[Path], close: Upload | None = None) -> Sender:
        """Open the run to send what attempts have left.

        Args:
            directories: Those of the attempts in their order, and of the ranks that share the run.
            close: The upload at the close of a run that this process has logged; None for another run.

        Raises:
            TrackerUnavailableError: W&B cannot be used, or the run is not there yet that another writer makes.
        """
        primary = [path for path in directories if not label_in(path)] or directories
        first = next((path for path in primary if datastore.description(path) is not None), primary[0])
        left = [Attempt.at(path) for path in directories]
        described, attempt, label = datastore.description(first), left[directories.index(first)], label_in(first)
        place, column, later = close.place if close else place_of(attempt, described), attempt.column, None
        of_id = attempts.directories_of(first.parent, place.run_id)
        vendor.drop_unusable_service()
        attempts.await_count(of_id, time.monotonic() + _COUNTED_S if close is None else close.limit.until)
        found = vendor.Reader(place).stored()
        if close is None:
            if found is None and label and attempts.is_rank(first):  # the primary's later one would be an earlier end
                text = f"{first} was not sent: W&B has no run {place.run_id}, which this rank has joined. "
                text += "Send the directory of the job's primary rank first"
                raise TrackerUnavailableError(text, is_outage=False)
            others = (Attempt.at(path) for path in of_id if path not in directories)
            require_unwritten(None if column else found, [*left, *others])
            later = LaterEnd.of(left, found, column) if not label else None
        # Another writer ends the run, or a later attempt has: nobody would end it again.
        settings = _settings(None if label or later is not None else described, close)
        if column is not None:
            # One client for all ranks: wandb-core opens a run once. Their rows' numbers tell them apart.
            ends_run = roles.role_of(column) == OWNER and not label
            settings |= roles.shared_settings(label or roles.role_of(column), ends_run=ends_run)
        is_new = found is None or (attempt.is_offline and later is None)
        arguments = datastore.arguments_of(described) if described is not None and is_new and close is None else {}
        run = _open(place, arguments, first, settings)
        if close is not None:
            close.run = run
        return cls(run, place, found, later, is_shared=column is not None, is_whole=close is None)

    def send(self, directories: Sequence[Path], *, is_written: bool = False) -> int:
        """Send what is new, or a part of it. Returns how many rows it was.

        Args:
            directories: Those of the attempts, in their order.
            is_written: Whether a process may still write the last one.
        """
        count = 0
        for directory in directories:
            read = self._reads.get(directory) or self._begin(directory)
            if read.is_done:
                continue
            read.is_last = directory == directories[-1]
            is_live, is_ended = read.is_last or read.attempt.column is not None, not is_written
            if is_written and not is_live:
                read.attempt = Attempt.at(directory)  # with what its process has kept at last
                is_ended = not read.attempt.is_open()
            rows = self._lacking(read, is_written=not is_ended)
            count += self._log(read, islice(rows, _MOST), is_ended=is_ended)
            if count >= _MOST or not (is_ended or is_live):  # a later attempt's rows come behind all of an earlier one
                break
            read.is_done = is_ended
            self._sent.update(read.keys)
            if is_written:
                read.known.clear()  # what is new from here on, W&B lacks
        self.rows += count
        return count

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that it has read, in their order."""
        return [read.attempt for read in self._reads.values()]

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error says that wandb-core has died: then the run is opened again, and goes on."""
        return isinstance(error, vendor.service_gone(self._run, error))

    @property
    def refusal(self) -> str:
        """Why W&B takes no rows any more: one refusal ends wandb-core's sending for good. Empty if it takes them."""
        return vendor.refusal_of_rows(outbox.run_directory(self._run))

    def let_go(self) -> None:
        """Leave the run as it is: another process writes it, its files are not here any more, or it cannot be sent."""
        if not vendor.is_finished(self._run):
            vendor.let_go(self._run, _LET_GO_S)

    def finish(self, directories: Sequence[Path], close: Upload | None = None, *, has_files: bool = True) -> int | None:
        """Send the rest, and end the run, as a failure if its process was killed before it could tell its exit code.

        Args:
            directories: Those of the attempts, in their order.
            close: The upload at the close of a run that this process has logged; None for another run.
            has_files: Whether files and artifacts are sent too. Those that are not count as lacking.

        Returns:
            The run's exit code; None if another writer ends it.

        Raises:
            TrackerUnavailableError: W&B lacks something.
        """
        sizes = [attempts.file_size(path) for path in directories]
        try:
            reads = [self._reads.get(path) or self._begin(path) for path in directories]
            for read in reads:
                read.attempt = Attempt.at(read.attempt.directory)  # with what its process has kept at last
            while self.send(directories):
                pass
            left = [read.attempt for read in reads]
            files = Files(self.place, left)
            exit_code = self._end(reads, files, close, has_files=has_files)
            self.files = files.names
        except BaseException:
            self.let_go()
            raise
        for attempt, size in zip(left, sizes, strict=True):
            attempt.mark_sent(size)
            for folder in attempt.directory.glob(attempts.SENDERS):
                shutil.rmtree(folder, ignore_errors=True)
        if self._later is not None:
            self._later.path.unlink(missing_ok=True)
        if (role := roles.role_of(left[-1].column)) != OWNER:
            roles.end_again(self.place, role)
        tell_of_tensorboard(self.place.run_id, left)
        files.require_sent(waits=close is None)
        return exit_code

    def _end(self, reads: Sequence[_Read], files: Files, close: Upload | None, *, has_files: bool) -> int | None:
        run, left = self._run, [read.attempt for read in reads]
        vendor.forward_summary(run, self._summary.values())
        files.ask(vendor.stored_run(self.place), has_later=self._later is not None)
        files.send(run if has_files else None)
        exit_code = self._exit_code(left)
        for read in reads:
            self._repeat(read, *attempts.SETTING, "alert")
        if self._later is not None:
            self._later.restore(run)
        elif exit_code == 0 and not self._is_shared:
            vendor.forget(run, FAILURE_KEYS)
        if close is None:
            _of_run(left[-1], self.place)  # an attempt may have begun meanwhile
        if exit_code == TERMINATED and not all(label_in(one.directory) for one in left):  # a rank ends nothing
            run.mark_preempting()
        began = time.monotonic()
        code = exit_code or 0
        vendor.finish_while(lambda: self._waits(began), run, code, lambda: run.finish(exit_code=code))
        if self.refusal:
            raise TrackerUnavailableError(f"W&B lacks rows of run {self.place.run_id}: {self.refusal}")
        self._require_arrived(left)
        return exit_code

    def _waits(self, began: float) -> bool:
        """Say once that W&B takes long. It is waited for: the close of a run stops it in time, or a user."""
        if time.monotonic() > began + _LONG_S:
            text = "W&B: run %s: not everything is sent after %.0f s. This goes on, and may be stopped and repeated"
            _warn_once(self.place.run_id, text, self.place.run_id, _LONG_S)
        return True

    # Which rows W&B lacks

    def _begin(self, directory: Path) -> _Read:
        """Look which rows of an attempt W&B has."""
        attempt, found, known = Attempt.at(directory), self._found, Counter[float]()
        base, since = attempt.base, 0
        opened = None if base is None else datastore.description(directory)
        if attempt.column is not None:
            known = self._arrived(attempt, found)
        elif (first := attempt.first) and self._others_have_taken(attempt, base, first, found):
            known, base = Counter(found.times(0 if base is None else first.step + base)), None
        elif base is not None:
            since = self._next - base
        read = self._reads[directory] = _Read(attempt, since, base, known, self._is_whole)
        read.described = opened and datastore.arguments_of(opened)
        return read

    def _others_have_taken(self, attempt: Attempt, base: int | None, first: Row, found: vendor.Stored) -> bool:
        """Whether another attempt has logged since this one was begun, or sent: then W&B's steps do not tell."""
        if found.last_at is None or base is None:
            return found.last_at is not None and found.last_at >= first.time
        rows = attempt.last_rows(self._next - base)
        return bool(rows) and found.last_at != rows[-1].time and found.time_at(rows[-1].step + base) != rows[-1].time

    def _arrived(self, attempt: Attempt, found: vendor.Stored) -> Counter[float]:
        """Return the keys of the rows with numbers that W&B has, as far back as those of an attempt may be."""
        column, since = str(attempt.column), int(attempt.header("since") or 0)
        keys = [_key(row, column) for row in (attempt.rows() if found.state else ())]
        numbers, known = [key for key in keys if isinstance(key, int)], set[float]()
        for part in found.values_backwards(column, since) if numbers else ():
            known.update(map(int, part))
            if attempts.behind(numbers, known):
                break
        arrived = Counter({*known, *numbers[: attempts.behind(numbers, known)]})
        arrived.update(found.times(since) if len(numbers) < len(keys) else ())
        return arrived

    def _lacking(self, read: _Read, *, is_written: bool) -> Iterator[Row]:
        """Yield the new rows that W&B lacks, as they are logged. What else a file has is sent on the way."""
        attempt, passed, media = read.attempt, list[bytes](), list[str]()
        left_out = (*(_OF_PRIMARY if label_in(attempt.directory) else ()), *(() if attempt.is_offline else _ADDING))
        for kind, record, data in read.records(is_written=is_written):
            if kind == "history":
                self._columns |= record.columns
                if not data:  # only a journal has it: the file does not have what wandb-core has made of it
                    self._summary = {
                        path: item for path, item in self._summary.items() if path[0] not in record.columns
                    }
                if (row := self._new(read, record)) is not None:
                    self._forward(passed)
                    for name in media:
                        save_again(self._run, attempt.directory / "files", name)
                    yield row
                passed.clear()  # an earlier sender has sent it, if a row behind it has arrived
                media.clear()  # the end looks which of these W&B lacks
            elif kind == "files" and self._is_whole:
                media += [item.path for item in record.files if item.path.startswith("media/")]  # others at the end
            elif kind in _ADDING and self._is_whole and kind not in left_out:
                passed.append(data)
            elif self._is_whole and kind not in left_out:
                self._pass_on(read, kind, record, data)
        self._summarize()
        self._forward(passed)

    def _new(self, read: _Read, row: Row) -> Row | None:
        """Return a row at its step in the run; None if W&B has it."""
        key = _key(row, read.attempt.column)
        if key in self._sent:
            return None
        if read.known[key] > 0:
            read.known[key] -= 1  # several rows may have one time
            return None
        if read.attempt.column is None and read.base is None:
            read.base = read.attempt.keep_base(max(0, self._next - row.step))
        step = self._next if read.attempt.column is not None else row.step + (read.base or 0)
        if step < self._next:
            return None
        if not read.is_last:
            read.keys.append(key)
        if self._is_shared:  # W&B gives the steps
            return row._replace(step=-1)
        self._next = step + 1
        return row._replace(step=step) if read.attempt.column is not None else read.attempt.placed(row, step - row.step)

    # What else they have

    def _log(self, read: _Read, rows: Iterable[Row], *, is_ended: bool) -> int:
        """Log rows, each with its step and time, if there is a run. Returns how many."""
        if self._run is None:
            return sum(1 for _ in rows)
        count, run, metric = 0, self._run, read.attempt.header("step_metric")
        for row in rows:
            if is_ended and not read.is_defined:  # wandb-core makes columns and the summary of it
                read.is_defined = True
                self._repeat(read, "metric")
            if not self._has_step_metric and row.columns >= {RESTART_COUNT, metric}:
                self._has_step_metric = bool(run.define_metric("*", step_metric=metric))
            vendor.log_row(run, row.items, row.step, waits=count % _WAITING == 0)
            count += 1
        return count

    def _pass_on(self, read: _Read, kind: str, record: Any, data: bytes) -> None:
        """Send a record of a file or a journal that sets something in the run: W&B keeps the last one."""
        if kind == "run":
            self._describe(read, datastore.arguments_of(record))
        elif kind == "preempting" and read.is_last:
            self._run.mark_preempting()
        elif kind == "summary":
            attempts.change_summary(self._summary, record)
            self._removed += record.remove
        elif kind in (*REPLACING, "alert"):  # one of a journal, which wandb-core has not got
            vendor.forward(self._run, data)

    def _describe(self, read: _Read, described: dict[str, Any]) -> None:
        """Send the config, and what the process has changed. What it began with an earlier sender has sent.

        A user may have changed that at W&B since.
        """
        self._run.config.update(described["config"], allow_val_change=True)
        before, read.described = read.described, described
        for name in ("name", "notes", "tags"):
            if described[name] is not None and (before is None or described[name] != before[name]):
                setattr(self._run, name, described[name])

    def _repeat(self, read: _Read, *kinds: str) -> None:
        """Send what a process has set in the run, and kept in a journal: W&B may lack it, and its own file too."""
        for kind, record, data in read.attempt.kept.settings:
            if kind == "summary" in kinds:
                vendor.forward_summary(self._run, record)
            elif kind in kinds:
                self._pass_on(read, kind, record, data)

    def _summarize(self) -> None:
        """Send the summary that the function has set. That of columns, such as a minimum, wandb-core makes of the rows.

        If it was given one, it would make none. So what the files have of columns is sent at the end.
        """
        of_columns = {path: item for path, item in self._summary.items() if path[0] in self._columns}
        new = [item for path, item in self._summary.items() if path not in of_columns and path[0][:1] != "_"]
        vendor.forward_summary(self._run, (), self._removed)  # first: of one record, wandb-core removes at last
        vendor.forward_summary(self._run, new)
        self._summary, self._removed = of_columns, []

    def _forward(self, records: list[bytes]) -> None:
        for record in records:
            vendor.forward(self._run, record)
        records.clear()

    # The end

    def _exit_code(self, left: Sequence[Attempt]) -> int | None:
        """Return the status with which the run is to end; None if another writer ends it."""
        ended = STATES.get(self._found.state)
        primary = [one for one in left if not label_in(one.directory)]
        if not primary:
            return ended if roles.role_of(left[-1].column) == OWNER else None
        last = max(primary, key=lambda one: one.last_at)
        if self._later is not None and last.last_at > self._later.last_at:  # another attempt has logged meanwhile
            self._later.path.unlink(missing_ok=True)
            self._later = None
        code = last.exit_code if self._later is None else self._later.exit_code
        if self._later is None and last.is_incomplete:  # it has ended the run before
            code = ended
        return 1 if code is None else code

    def _require_arrived(self, left: Sequence[Attempt]) -> None:
        """Wait until W&B has what it was sent. Its client may have given up in an outage.

        Raises:
            TrackerUnavailableError: W&B does not have it.
        """
        until, reader = time.monotonic() + _CONFIRMED_S, vendor.Reader(self.place)
        wanted = self._found.rows + self.rows
        numbered = [
            (one, Counter(_key(row, one.column) for row in one.rows())) for one in left if one.column is not None
        ]
        while True:
            count = 0 if (found := reader.stored()) is None else found.rows
            if found is not None and (self._is_shared or (found.last_step >= self._next - 1 and count >= wanted)):
                numbered = [(one, keys) for one, keys in numbered if keys - self._arrived(one, found)]
                if not numbered:
                    return
            if time.monotonic() > until:
                directory = next((one.directory for one, _ in numbered), left[-1].directory)
                raise TrackerUnavailableError(
                    f"W&B has not confirmed {directory}: it counts {count} rows of run {self.place.run_id}, and should "
                    f"count {wanted}. Keep the directory, and send it again later: {how_to_send(str(directory))}"
                )
            time.sleep(_POLL_S)


def _settings(described: Any, close: Upload | None) -> dict[str, Any]:
    """Return the settings of a client that sends what a process has logged that was `described` so; None: no matter."""
    # W&B shows a run as running again that a client opens which says on which host it is.
    host = {} if described is None else {"host": described.host, "x_disable_machine_info": False}
    if close is not None:
        return {**_SETTINGS, **host, "init_timeout": max(1.0, close.limit.left_s)}
    return {**_SETTINGS, **host, "console": vendor.leave_console_alone()}


def _open(place: Place, arguments: Mapping[str, Any], directory: Path, settings: Mapping[str, Any]) -> Any:
    """Open a run to send what is left of it. W&B's client has its files below that directory."""
    if place in _refused:
        raise TrackerUnavailableError(_refused[place], is_outage=False)
    folder = tempfile.mkdtemp(prefix=attempts.SENDERS.rstrip("*"), dir=directory)
    try:
        with vendor.opening.lock:
            return vendor.open_to_send(place, arguments, folder, settings)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if _IN_USE in str(error) and place not in _unopened:
            text = f"{place.run_id} is open here for another role, node or project: this one is sent when that ends"
            raise TrackerUnavailableError(text) from error
        if _IN_USE in str(error):
            _unopened.remove(place)
            vendor.kill_service()  # what it has open is opened again
            raise TrackerUnavailableError(f"{place.run_id} could not be opened before, and is opened again") from error
        _unopened.add(place)
        text = f"run {place.run_id} was not sent: {first_line(error)}"
        if vendor.is_deleted(error):
            text += ". W&B does not take the id of a deleted run again: use another one from now on. To send what "
            text += f"W&B's own file has: wandb sync --id NEW_ID {shlex.quote(str(directory))}"
        elif vendor.is_outage(error):
            raise
        _refused[place] = text
        raise TrackerUnavailableError(text, is_outage=False) from error


class LaterEnd(NamedTuple):
    """How a later attempt has left a run that gets rows of an earlier one: it is left so again.

    It is in a file until all is sent: the run's state, config and summary change meanwhile.

    Attributes:
        path: The file, in the directory of the first of the earlier attempts.
        last_at: When it has logged its last row.
        exit_code: The status with which the run has ended.
        config: Its config.
        summary: Its summary.
    """

    path: Path
    last_at: float
    exit_code: int
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, left: Sequence[Attempt], found: vendor.Stored | None, column: str | None) -> LaterEnd | None:
        """Return it for attempts that are sent; None if one of them is the run's last one."""
        if found is None:
            return None
        path, last_at = left[0].directory / _LATER, found.last_at
        if column is not None:  # of all its rows: what was sent from another rank's directory just now is not its last
            last_at = max(found.values("_timestamp", column), default=None) if found.state in STATES else None
        values = json.loads(own_text(path, _LONGEST_LATER) or "null")
        kept = None if values is None else cls(path, **values)
        if last_at is None or any(one.is_open() for one in left) or not _is_later(last_at, left):
            return kept
        if kept is not None and kept.last_at == last_at:
            return kept
        kept = cls(path, last_at, STATES.get(found.state, 1), dict(found.config), found.plain_summary)
        replace_whole(path, encode(dict(zip(cls._fields[1:], kept[1:], strict=True))))
        return kept

    def restore(self, run: Any) -> None:
        """Give an open run its config and summary."""
        run.config.update(self.config, allow_val_change=True)
        vendor.forget(run, FAILURE_KEYS)
        run.summary.update(self.summary)


class Files:
    """The files and artifacts of attempts that did not send everything."""

    def __init__(self, place: Place, left: Sequence[Attempt]) -> None:
        """Look for them.

        Args:
            place: The run where it is sent, which alone is asked. The server that the job knew may be another one.
            left: The attempts.
        """
        self._place, self._directory = place, left[-1].directory
        self._kept = next((one.header("place") for one in left[::-1] if one.journals), place)
        of_attempts = [(each, one) for each in left for one in each.artifacts()]
        self.artifacts = list({(one.name, one.record.client_id): one for _, one in of_attempts}.values())
        self._offline = [one for each, one in of_attempts if each.is_offline]
        self._saved = {name: files for one in left for name, files in one.saved_files().items()}
        self._lacking: list[vendor.KeptArtifact | str] = []

    @property
    def can_be_sent(self) -> bool:
        """Whether this disk has one of them."""
        return any(one.is_whole for one in self.artifacts) or any(self._paths().values())

    @property
    def names(self) -> list[str]:
        """Those that are not left out."""
        return [*self._saved, *(f"artifact {one.name}" for one in self.artifacts)]

    def ask(self, found: vendor.Stored | None, *, has_later: bool) -> None:
        """Leave out the files that W&B has, or that a later attempt has saved again."""
        names = list(self._saved) if found is None else found.lacks(self._paths(), has_later=has_later)
        self._saved = {name: self._saved[name] for name in names}

    def _paths(self) -> dict[str, Path | None]:
        return {name: own_file_in(files, name) for name, files in self._saved.items()}

    def leave_out_sent(self) -> None:
        """Leave out artifacts of attempts that were online whose copies the client has removed: W&B has these."""
        self.artifacts = [one for one in self.artifacts if one.is_whole or not one.was_copied or one in self._offline]

    def send(self, run: Any, waits: bool = True) -> None:
        """Send them.

        Args:
            run: The open run; None to send none: all count as lacking.
            waits: Whether to wait until W&B has the artifacts.
        """
        saved = self._saved.items()
        self._lacking += [name for name, files in saved if run is None or not save_again(run, files, name)]
        for one in self.artifacts:  # one after the other, as they were logged: the last one of a name is the latest
            sending = one.send(run) if run is not None and (waits or one.is_whole) else None
            if sending is None or (waits and not vendor.was_sent(sending)):
                self._lacking.append(one)

    def keep_lacking(self) -> list[str]:
        """Keep that these are not sent, and return their names."""
        if self._lacking:
            name = f"artifacts-{secrets.token_hex(3)}"
            journal = Journal(self._directory, name, {"place": self._kept, "is_incomplete": True})
            journal.make()
            for one in self._lacking:
                if not isinstance(one, str):
                    journal.add(outbox.record_of_kind(attempts.ARTIFACT, one.record.SerializeToString()))
            journal.close()
        return [one if isinstance(one, str) else f"artifact {one.name}" for one in self._lacking]

    def require_sent(self, *, waits: bool = True) -> None:
        """Keep the artifacts that could not be sent, so that it is said again.

        Raises:
            TrackerUnavailableError: W&B does not have everything.
        """
        self._lacking += self._not_taken() if waits else []
        if names := self.keep_lacking():
            raise TrackerUnavailableError(
                f"{self._directory} was sent, but for files and artifacts that W&B lacks: {listed(names)}. They are "
                "not on this disk as they were, or W&B does not take them. If the job had WANDB_DATA_DIR, set it and "
                "send again. Else log them again, or remove the directory to give them up"
            )

    def _not_taken(self) -> list[str]:
        """Return the files that were sent just now, and that W&B has not got."""
        sent = {name: path for name, path in self._paths().items() if name not in self._lacking}
        names, until = list(sent), time.monotonic() + _CONFIRMED_S
        while names and ((found := vendor.stored_run(self._place)) is None or (names := found.lacks(sent))):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        return names


def tell_of_tensorboard(run_id: str, left: Iterable[Attempt]) -> None:
    """Say that rows of TensorBoard may lack which W&B's client had not read when its process was killed."""
    for one in left:
        files = [str(folder / name) for name, folder in one.saved_files().items() if "tfevents" in name]
        if files and one.exit_code is None:
            text = "W&B: run %s: it may lack the last rows of TensorBoard before a kill. TensorBoard shows them: %s"
            logger.warning(text, run_id, ", ".join(files))


def save_again(run: Any, files: Path, name: str) -> bool:
    """Have a file that an attempt has saved be uploaded with this run. Returns False if this disk lacks it."""
    path = own_file_in(files, name)
    if path is not None:
        run.save(glob.escape(str(path)), base_path=glob.escape(str(files)), policy="now")
    return path is not None


# The next attempt


def send_earlier(request: RunRequest, run: Any) -> None:
    """Log what earlier attempts have left, before the function's first row.

    It stays on this disk until this run has ended, or a later attempt finds that W&B has it. If several processes write
    the run, a rank sends what its own rank has left, and the primary that of ranks which the job has no more.
    """
    made = outbox.of(run)
    # Tasks that continue a run may be several on one disk: what they have left is sent by the task that calls them.
    speaks = made.column is None or request.plan.primary or outbox.label_of(request) is not None
    if not speaks or not made.is_kept:
        return
    parent, run_id, left = made.directory.parent, made.place.run_id, list[Attempt]()
    try:
        left = [one for one in attempts.attempts_of(parent, made.place) if _is_to_send(one, made, request)]
        left.sort(key=lambda one: one.is_offline)
        # Two processes may have one role, by mistake: only one of them sends what the role has left.
        if left and made.column is not None:
            made.lock = _lock(parent, run_id, outbox.label_of(request), made.column)
        if left and (made.column is None or made.lock is not None):
            _send_before(made, left, run, request.deadline)
    except Exception:  # tracker errors must not change the training's outcome
        text = "W&B: run %s: rows that earlier attempts had logged could not be sent. To send them, run: %s"
        command = how_to_send([str(one.directory) for one in left] or str(parent))
        logger.warning(text, run_id, command, exc_info=True)


def _is_to_send(attempt: Attempt, made: outbox.WandbOutbox, request: RunRequest) -> bool:
    is_left = attempt.journals and attempt.directory != made.directory and not attempt.is_incomplete
    if not is_left or attempt.is_open() or (attempt.is_offline and not attempt.was_automatic):
        return False
    label, info = attempt.header("label"), request.info
    if made.column is None or (attempt.column is None and request.plan.ends_run):
        return True
    is_gone = label is not None and info is not None and int(label.rpartition("-")[2]) >= info.world_size
    is_own = label == outbox.label_of(request) or (is_gone and request.plan.primary)
    return is_own and attempt.column == made.column


def _lock(parent: Path, run_id: str, label: str | None, column: str | None) -> RunLock | None:
    """Lock what a writer of a run has left in the directories here: two processes might send a row twice."""
    return RunLock.of_any_file(parent / f"{run_id}.{label or roles.role_of(column)}.lock")


def _send_before(made: outbox.WandbOutbox, left: Sequence[Attempt], run: Any, deadline: float) -> None:
    directories, run_id = [one.directory for one in left], made.place.run_id
    if made.column is not None:  # or else it was waited for before the run was opened
        attempts.await_count(directories, deadline)
    found = vendor.Reader(made.place).stored()  # steps alone do not tell whether others have logged meanwhile
    sender = Sender(run, made.place, found, is_shared=made.column is not None)
    with made.paused():  # it is kept where it is
        while sender.send(directories):
            pass
        left = sender.attempts  # their journals are read
        files = Files(made.place, left)
        if sender.rows:
            # wandb-core reads each process's rows from a connection of its own, and drops one whose step it has passed:
            # a child's new row must not overtake these.
            vendor.flush(run, _READ_S)
        files.ask(found, has_later=_is_later(None if found is None else found.last_at, left))
        files.leave_out_sent()
        files.send(run, waits=False)
    tell_of_tensorboard(run_id, left)
    if sender.rows:
        text = "W&B: run %s: sent %d rows that earlier attempts had logged, and W&B lacked, from %s"
        logger.warning(text, run_id, sender.rows, made.directory.parent)
    if names := [one.name for one in files.artifacts if one.is_whole]:
        logger.warning("W&B: run %s: sends artifacts again that W&B may lack: %s", run_id, ", ".join(names))
    if names := files.keep_lacking():
        text = "W&B: run %s may lack files, which are not on this disk as they were. If so, log them again: %s"
        logger.warning(text, run_id, ", ".join(names))
    if files.names or sender.rows:
        made.earlier = directories
    else:  # W&B has all
        for one in left:
            one.mark_sent()


# The close of a run, in the process that has logged it


def close_again(run: Any, exit_code: int, limit: EndLimit) -> str:
    """Have another wandb-core send what this process has kept of its run, and end it with the status in its journal.

    Args:
        run: The run, which has ended, or whose wandb-core has died.
        exit_code: The status with which it ends.
        limit: How long that may take.

    Returns:
        Why W&B lacks something; empty if it has everything.
    """
    made, why = outbox.of(run), "its end was interrupted"
    if not made.is_kept:
        return "nothing is kept of a run with resume_from="
    close = Upload(made.place, limit)

    def send_all() -> None:
        alone = nullcontext() if made.lock is not None else _alone(Attempt.at(made.directory), run.id)
        with alone, nullcontext() if run.id == forced_run_id() else vendor.outside_sweep():
            _send_all([*made.earlier, made.directory], close)

    try:
        vendor.finish_while(close.lasts, run, exit_code, send_all)
        why = ""
    except TimeoutError:
        why = limit.why
    except Exception as error:  # tracker errors must not change the training's outcome
        why = str(error) if isinstance(error, TrackerUnavailableError) else repr(error)
    finally:
        if why and close.run is not None:
            vendor.set_finished(close.run)
            vendor.restart_service(_CUT_S, exit_code or 1)
    return why


def _send_all(directories: Sequence[Path], close: Upload | None = None) -> Sender:
    """Open the run, send what these lack, and end it.

    Another wandb-core goes on if one dies. What may kill each one is left out at last: files and artifacts.
    """
    deaths = 0
    while True:
        sender = None
        try:
            sender = Sender.open(directories, close)
            sender.finish(directories, close, has_files=deaths < _DEATHS)
            return sender
        except Exception as error:
            # Before the run is open, it is asked for by way of wandb-core too: W&B does not say that this has died.
            is_away = close is not None and sender is None and close.lasts() and getattr(error, "is_outage", False)
            deaths += not is_away
            is_death = type(error).__module__.startswith(_OF_SERVICE) or (sender is not None and sender.is_lost(error))
            if not (is_death or is_away) or deaths > _DEATHS:
                raise
            logger.warning("W&B: what is left in %s is sent once more: %s", directories[-1], first_line(error))
            time.sleep(_POLL_S)


# The command


def send(directory: Path) -> str:
    """Send a directory, with those of attempts of its run beside it whose rows come before its own.

    Args:
        directory: The directory.

    Returns:
        What W&B has of it now, in words.

    Raises:
        TrackerUnavailableError: It was not sent, or W&B has not confirmed that it has it; or a process is writing it.
    """
    size, described, attempt = attempts.file_size(directory), datastore.description(directory), Attempt.at(directory)
    vendor.drop_unusable_service()  # W&B is asked by way of it too
    if attempt.is_open():
        raise TrackerUnavailableError(f"a process is writing to {directory}: wait for its end")
    is_known = described is not None or (attempt.journals and not attempt.is_offline)
    if not is_known and attempt.first is None:
        attempt.mark_sent(size)
        require_all_sent(directory)
        return f"{directory} has no rows: its process was killed while it opened the run"
    if not (attempt.journals or attempts.is_unsent(directory)):
        require_all_sent(directory)
        return f"{directory} has nothing that is not sent yet"
    # The journals have the server that was set up where it was logged, which may be another one.
    place = place_of(attempt, described)
    if not attempt.is_offline:
        require_server(directory, "WANDB_BASE_URL", place.server, vendor.session().settings.base_url)
    left, texts = _with_earlier(attempt, place), list[str]()
    if attempt.is_offline:  # each has its own steps, and those that were online have theirs in the run already
        for one in left[:-1]:
            if Attempt.at(one.directory).journals:  # otherwise it was sent with another one
                texts.append(send(one.directory))
        left = [attempt]
    found = vendor.Reader(place).stored()
    text = f"W&B has all of {directory}: run {place.run_id}"
    if not _has_all(place, left, found):
        with _alone(attempt, place.run_id):
            sender = _send_all([one.directory for one in left])
        files = f", with {listed(sender.files)}" if sender.files else ""
        text = f"sent {directory}: {sender.rows} rows of run {place.run_id}{files}"
    require_all_sent(directory)
    return "\n".join([*texts, text])


def _with_earlier(attempt: Attempt, place: Place) -> list[Attempt]:
    """Return the attempts of one's run that come before it, in their order, and that one.

    These are the ones that were online, and those that began before an offline one.

    Raises:
        TrackerUnavailableError: A process is writing the run.
    """
    of_run = _of_run(attempt, place)
    if attempt.column is not None:
        return [attempt]
    online = [one for one in of_run if one.journals and not one.is_offline and one.column is None]
    if attempt.directory in [one.directory for one in online]:
        return online
    kept = Place(*(attempt.header("place") or place))  # offline, the client has another server
    begun = takewhile(
        lambda one: one.directory != attempt.directory, attempts.attempts_of(attempt.directory.parent, kept)
    )
    offline = [one for one in begun if one.is_offline and one.journals and one.column is None and not one.is_incomplete]
    return [*online, *offline, attempt]


def _of_run(attempt: Attempt, place: Place) -> list[Attempt]:
    """Return the attempts of a run that are beside one.

    Raises:
        TrackerUnavailableError: A process is writing the run, which this one's end must not be that of. An owner's end
            is not a role's. But a writer without numbers is alone in its run.
    """
    of_run = attempts.attempts_of(attempt.directory.parent, place)
    if any(one.is_open() and (attempt.column is None or one.column in (None, attempt.column)) for one in of_run):
        raise TrackerUnavailableError(f"a process is writing to run {place.run_id}: wait for its end")
    return of_run


@contextmanager
def _alone(attempt: Attempt, run_id: str) -> Iterator[None]:
    """Keep other processes from sending what this writer has left.

    Raises:
        TrackerUnavailableError: One does.
    """
    lock = _lock(attempt.directory.parent, run_id, attempt.header("label"), attempt.column)
    if lock is None:
        raise TrackerUnavailableError(f"another process sends what is left of run {run_id} here: wait for its end")
    try:
        yield
    finally:
        lock.release()


def _has_all(place: Place, left: Sequence[Attempt], found: vendor.Stored | None) -> bool:
    """Whether W&B has everything of attempts. Then the run, which has ended, is not opened.

    Raises:
        TrackerUnavailableError: It lacks a file or an artifact that is not on this disk any more.
    """
    is_ended = found is not None and found.state in STATES and found.state != "crashed"  # that is W&B's guess
    if found is None or not is_ended:
        return False
    if any(attempts.is_unsent(one.directory) or one.kept.has_late_settings for one in left):
        return False
    directories, files = [one.directory for one in left], Files(place, left)
    files.ask(found, has_later=_is_later(found.last_at, left))
    if files.can_be_sent or Sender(None, place, found).send(directories):
        return False
    files.send(None)
    for one in left:
        one.mark_sent()
    files.require_sent()
    return True


def require_unwritten(found: vendor.Stored | None, of_run: Sequence[Attempt]) -> None:
    """Refuse a run that a process elsewhere has open: one of both would overwrite the other's rows.

    A run that is "running", and whose last row is of an attempt on this disk, was killed here.

    Args:
        found: What W&B has of the run.
        of_run: The attempts of the run on this disk.

    Raises:
        TrackerUnavailableError: A process elsewhere may have it open.
    """
    if found is None or found.state != "running" or found.last_at is None:
        return
    # Where in an attempt its rows are that W&B has got last.
    near = ((one, max(0, found.last_step - (one.base or 0)) if one.column is None else 0) for one in of_run)
    if not any(found.last_at == row.time for one, step in near if not one.may_be_written() for row in one.rows(step)):
        raise TrackerUnavailableError(
            f"W&B shows run {found.run.id} as running, with rows that no ended process has logged here: what is sent "
            "now could take the place of rows. Send it when that process has ended: W&B shows a killed one as crashed "
            "after some minutes"
        )


def place_of(attempt: Attempt, described: Any) -> Place:
    """Return which run it is where it is sent: that of an offline one is at the server that is set up here.

    Args:
        attempt: The attempt.
        described: The record with which the run was opened, if there is one.
    """
    kept = attempt.header("place")
    if kept is not None and not attempt.is_offline:
        return Place(*kept)
    of_run = described or Place(*kept)
    return Place(without_credentials(vendor.session().settings.base_url), of_run.entity, of_run.project, of_run.run_id)


def _is_later(last_at: float | None, left: Sequence[Attempt]) -> bool:
    """Whether others have logged the last row of a run, since these attempts have."""
    return last_at is not None and last_at > max(one.last_at for one in left)


def _key(row: Row, column: str | None) -> float:
    """Return what tells a row from others: its number, or else its time, as of one of TensorBoard or a forked child."""
    number = row.number_in(column)
    return row.time if number is None else number
