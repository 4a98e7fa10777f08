"""The rows of W&B runs that the service may not have: kept in journals, and logged again by a later attempt.

wandb-core sends every 15 s, and SIGKILL of its process keeps it from sending the rest. So each process that logs into a
run keeps its rows in a journal in the run's directory, until the run has ended: then all have arrived.

What the service has of a run is a prefix. The step at which the next opening starts tells how long it is. That attempt
logs the rest again before the function's first row, with the steps and times that the rows had. So these rows are in
its own journal too, and what it was left is removed. If it is killed before that, the next attempt finds rows in two
journals: equal steps tell that. Only an attempt on another disk takes the steps of rows that W&B lacks: the time of the
row at such a step tells that, and then the times of all rows tell which are lacking. These come behind.

A process that writes a run alone knows the steps of its rows. If its forked children or TensorBoard write too,
wandb-core gives the steps, and the run's file (`run-ID.wandb`) has them. If other clients write to the run, its rows
have numbers: see `roles`.

An offline run's file has all its rows, but for the last 0.1 s of an attempt that was killed. The next attempt here logs
these into its own file, or `send` logs them when it has sent the file. If a run is offline because W&B could not be
used, the next attempt that is online logs its rows, behind those that the run has, with their own steps in a column, as
after a rollback. Equal times tell which of them an attempt has logged that was killed then.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import json
import logging
import math
import secrets
import socket
import time
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import (
    is_own_directory,
    is_own_file,
    own_file_in,
    own_text,
    replace_whole,
    touch_own,
)
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT
from flyteplugins_tracking.trackers.config import OWNER
from flyteplugins_tracking.trackers.journal import Journal, StoredJournal, encode, stored
from flyteplugins_tracking.trackers.wandb import datastore, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Row

logger = logging.getLogger(__name__)

# The run's attributes that hold its `WandbOutbox`, and what keeps plain rows: see `log_kept`.
OUTBOX, _PLAIN = "_flyteplugins_tracking_outbox", "_flyteplugins_tracking_plain_rows"
# In the header of a journal with numbered rows: which numbers its own rows have.
WRITER = "writer"
# How many bits of a row's number are its count. A number has at most 53, as a float of JSON.
_COUNT_BITS, _RANDOM_BITS = 28, 25
_OFFLINE = "offline-"
# What an artifact's record in a journal begins with. That of a row begins with numbers.
_ARTIFACT = b"artifact"
# A file in a run's directory: a forked child has logged too.
_FORKED = "flyteplugins-tracking-forked"
# How long wandb-core may take to write the end of a run that it has ended.
_END_S, _POLL_S = 5.0, 0.01
# How long it may take to read what earlier attempts have left.
_READ_S = 60.0
# How long after the last rows were sent W&B's count of them may be wrong.
LATE_S = 6.0
# What `wandb sync` keeps beside a file, with the key that tells that rows were sent by `live`, and its most bytes.
_STATE, _SENDER, _LONGEST_STATE = ".syncstate", "flyteplugins_tracking", 4096
# What marks a file as sent for `wandb sync`. It has the size that was sent; that of `wandb sync` itself is empty.
_SYNCED = ".synced"
# Where wandb-core's log is in a run's directory. Its time tells when wandb-core has sent something last.
LOG = ("logs", "debug-internal.log")
# The logs of those who have sent what is there: see `live`.
SENDERS_LOG = "sender-*/wandb/*run-*/logs/debug-internal.log"


class Place(NamedTuple):
    """Which run of which server it is. It is stored, so the server's address has no password."""

    server: str
    entity: str
    project: str
    run_id: str

    @classmethod
    def of(cls, run: Any) -> Place:
        """Return the place of an open run."""
        server = without_credentials(str(run.settings.base_url))
        return cls(server, str(run.entity or ""), str(run.project), str(run.id))

    @property
    def path(self) -> str:
        """The run in `wandb.Api().run`."""
        return "/".join(filter(None, self[1:]))

    def is_same(self, other: Place) -> bool:
        """Whether it is the same run. Offline, the client does not know the user's default entity: it has none."""
        is_entity = self.entity == other.entity or not (self.entity and other.entity)
        return is_entity and self._replace(entity="") == other._replace(entity="")


# Attempts on this disk


@dataclass
class AttemptOnDisk:
    """What an attempt has left in its directory: the journals of its processes, and the run's file.

    Attributes:
        directory: The directory.
        journals: The journals; none if its rows have arrived, or if the file has them all.
    """

    directory: Path
    journals: Sequence[StoredJournal]

    def is_open(self) -> bool:
        """Whether a process has the run open."""
        return any(journal.is_open() for journal in self.journals if "first_step" in journal.header)

    @property
    def exit_code(self) -> int | None:
        """The status with which it has ended its run; None if it was killed before."""
        ends = chain.from_iterable(chain([one.header], one.lines()) for one in self.journals)
        for end in ends:
            if "exit_code" in end:
                return int(end["exit_code"])
        return datastore.exit_code(self.directory)  # a copy may have a journal that its process has removed, cut off

    def rows(self, since: int = 0) -> Iterator[Row]:
        """Yield its rows from a step on, in their order."""
        if not self.journals:
            found: Iterable[Row] = datastore.rows(self.directory)
        elif all(one.header["step"] is not None for one in self.journals) and not is_own_file(self.directory / _FORKED):
            in_order = sorted(self.journals, key=lambda journal: int(journal.header["step"]))
            found = chain.from_iterable(rows_of(journal, since) for journal in in_order)
        else:
            found = self._rows_among_others()
        return (row for row in found if row.step >= since)

    def missing(self) -> Iterator[Row]:
        """Yield the rows that its file lacks."""
        if not self.journals:
            return iter(())
        last = max((row.step for row in datastore.rows(self.directory)), default=-1)
        return self.rows(last + 1)

    def times(self) -> set[float]:
        """Return the times of the rows that its journals have: they tell rows apart that have other steps elsewhere."""
        return {row.time for row in self.rows()} if self.journals else set()

    def logged_at(self) -> set[float]:
        """Return the times of all its rows; if it has none, that of its start. W&B's rows have them too."""
        times = {row.time for row in chain(datastore.rows(self.directory), self.rows())}
        return times or {at for at in [datastore.started_at(self.directory)] if at is not None}

    def artifacts(self) -> Iterator[vendor.KeptArtifact]:
        """Yield the artifacts that its processes have logged, and W&B may lack."""
        entries = chain.from_iterable(journal.entries() for journal in self.journals)
        kept = (entry.data.partition(b" ") for entry in entries)
        in_journals = (a2b_base64(data) for head, _, data in kept if head == _ARTIFACT)
        in_file = datastore.artifacts(self.directory) if self.is_unsent_file() else ()
        yield from map(vendor.KeptArtifact.of, chain(in_journals, in_file))

    def is_unsent_file(self) -> bool:
        """Whether it was logged offline, and its file is not sent."""
        return is_offline(self.directory) and not is_synced(self.directory)

    @property
    def label(self) -> str | None:
        """The name of the rank, among those that share the run; None if they do not."""
        return next((one.header["label"] for one in self.journals if one.header.get("label")), None)

    @property
    def step_metric(self) -> str | None:
        """The column for the steps of rows that get others."""
        return self.journals[0].header.get("step_metric") if self.journals else None

    def with_columns(self, row: Row) -> Mapping[str, Any]:
        """Return the values of a row that gets another step: with its own one in a column, if that was given."""
        if not row.is_placed or self.step_metric is None:
            return row.values
        return {self.step_metric: row.step, RESTART_COUNT: self.journals[0].header[RESTART_COUNT], **row.values}

    def _rows_among_others(self) -> Iterator[Row]:
        """Yield the rows of the file, which has the steps, then those of the process that it lacks."""
        in_file = list(datastore.rows(self.directory))
        times, first = {row.time for row in in_file}, (one.header.get("first_step") or 0 for one in self.journals)
        step, found = 1 + max((row.step for row in in_file), default=max(first) - 1), in_file
        for row in chain.from_iterable(rows_of(journal, 0) for journal in self.journals):
            if row.time not in times:
                # What an attempt has logged again has its step already.
                found.append(row if row.step >= 0 else row._replace(step=step))
                step = max(step, found[-1].step + 1)
        yield from sorted(found, key=lambda row: row.step)

    def clear(self) -> None:
        """Remove what is to be sent: the service has everything, or another journal."""
        self.remove_journals()
        if is_offline(self.directory):
            mark_synced(self.directory)

    def remove_journals(self) -> None:
        """Remove the journals: their rows are elsewhere too."""
        for journal in self.journals:
            journal.remove()


def rows_of(journal: StoredJournal, since: int) -> Iterator[Row]:
    """Put the rows of a journal together from their parts. Rows with steps that the service has are left out."""
    row: Row | None = None
    for step, is_placed, _, data in _row_records(journal):
        if 0 <= step < since:
            continue
        values = json.loads(data) if data.startswith(b"{") else vendor.parse_row(a2b_base64(data))
        if row is not None and (step < 0 or step != row.step):
            yield row
            row = None
        row = Row(step, values if row is None else {**row.values, **values}, bool(is_placed))
    if row is not None:
        yield row


def last_role_step(journal: StoredJournal) -> int:
    """Return the last step of a role in its journal; -1 for none."""
    return max((role_step for _, _, role_step, _ in _row_records(journal)), default=-1)


def _row_records(journal: StoredJournal) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the parts of what `record_of` has returned: step, whether that was given, the role's step, and the row."""
    for entry in journal.entries():
        if not entry.data.startswith((b"{", _ARTIFACT)):  # the run's end, or an artifact
            step, is_placed, role_step, data = entry.data.split(b" ", 3)
            yield int(step), int(is_placed), int(role_step), data


def attempt_at(directory: Path, place: Place | None = None) -> AttemptOnDisk:
    """Return what is in a directory, of this run if one is given."""
    journals = [journal for journal in stored(directory) if _is_place(journal.header.get("place"))]
    if place is not None:
        journals = [journal for journal in journals if Place(*journal.header["place"]).is_same(place)]
    return AttemptOnDisk(directory, journals)


def _is_place(value: Any) -> bool:
    """Whether a value of JSON has the fields of a `Place`."""
    return isinstance(value, list) and len(value) == 4 and all(isinstance(one, str) for one in value)


class Left:
    """What earlier attempts of a run have left on this disk, and the service may lack."""

    def __init__(self, place: Place, parent: Path, is_to_send: Callable[[AttemptOnDisk], bool]) -> None:
        """Look for it.

        Args:
            place: The run.
            parent: The directory of all runs.
            is_to_send: Whether an attempt's rows are to be sent. Those that were logged offline come last.
        """
        self.place, self.parent, directories = place, parent, directories_of(parent, place.run_id)
        self.media = [directory / "files" for directory in directories]
        found = [attempt_at(directory, place) for directory in directories]
        self.is_open = any(attempt.is_open() for attempt in found)
        attempts = [attempt for attempt in found if not attempt.is_open() and is_to_send(attempt)]
        self.online = [attempt for attempt in attempts if not is_offline(attempt.directory)]
        self.offline = [attempt for attempt in attempts if is_offline(attempt.directory)]
        self.attempts = [*self.online, *self.offline]
        self.journals = [journal for attempt in self.attempts for journal in attempt.journals]
        self._arrived: set[float] | None = None  # the times of W&B's rows, if their steps do not tell which it has

    @property
    def exit_code(self) -> int | None:
        """The status with which the last attempt has ended the run; None if all were killed before."""
        codes = [attempt.exit_code for attempt in (*self.online[::-1], *self.offline[::-1])]
        return next((code for code in codes if code is not None), None)

    @property
    def step_metric(self) -> str | None:
        """The column for the steps of rows that get others."""
        return next((attempt.step_metric for attempt in (*self.offline, *self.online) if attempt.journals), None)

    def compare(self, found: vendor.Stored | None) -> None:
        """Look whether others, which have not seen this disk, have taken steps of rows that W&B lacks.

        Args:
            found: What W&B has of the run.
        """
        for attempt in self.online:
            if found is None:
                return
            rows = (row for row in attempt.rows() if row.step <= found.last_step)
            last = max(rows, key=lambda row: row.step, default=None)
            if last is not None and found.last_at != last.time and found.time_at(last.step) != last.time:
                self._arrived = found.times()
                return

    def times(self) -> set[float]:
        """Return the times of the rows that attempts online have logged: also of those that had been logged offline."""
        return set[float]().union(*(attempt.times() for attempt in self.online))

    def rows(self, since: int) -> Iterator[Row]:
        """Yield the rows that the service lacks, at the steps that they get there.

        Args:
            since: How many steps the service has.
        """
        step, behind, known = since, self.attempts, set(self._arrived or ())
        if self._arrived is None:
            behind, known = self.offline, self.times() if self.offline else set()
            # A row that a later attempt has logged again comes from that one.
            in_order = heapq.merge(*(attempt.rows(since) for attempt in self.online[::-1]), key=lambda row: row.step)
            for row in (row for row in in_order if row.step >= step):
                yield row
                step = row.step + 1
        for attempt in behind:
            rows = attempt.missing() if is_synced(attempt.directory) else attempt.rows()
            begun = distance = starting_step(attempt.directory, of_live=True)
            for row in (row for row in rows if row.time not in known):
                distance = max(0, step - row.step) if distance is None else distance
                if begun is not None and row.step + begun < since:
                    continue  # `live` has sent it
                values = attempt.with_columns(row) if distance else row.values
                yield row._replace(step=row.step + distance, values=values)
                step = row.step + distance + 1
                known.add(row.time)  # a later attempt may have logged it again

    def artifacts(self) -> list[vendor.KeptArtifact]:
        """Return the artifacts that attempts have logged, each once."""
        logged = chain.from_iterable(attempt.artifacts() for attempt in (*self.online, *self.offline))
        return list({(one.name, one.record.client_id): one for one in logged}.values())

    def saved_files(self, attempts: Iterable[AttemptOnDisk]) -> dict[str, Path]:
        """Return where the files are that attempts have saved, by their names: the latest of each name."""
        folders = [one.directory for one in attempts if one.journals or one.is_unsent_file()]
        return {name: folder / "files" for folder in folders for name in datastore.saved_files(folder)}

    @property
    def directories(self) -> list[Path]:
        """Where it is."""
        return [attempt.directory for attempt in (*self.online, *self.offline)]

    def clear(self) -> None:
        """Remove it: the service has everything, or another journal."""
        for attempt in self.attempts:
            attempt.clear()


def was_automatic(attempt: AttemptOnDisk) -> bool:
    """Whether an attempt was offline because W&B could not be used, and its file is not sent."""
    return any(one.header.get("is_automatic") for one in attempt.journals) and not is_synced(attempt.directory)


def directories_of(parent: Path, run_id: str, prefix: str = "") -> list[Path]:
    """Return this user's directories of a run, in the order of their start.

    Another user may have made one, where others can write: its rows and files are not sent.
    """
    found = parent.glob(f"{prefix or '*run-'}*-{glob.escape(run_id)}*")
    return sorted((path for path in found if is_own_directory(path) and run_id_of(path) == run_id), key=start_of)


def start_of(directory: Path) -> tuple[float, str]:
    """Return what sorts directories by their start. Their names have local times, which may be of several zones."""
    with contextlib.suppress(TrackerUnavailableError):  # it is damaged, or another user's
        if (started_at := datastore.started_at(directory)) is not None:
            return started_at, directory.name
    with contextlib.suppress(ValueError, OverflowError):  # of a process that was killed while it opened the run
        text = directory.name.partition("run-")[2].partition("-")[0]
        return datetime.strptime(text, "%Y%m%d_%H%M%S").astimezone().timestamp(), directory.name
    return 0.0, directory.name


def run_id_of(directory: Path) -> str:
    """Return the id of a directory's run. The directory's own name may have a suffix, and its file's has none."""
    file = datastore.file_in(directory)
    return file.stem.removeprefix("run-") if file is not None else directory.name.partition("run-")[2].partition("-")[2]


def project_of(directory: Path) -> str:
    """Return the project of a directory's run; "" if that is not known yet, or not to be read."""
    with contextlib.suppress(OSError, TrackerUnavailableError):
        described = datastore.description(directory)
        if described is not None:
            return str(described.project)
    return next((Place(*journal.header["place"]).project for journal in attempt_at(directory).journals), "")


def label_of(request: RunRequest) -> str | None:
    """Return the name of a rank that shares its run with others; None for another writer, which is alone in its job."""
    return request.plan.label if request.config.run_mode == "shared" else None


def column_of(role: str | None) -> str:
    """Return the column with the numbers of a role's rows, or of the owner's. See `roles`."""
    return f"roles/{role or OWNER}/row"


def row_numbers(header: dict[str, Any]) -> Iterator[int]:
    """Return the numbers of a journal's own rows, and say in its header which these are. No other journal has them."""
    header[WRITER] = secrets.randbits(_RANDOM_BITS)
    return count(header[WRITER] << _COUNT_BITS)


def writer_of(number: int) -> int:
    """Return which journal's own row has a number."""
    return number >> _COUNT_BITS


def is_offline(directory: Path) -> bool:
    """Whether this is the directory of a run that was logged offline."""
    return directory.resolve().name.startswith(_OFFLINE)


def run_directory(run: Any) -> Path:
    """The directory of the run's `.wandb` file, which `flyteplugins_tracking send` takes."""
    return Path(str(run.dir)).parent


def directory_to_send(request: RunRequest, run: Any) -> str:
    """The directory that the printed command names: that of the run; if ranks share it, the one that has theirs."""
    own = run_directory(run)
    return str(own if label_of(request) is None else own.parent)


def is_synced(directory: Path) -> bool:
    """Whether the file of this directory was sent, by `wandb sync` or row by row, and has not grown since."""
    file = datastore.file_in(directory)
    return is_marked(directory) and not any(
        file_size(directory) > int(size) if size.isdecimal() else file and _is_newer(file, path)
        for path, size in ((path, own_text(path) or "") for path in directory.glob(f"*{_SYNCED}"))
    )


def _is_newer(file: Path, mark: Path) -> bool:
    """Whether a file was written since `wandb sync` has marked it, which it does also while a process writes it."""
    return file.stat().st_mtime > mark.stat().st_mtime


def is_marked(directory: Path) -> bool:
    """Whether the file of this directory was sent once. It may have grown since."""
    return any(map(is_own_file, directory.glob(f"*{_SYNCED}")))


def mark_all_synced(sizes: Mapping[Path, int]) -> None:
    """Note of each directory how much of its file was sent."""
    for path, size in sizes.items():
        mark_synced(path, size)


def mark_synced(directory: Path, size: int | None = None) -> None:
    """Note that the file of this directory was sent: `wandb sync` would send it again.

    Args:
        directory: The directory.
        size: How long the file was before it was read, if it is longer now. A process that seemed killed may go on.
    """
    file = datastore.file_in(directory)
    if file is not None:
        touch_own(Path(f"{file}{_SYNCED}"))
        replace_whole(Path(f"{file}{_SYNCED}"), str(file_size(directory) if size is None else size))


def file_size(directory: Path) -> int:
    """Return the size of the file of this directory in bytes; 0 if there is none."""
    file = datastore.file_in(directory)
    return 0 if file is None else file.stat().st_size


def starting_step(directory: Path, *, of_live: bool = False) -> int | None:
    """Return the run's step at which W&B has step 0 of a file; None if nobody has begun to send it.

    `wandb sync`, which may have been killed, keeps that in a file beside it, and so does `live`.

    Args:
        directory: The directory of the file.
        of_live: Whether only `live` counts: what `wandb sync` has begun, it can go on with.
    """
    for path in directory.glob(f"*{_STATE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads(own_text(path, _LONGEST_STATE) or "")
            return int(state["starting_step"]) if _SENDER in state or not of_live else None
    return None


def keep_starting_step(directory: Path, step: int) -> None:
    """Keep what `starting_step` returns."""
    state = encode({"starting_step": step, _SENDER: socket.gethostname()})
    replace_whole(Path(f"{datastore.file_in(directory)}{_STATE}"), state)


# Logging again


def log_again(run: Any, kind: Any, rows: Iterable[Row], step_metric: str | None, media: Sequence[Path]) -> list[int]:
    """Log rows that attempts have left, each with its step and time.

    Args:
        run: An open run.
        kind: Its class, whose methods log at any time.
        rows: The rows.
        step_metric: The column for steps, which rows have that get others.
        media: The directories of files in which those of rows may be, such as images.

    Returns:
        The steps.
    """
    is_defined, steps = False, []
    for row in rows:
        if not is_defined and RESTART_COUNT in row.values and step_metric in row.values:
            is_defined = bool(kind.define_metric(run, "*", step_metric=step_metric))
        for value in row.values.values():
            if isinstance(value, (dict, list)):
                _save_media(run, kind, media, value)
        log_kept(kind.log, run, dict(row.values), None if row.step < 0 else row.step, True)
        steps.append(row.step)
    return steps


def save_again(run: Any, kind: Any, files: Path, name: str) -> bool:
    """Have a file that an attempt has saved be uploaded with this run. Returns False if this disk lacks it."""
    path = own_file_in(files, name)
    if path is not None:
        kind.save(run, glob.escape(str(path)), base_path=str(files), policy="now")
    return path is not None


def _save_media(run: Any, kind: Any, media: Sequence[Path], value: Any) -> None:
    """Have the files of a value, such as an image, be uploaded with this run."""
    if isinstance(value, str):
        for files in media if value.startswith("media/") else ():
            source = own_file_in(files, value)
            if source is not None and not source.is_symlink():  # the client has copied it there
                kind.save(run, glob.escape(str(source)), base_path=str(files), policy="now")
                return
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            _save_media(run, kind, media, part)


# The open run


class WandbOutbox:
    """What an open run has logged and W&B may lack: its journal, which has what earlier attempts have left too.

    Attributes:
        first_step: The step of the first row that is not an earlier attempt's; None if it is not known.
        next_step: The step of the next row; None if other processes log into the run too.
        column: The column with the numbers of rows; None if they have none. See `roles`.
        numbers: The numbers for rows.
        kept_artifacts: The names of artifacts that `send` can send: this disk has copies of their files.
    """

    first_step: int | None = None
    next_step: int | None = None
    column: str | None = None
    _sent: Left | None = None  # what this run has logged again
    _unkept = 0
    _is_row_open = False  # whether what is logged next, without a step, is put into the last row
    _role_step = -1  # that of the role's last row

    def __init__(self, run: Any, directory: Path, has_one_writer: bool, **more: Any) -> None:
        """Keep what is logged from now on.

        Args:
            run: The open run, before its methods are guarded.
            directory: Where the journal is.
            has_one_writer: Whether no other process logs into the run.
            more: What else the readers of the journal need: values of JSON.
        """
        self.directory, self.place = directory, Place.of(run)
        self._run, self._kind, self._more, self.column = run, type(run), more, more.get("column")
        self.first_step = step = int(run.starting_step)
        self.next_step = step if has_one_writer else None
        self._header = {"place": self.place, "first_step": step, **more}
        self.numbers = row_numbers(self._header)
        self._begin()
        self.kept_artifacts: set[str] = set()
        self._keep_from(run)

    def _begin(self) -> None:
        header = {**self._header, "step": self.next_step}
        self._journal = Journal(self.directory, f"rows-{secrets.token_hex(3)}", header)

    def send(self, left: Left) -> int:
        """Log what earlier attempts have left, before the run gets other rows. Returns the number of rows."""
        steps = self.log_rows(left, left.rows(int(self._run.starting_step)))
        self.replace(left)
        if steps:
            # wandb-core reads each process's rows from a connection of its own, and drops one whose step it has passed:
            # a child's new row must not overtake these.
            vendor.flush(self._run, _READ_S)
            self.first_step = steps[-1] + 1
            text = (
                "W&B: run %s: sent %d rows (steps %d to %d) that earlier attempts had logged, and W&B lacked, from %s"
            )
            logger.warning(text, self.place.run_id, len(steps), steps[0], steps[-1], left.parent)
        return len(steps)

    def log_rows(self, left: Left, rows: Iterable[Row]) -> list[int]:
        """Log rows again that earlier attempts have left. Returns their steps."""
        return log_again(self._run, self._kind, rows, self._more["step_metric"], left.media)

    def replace(self, left: Left) -> None:
        """Remove what earlier attempts have left: W&B has it, or this journal."""
        run, run_id, offline = self._run, self.place.run_id, left.offline
        if artifacts := [one for one in left.artifacts() if one.is_whole]:
            names = ", ".join(one.name for one in artifacts)
            logger.warning("W&B: run %s: sends artifacts again that W&B may lack: %s", run_id, names)
            for one in artifacts:  # this run's journal has them then
                one.send(run)
        # Of what was saved online, W&B has all but the last seconds'. The files of rows went with them.
        saved = [one for one in left.saved_files(offline).items() if not one[0].startswith("media/")]
        lacking = [name for name, files in saved if not save_again(run, self._kind, files, name)]
        lost = [one for attempt in offline for one in attempt.artifacts() if not one.is_whole]
        self._sent = left
        if not self._journal.is_closed:
            left.clear()
        if lacking or lost:
            keep_artifacts(offline[-1].directory, left.place, lost)
            names = ", ".join([*lacking, *(f"artifact {one.name}" for one in lost)])
            text = "W&B: run %s: files that were logged offline are not on this disk any more. Log them again: %s"
            logger.warning(text, run_id, names)

    def keep_since(self, since: int) -> None:
        """Keep a step of the run that it has before the first of its numbered rows, also of those that are sent."""
        self._header["since"] = min(since, int(self._header["since"]))
        self._journal.describe(since=self._header["since"])

    def keep_role_step(self, step: Any) -> None:
        """Keep the step of a role's last row, even if its rows are mixed with those of earlier attempts."""
        self._role_step = int(step) if isinstance(step, (int, float)) and math.isfinite(step) else -1

    def add_writer(self) -> None:
        """Note that wandb-core logs rows of TensorBoard too: the steps of this process's rows are not known then."""
        self.next_step = None
        self._journal.describe(step=None)

    def put(self, row: bytes, step: int | None, commit: bool | None) -> None:
        """Keep a row, or a part of one, that wandb-core has got.

        Args:
            row: The row, as `record_of` takes it.
            step: The step that was given with it.
            commit: Whether it was said that the row is complete; None if nothing was said.
        """
        if self.next_step is not None and step is not None:
            if step < self.next_step:
                return  # wandb-core drops it
            self.next_step = step
        known_step = step if self.next_step is None else self.next_step
        self._journal.add(record_of(row, known_step, step is not None, self._role_step))
        self._unkept += self._journal.is_closed
        self._is_row_open = not (commit or (commit is None and step is None))
        if self.next_step is not None and not self._is_row_open:
            self.next_step += 1

    def end(self, exit_code: int) -> None:
        """Keep the status with which the run is ended now: it may not be sent in time."""
        self.keep_end(exit_code)

    def keep_end(self, exit_code: int) -> None:
        """Keep the status with which the run has ended, and of what is logged after that."""
        self._header = {**self._header, "exit_code": exit_code}
        self._journal.add(encode({"exit_code": exit_code}))

    def without_service(self) -> Any:
        """Return a copy of the run whose rows and artifacts come here only."""
        copy = vendor.without_service(self._run)
        self._keep_from(copy)
        return copy

    def _keep_from(self, run: Any) -> None:
        if not vendor.on_rows(run, self.put):  # `log_kept` does it
            vars(run)[_PLAIN] = self.put
        vendor.on_artifacts(run, self._put_artifact)

    def _put_artifact(self, data: bytes) -> None:
        self._journal.add(record_of_artifact(data))
        one = vendor.KeptArtifact.of(data)
        if one.is_whole and not self._journal.is_closed:
            self.kept_artifacts.add(one.name)

    @property
    def unkept_rows(self) -> int:
        """How many rows the journal lacks because of a full disk: what W&B has not got of them is lost."""
        return self._unkept

    def mark_forked(self) -> None:
        """Say in the directory that a forked child logs too: this process knows the steps of its rows no more."""
        if not self._journal.is_closed:
            with contextlib.suppress(OSError):
                touch_own(self.directory / _FORKED)

    def close(self) -> None:
        """Leave the journal to the next opening, or to `send`. What is logged from now on is in another one."""
        self._journal.close()
        self._begin()

    def clear(self) -> None:
        """Remove the journals: the run has ended, and the service has everything."""
        self.close()
        attempt_at(self.directory).clear()
        if self._sent is not None:
            self._sent.clear()


class OfflineOutbox(WandbOutbox):
    """The outbox of a run that is logged offline: its file has the rows, if it is written to its end."""

    def end(self, exit_code: int) -> None:
        """Log what the files of earlier attempts lack, so that `wandb sync` sends it, and keep the status."""
        if self.column is None:  # or else each directory is sent by itself
            with contextlib.suppress(OSError):  # they stay as they are
                self._log_missing()
        super().end(exit_code)

    def clear(self) -> None:
        """Remove the journals of a run that has ended, if its file has all rows and no next attempt is to send them."""
        self.close()
        if not self._is_whole():
            vendor.restart_service(_END_S)
            if not self._is_whole():
                self._warn_of_loss()
                return
        if not self._more["is_automatic"]:
            attempt_at(self.directory).remove_journals()

    def _log_missing(self) -> None:
        attempts = [attempt_at(path) for path in directories_of(self.directory.parent, self.place.run_id, _OFFLINE)]
        for number, attempt in enumerate(attempts):
            headers = [journal.header for journal in attempt.journals if "is_automatic" in journal.header]
            # On another machine, a process may have it open.
            is_left = headers and all(header["host"] == self._more["host"] for header in headers)
            if attempt.directory == self.directory or not is_left or headers[0]["is_automatic"] or attempt.is_open():
                continue
            if starting_step(attempt.directory, of_live=True) is not None:
                continue  # it sends them
            # Those of an attempt that was killed while it did this.
            known = set().union(*(later.times() for later in attempts[number + 1 :]))
            for row in attempt.missing():
                if row.time not in known:
                    step = self.next_step + 1 if self._is_row_open and self.next_step is not None else None
                    log_kept(self._kind.log, self._run, dict(attempt.with_columns(row)), step, True)
            attempt.remove_journals()

    def _is_whole(self) -> bool:
        """Whether the run's file has been written to its end."""
        until = time.monotonic() + _END_S
        while datastore.exit_code(self.directory) is None:
            if time.monotonic() > until or datastore.file_in(self.directory) is None:
                return False
            time.sleep(_POLL_S)
        return True

    def _warn_of_loss(self) -> None:
        """Say which rows of a run the disk has, whose file could not be written to its end."""
        steps = [row.step for row in chain(datastore.rows(self.directory), attempt_at(self.directory).missing())]
        logger.warning(
            "W&B: run %s was not written completely, as on a full disk. %s has %d rows, up to step %d. The run went on "
            "to step %s: what was logged after step %d is lost",
            self.place.run_id,
            self.directory,
            len(steps),
            max(steps, default=-1),
            "?" if self.next_step is None else self.next_step - 1,
            max(steps, default=-1),
        )


class NoOutbox(WandbOutbox):
    """The outbox of a run of which no attempt can send again what another one has logged. It keeps nothing."""

    def __init__(self) -> None:
        self._journal, self.kept_artifacts = Journal.closed(), set()
        self._header: dict[str, Any] = {}

    def without_service(self) -> Any:
        """Return nothing: what is logged after the run's end is lost."""
        return None

    def close(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


_none = NoOutbox()


def open_outbox(request: RunRequest, run: Any, is_automatic: bool = False, found: vendor.Stored | None = None) -> None:
    """Give a run that was just opened its outbox, and send what earlier attempts have left on this disk.

    If other processes open the run too, its rows have no steps, but numbers: `roles.send_left` sends them.

    Args:
        request: The decorator's request for the run.
        run: The run.
        is_automatic: Whether the next attempt that is online sends the rows of this one, which is offline.
        found: What W&B had of the run before it was opened.
    """
    has_others = request.has_other_writers
    keeps = run.offline or has_others or "resume_from" not in request.config.options
    if OUTBOX in vars(run) or not keeps or run.disabled:  # the first: another function has it open
        return
    more: dict[str, Any] = {}
    if has_others:
        since = 0 if found is None else found.last_step + 1
        more = {"column": column_of(request.plan.role), "label": label_of(request), "since": since}
    kind = OfflineOutbox if run.offline else WandbOutbox
    made = vars(run)[OUTBOX] = kind(
        run,
        run_directory(run),
        has_one_writer=not (has_others or vendor.syncs_tensorboard()),
        is_automatic=is_automatic,
        host=socket.gethostname(),
        step_metric=request.config.step_metric,
        restart_count=request.restart_count,
        **more,
    )
    if not run.offline and not has_others:
        send_earlier(made)


def send_earlier(made: WandbOutbox) -> None:
    """Log what earlier attempts have left: in a run with one writer, also what they have logged offline."""

    def is_to_send(attempt: AttemptOnDisk) -> bool:
        is_in_place = not is_offline(attempt.directory) or (made.next_step is not None and was_automatic(attempt))
        return bool(attempt.journals) and is_in_place

    parent = made.directory.parent
    try:
        left = Left(made.place, parent, is_to_send)
        if left.online:
            left.compare(vendor.stored_run(made.place))
        made.send(left)
    except Exception:  # tracker errors must not change the training's outcome
        text = "W&B: run %s: the rows that an earlier attempt has left in %s could not be sent"
        logger.warning(text, made.place.run_id, parent, exc_info=True)
        made.first_step = made.next_step or made.first_step


def of(run: Any) -> WandbOutbox:
    """Return the outbox of an open run."""
    found: WandbOutbox = vars(run).get(OUTBOX, _none)
    return found


def log_kept(log: Callable[..., Any], run: Any, data: Any, step: Any, commit: Any, **kwargs: Any) -> None:
    """Call `log` with a row, and keep its plain values if W&B's client does not show what it makes of it."""
    keep: vendor.KeepRow | None = vars(run).get(_PLAIN)
    if keep is not None and isinstance(data, Mapping):
        data = {"_timestamp": time.time(), **data}
    log(run, data, step, commit, **kwargs)
    if keep is not None:
        keep(plain(data), step, commit)


def plain(data: Mapping[str, Any]) -> bytes:
    """Return the plain values of a row, such as numbers and strings."""
    values = {}
    for key, value in data.items():
        number = value.item() if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0 else value
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(number)
            values[key] = number
    return encode(values)


def record_of_artifact(data: bytes) -> bytes:
    """Return a serialized artifact as a record of a journal."""
    return _ARTIFACT + b" " + b2a_base64(data, newline=False)


def keep_artifacts(directory: Path, place: Place, artifacts: Sequence[vendor.KeptArtifact]) -> None:
    """Keep artifacts that could not be sent in a directory, and that it has something which could not be sent."""
    journal = Journal(directory, f"artifacts-{secrets.token_hex(3)}", {"place": place, "step": 0})
    journal.add(encode({"is_incomplete": True}))
    for one in artifacts:
        journal.add(record_of_artifact(one.record.SerializeToString()))
    journal.close()


def record_of(row: bytes, step: int | None = None, is_placed: bool = False, role_step: int = -1) -> bytes:
    """Return a row as a record of a journal.

    Args:
        row: The row: a JSON object, or as W&B's client has serialized it, which takes a tenth of the time.
        step: Its step, if this process knows it.
        is_placed: Whether the function has given the step.
        role_step: The step of the role's last row.
    """
    text = row if row.startswith(b"{") else b2a_base64(row, newline=False)
    return b"%d %d %d %b" % (-1 if step is None else step, is_placed, role_step, text)


# A count that is late


def await_count(directory: Path, run_id: str, deadline: float) -> None:
    """Return when W&B counts all rows that attempts here have sent: 6 s after the last write.

    A run that is opened again continues at the count that W&B gives, and W&B counts 2 to 4 s late. Rows that are
    written at too low a count take the place of others: https://github.com/wandb/wandb/pull/12421

    Args:
        directory: The directory of all runs.
        run_id: The run's id.
        deadline: When to return in any case, in seconds of `time.monotonic`.
    """
    found = directories_of(directory, run_id)
    logs = (log for path in found for log in (path.joinpath(*LOG), *path.glob(SENDERS_LOG)))
    time.sleep(max(0.0, min(late_s(logs), deadline - time.monotonic())))


def late_s(logs: Iterable[Path]) -> float:
    """Return for how long W&B may still find rows late that it has got, in seconds. `logs` are those of wandb-cores."""
    return max(0.0, LATE_S - min(map(age_s, logs), default=LATE_S))


def age_s(path: Path) -> float:
    """Return how long ago a file was written, in seconds; for one that is not there, as long as counts matter.

    By its time, which a clock that is set, or another machine's, may have made one that is to come: that is now.
    """
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return LATE_S
