"""What is on this disk of a W&B run: a directory for each attempt of each writer.

A directory has W&B's own file, `run-ID.wandb`, and a journal of ours for each process. The journal is made when the run
is opened, its header says what the directory is, and it stays until W&B has everything.

Rows come from W&B's file first, as wandb-core has made them: with the columns that `define_metric` adds, and the rows
of TensorBoard and of forked children. Behind these, the rows come that only a journal has: of a kill's last moment, and
those that wandb-core has not got.

How a directory lies in its run, two numbers tell. If one process writes the run, that is the run's step of its step 0:
0 for an attempt that was online, and what `run-ID.wandb.syncstate` says for one that was offline, as `wandb sync` has
it. If several do, a column has the numbers of its rows: see `roles`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import math
import re
import socket
import time
from binascii import a2b_base64
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import age_s, is_own_directory, is_own_file, own_text, replace_whole, touch_own
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.client import RESTART_COUNT
from flyteplugins_tracking.trackers.journal import StoredJournal, encode, stored
from flyteplugins_tracking.trackers.wandb import datastore, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Mark, Row

_OFFLINE = "offline-"
# What an artifact's record in a journal begins with, and one of JSON. That of a row begins with numbers.
ARTIFACT, _JSON, RECORD = b"artifact", b"{", b"record"
# The records of W&B's client that set something in a run, which a journal has too.
SETTING = ("config", "summary", "metric", "run", "files")
# Those of W&B's file of which W&B keeps the last one; and what is read too of what is before the first row that is.
REPLACING = ("config", "metric", "environment")
_LASTING = ("run", *REPLACING)
# How long after the last rows were sent W&B's count of them may be wrong.
LATE_S = 6.0
# How long ago W&B's client has written a file that it still writes, in seconds: it does so every 15 s.
_WRITTEN_S = 30.0
# How often a file that grows is read on before its journal is.
_LOOKS = 10
# What `wandb sync` keeps beside a file, and its most bytes.
_STATE, _LONGEST_STATE = ".syncstate", 4096
# What marks a file as sent for `wandb sync`. It has the size that was sent; that of `wandb sync` itself is empty.
_SYNCED = ".synced"
# Where wandb-core's log is in a run's directory. Its time tells when wandb-core has sent something last.
_LOG = "logs/debug-internal.log"
# The directories of W&B's client that sends what is there, and its logs: see `sender`.
SENDERS = "sender-*"


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


class Kept(NamedTuple):
    """What journals have beside rows.

    Attributes:
        settings: The kind, content and bytes of each record that sets something in the run. The last one is the
            summary: its content is a list of items.
        artifacts: Artifacts, serialized.
        exit_codes: The statuses with which the run was ended.
        has_late_settings: Whether something was set in the run behind its end.
    """

    settings: list[tuple[str, Any, bytes]]
    artifacts: list[bytes]
    exit_codes: list[int]
    has_late_settings: bool


@dataclass
class Attempt:
    """What an attempt of one writer has left in its directory: the journals of its process, and the run's file."""

    directory: Path
    journals: Sequence[StoredJournal]

    @classmethod
    def at(cls, directory: Path, place: Place | None = None) -> Attempt:
        """Return what is in a directory, of this run if one is given."""
        journals = [journal for journal in stored(directory) if _is_place(journal.header.get("place"))]
        if place is not None:
            journals = [journal for journal in journals if Place(*journal.header["place"]).is_same(place)]
        return cls(directory, journals)

    def header(self, name: str) -> Any:
        """Return what its process has said with this name; None for nothing."""
        return next((one.header[name] for one in self.journals if one.header.get(name) is not None), None)

    def is_open(self) -> bool:
        """Whether a process has the run open."""
        return any(journal.is_open() for journal in self.journals)

    def may_be_written(self) -> bool:
        """Whether W&B's client alone, which keeps no journal, may still log to it: what it logs later would be lost."""
        file = datastore.file_in(self.directory)
        return file is not None and not self.journals and age_s(file) < _WRITTEN_S and self.exit_code is None

    # What it is

    @property
    def is_offline(self) -> bool:
        """Whether W&B's client has logged it offline."""
        return is_offline(self.directory)

    @property
    def was_automatic(self) -> bool:
        """Whether it was offline because W&B could not be used, and its file is not sent."""
        return bool(self.header("is_automatic")) and not is_synced(self.directory)

    @functools.cached_property
    def column(self) -> str | None:
        """The column with the numbers of its rows; None if they have steps."""
        known: str | None = self.header("column")
        if known is None and (first := datastore.head_of(self.directory).first) is not None:
            known = next((key for key in first.columns if key.startswith("roles/") and key.endswith("/row")), None)
        return known

    @property
    def is_incomplete(self) -> bool:
        """Whether W&B has all but files that could not be sent: see `sender.Files.keep_lacking`."""
        return bool(self.journals) and all(one.header.get("is_incomplete") for one in self.journals)

    @property
    def exit_code(self) -> int | None:
        """The status with which it has ended its run; None if it was killed before."""
        codes = self.kept.exit_codes
        # The second: a copy may have a journal that its process has removed, cut off.
        return int(codes[0]) if codes else datastore.exit_code_of(self.directory)

    @property
    def base(self) -> int | None:
        """The run's step of its step 0; None if nothing of it was sent."""
        if not self.is_offline:
            return 0
        for path in self.directory.glob(f"*{_STATE}"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                return int(json.loads(own_text(path, _LONGEST_STATE) or "")["starting_step"])
        return None

    def keep_base(self, step: int) -> int:
        """Keep this base before the first row is sent: whoever sends again gives the rows the same steps."""
        if self.is_offline and (file := datastore.file_in(self.directory)) is not None:
            replace_whole(Path(f"{file}{_STATE}"), encode({"starting_step": step, "sent_by": socket.gethostname()}))
        return step

    def placed(self, row: Row, base: int) -> Row:
        """Return a row at its step in the run. If that is not its own, which was given, a column has its own one."""
        metric = self.header("step_metric")
        if not base or metric is None or not self._is_placed:
            return row._replace(step=row.step + base)
        own = {metric: row.step, RESTART_COUNT: self.header(RESTART_COUNT)}
        new = [vendor.item_of(key, value) for key, value in own.items() if key not in row.columns]
        return Row(row.step + base, row.time, [*new, *row.items], row.columns | own.keys())

    @functools.cached_property
    def _is_placed(self) -> bool:
        """Whether its function gives steps: W&B's file does not tell."""
        return any(row.is_placed for row in islice(self._kept(0), 1))

    # What it has

    @functools.cached_property
    def saved(self) -> tuple[list[str], list[bytes]]:
        """The names of the files and the artifacts that W&B's file has."""
        return datastore.saved_in(self.directory)

    @functools.cached_property
    def kept(self) -> Kept:
        """What its journals have beside rows."""
        settings, artifacts, exit_codes = list[tuple[str, Any, bytes]](), list[bytes](), list[int]()
        summary = dict[tuple[str, ...], Any]()
        has_late = False
        for one in self.journals:
            exit_codes += [one.header["exit_code"]] if "exit_code" in one.header else []
            for entry in one.entries():
                head, _, text = entry.data.partition(b" ")
                if head.startswith(_JSON):
                    exit_codes.append(json.loads(entry.data)["exit_code"])
                elif head == ARTIFACT:
                    artifacts.append(a2b_base64(text))
                elif head == RECORD:
                    has_late = has_late or bool(exit_codes)
                    kind, record = vendor.parse_record(data := a2b_base64(text))
                    if kind == "run":  # has the config as it was then: what is changed in it has records of its own
                        record.ClearField("config")
                    if kind == "summary":
                        change_summary(summary, record)
                    else:
                        settings.append((kind, record, data))
        return Kept([*settings, ("summary", list(summary.values()), b"")], artifacts, exit_codes, has_late)

    @property
    def first(self) -> Row | None:
        """Its first row; None if it has none."""
        return datastore.head_of(self.directory).first or next(self._kept(0), None)

    def rows(self, since: int = 0) -> Iterator[Row]:
        """Yield its rows, in their order, from one before the step `since` on."""
        return (row for kind, row, _ in Reading(self, since).records() if kind == "history")

    def last_rows(self, below: float = math.inf) -> list[Mark]:
        """Return the last rows below a step: of those that only a journal has, the last one alone."""
        in_file = datastore.last_rows(self.directory)
        if in_file and in_file[-1].step >= below:
            return datastore.last_rows(self.directory, below)
        kept = deque(takewhile(lambda row: row.step < below, self.kept_rows()), 1)
        return [*in_file, *(Mark(row.step, row.time, 0) for row in kept)]

    @functools.cached_property
    def last_at(self) -> float:
        """When it has logged its last row, in seconds since the epoch; if it has none, when it was begun."""
        return max((row.time for row in self.last_rows()), default=start_of(self.directory)[0])

    def kept_rows(self, since: int = 0) -> Iterator[Row]:
        """Yield the rows that only journals have, behind the last one that the file has.

        That row tells which these are, if the process knows the steps of its rows. If others log too, such as forked
        children and TensorBoard, or if the rows have numbers, the times of the file's rows tell.
        """
        in_file = datastore.last_rows(self.directory)
        if not in_file:
            return self._kept(since)
        last = in_file[-1]
        steps = [step for one in self.journals if (step := one.header.get("step")) is not None]
        if len(steps) == len(self.journals):
            if last.step < min(steps, default=0):  # behind the end of the run: what was before it has arrived
                return self._kept(0)
            kept = self._kept(last.step)
            if (same := next(kept, None)) is not None and (same.step, same.time) == last[:2]:
                return kept
        rows, known = list(self._kept(0)), datastore.marks_in(datastore.file_in(self.directory))
        new = rows[behind([row.time for row in rows], (mark.time for mark in known)) :]
        return (row._replace(step=last.step + 1 + place) for place, row in enumerate(new))

    def _kept(self, since: int) -> Iterator[Row]:
        return chain.from_iterable(rows_of(journal, since) for journal in self.journals)

    def artifacts(self) -> Iterator[vendor.KeptArtifact]:
        """Yield the artifacts that it has logged, and W&B may lack."""
        in_file = self.saved[1] if is_unsent(self.directory) else ()
        yield from map(vendor.KeptArtifact.of, chain(self.kept.artifacts, in_file))

    def saved_files(self) -> dict[str, Path]:
        """Return where the files are that it has saved, by their names: also those of rows, such as images."""
        has_unsent = self.journals or is_unsent(self.directory)
        in_journals = (item.path for kind, record, _ in self.kept.settings if kind == "files" for item in record.files)
        return {name: self.directory / "files" for name in (*self.saved[0], *in_journals) if has_unsent}

    def mark_sent(self, size: int | None = None) -> None:
        """Note that W&B has everything. `size` is that of the file when it was read, if it may have grown since."""
        for journal in self.journals:
            journal.remove()
        if self.is_offline:
            mark_synced(self.directory, size)
        datastore.forget(self.directory)


class Reading:
    """Reads an attempt once, as it is written.

    Attributes:
        attempt: The attempt.
    """

    def __init__(self, attempt: Attempt, since: int = 0, *, is_whole: bool = False) -> None:
        """Begin at its first row, or at one before the step `since`.

        Args:
            attempt: The attempt.
            since: The step.
            is_whole: Whether what was set before that row is read too, as the config.
        """
        self.attempt, self._since, self._file = attempt, since, datastore.file_in(attempt.directory)
        self._kept = 0  # how many rows were read that only a journal has
        before = datastore.last_rows(attempt.directory, since) if since > 0 else []
        self._begin = before[-1].position if before else 0
        self._position = 0 if is_whole else self._begin

    def records(self, *, is_written: bool = False) -> Iterator[tuple[str, Any, bytes]]:
        """Yield the kind, the content and the bytes of each new record. A row has the kind "history".

        Args:
            is_written: Whether a process may still write: then the rows that only a journal has come later.
        """
        kept: Iterator[Row] | None = None
        for _ in range(_LOOKS):
            position = self._position
            new = datastore.records_from(self._file, position, is_written=is_written)
            for self._position, data in new:
                kind, record = vendor.parse_record(data)
                if self._position > self._begin or kind in _LASTING:
                    yield kind, datastore.row_of(record) if kind == "history" else record, data
            if is_written:
                return
            if kept is not None and self._position == position:
                break  # otherwise wandb-core, which may outlive its process, has written meanwhile
            kept = self.attempt.kept_rows(self._since)
        for row in islice(kept or (), self._kept, None):
            self._kept += 1
            yield "history", row, b""


def change_summary(summary: dict[tuple[str, ...], Any], record: Any) -> None:
    """Change a summary, whose items have paths, as a record says."""
    for item in record.remove:
        gone = tuple(item.nested_key) or (item.key,)
        for path in [path for path in summary if path[: len(gone)] == gone]:
            del summary[path]
    summary.update({tuple(item.nested_key) or (item.key,): item for item in record.update})


def behind(keys: Sequence[float], known: Iterable[float]) -> int:
    """Return how many of a process's rows have arrived: all up to the last one that has, as they keep their order.

    Several may have one time.
    """
    left, count = Counter(known), 0
    for place, key in enumerate(keys, 1):
        if left[key] > 0:
            left[key] -= 1
            count = place
    return count


# Records of journals


def rows_of(journal: StoredJournal, since: int) -> Iterator[Row]:
    """Put the rows of a journal together from their parts. Rows with steps that the service has are left out."""
    row: Row | None = None
    for entry in journal.entries():
        if entry.data.startswith((_JSON, ARTIFACT, RECORD)):
            continue
        step_text, is_placed, data = entry.data.split(b" ", 2)
        if 0 <= (step := int(step_text)) < since:
            continue
        part = datastore.row_of(vendor.parse_row(a2b_base64(data)))._replace(step=step, is_placed=is_placed == b"1")
        if row is not None and (step < 0 or step != row.step):
            yield row
            row = None
        if row is not None:
            items = {(*item.nested_key, item.key): item for item in chain(row.items, part.items)}
            part = part._replace(items=list(items.values()), columns=row.columns | part.columns)
        row = part
    if row is not None:
        yield row


# Directories


def attempts_of(parent: Path, place: Place) -> list[Attempt]:
    """Return this user's attempts of a run, in the order of their start."""
    return [Attempt.at(path, place) for path in directories_of(parent, place.run_id)]


def directories_of(parent: Path, run_id: str) -> list[Path]:
    """Return this user's directories of runs with an id, in the order of their start.

    Another user may have made one, where others can write: its rows and files are not sent.
    """
    found = parent.glob(f"*run-*-{glob.escape(run_id)}*")
    return sorted((path for path in found if is_own_directory(path) and run_id_of(path) == run_id), key=start_of)


def start_of(directory: Path) -> tuple[float, str]:
    """Return what sorts directories by their start. Their names have local times, which may be of several zones."""
    with contextlib.suppress(TrackerUnavailableError):  # it is damaged, or another user's
        if (described := datastore.description(directory)) is not None:
            return described.start_time.ToMicroseconds() / 1e6, directory.name
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
    place = Attempt.at(directory).header("place")
    return "" if place is None else Place(*place).project


def label_in(directory: Path) -> str:
    """Return the name of a writer that does not end the run: of a role, or another rank than the primary. Or else "".

    It is the suffix that `open._adapt_to_part` has W&B's client give the directory. The client's own is a number: of a
    directory whose name was taken, since the run was opened twice in a second.
    """
    behind_time = directory.name.partition("run-")[2].partition("-")[2]  # an id may be "run"
    suffix = behind_time.removeprefix(run_id_of(directory)).removeprefix("-")
    return "" if suffix.isdecimal() else suffix


def is_rank(directory: Path) -> bool:
    """Whether a directory's writer is of the job that ends the run, and not a role."""
    label = label_in(directory)
    return not label or re.fullmatch(r"rank-\d+", label) is not None


def is_run_directory(directory: Path) -> bool:
    """Whether W&B's client has written this directory."""
    return any(directory.glob("*.wandb"))


def is_offline(directory: Path) -> bool:
    """Whether this is the directory of a run that was logged offline."""
    return directory.resolve().name.startswith(_OFFLINE)


def is_unsent(directory: Path) -> bool:
    """Whether W&B's client has logged this run offline, and its file was not sent."""
    return is_run_directory(directory) and is_offline(directory) and not is_synced(directory)


def in_order(directories: Iterable[Path]) -> list[Path]:
    """Return directories in the order in which they are sent: that of their start.

    Those that were online come first: their rows have their steps at W&B already. The other ranks follow the primary:
    rows behind its own are then those of a later attempt, whose end stays. Roles follow the owner, which makes the run.
    """

    def place_of(directory: Path) -> tuple[bool, bool, bool, tuple[float, str]]:
        return not is_rank(directory), bool(label_in(directory)), is_offline(directory), start_of(directory)

    return sorted(directories, key=place_of)


def is_synced(directory: Path) -> bool:
    """Whether the file of this directory was sent, by `wandb sync` or row by row, and has not grown since."""
    file, marks = datastore.file_in(directory), list(filter(is_own_file, directory.glob(f"*{_SYNCED}")))
    return bool(marks) and not any(
        # `wandb sync` marks a file also while a process writes it.
        file_size(directory) > int(size) if size.isdecimal() else file and file.stat().st_mtime > path.stat().st_mtime
        for path, size in ((path, own_text(path) or "") for path in marks)
    )


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


def _is_place(value: Any) -> bool:
    """Whether a value of JSON has the fields of a `Place`."""
    return isinstance(value, list) and len(value) == 4 and all(isinstance(one, str) for one in value)


# A count that is late


def await_count(directories: Iterable[Path], deadline: float) -> None:
    """Return when W&B counts all rows that attempts here have sent: 6 s after the last write.

    A run that is opened again continues at the count that W&B gives, and W&B counts 2 to 4 s late. Rows that are
    written at too low a count take the place of others: https://github.com/wandb/wandb/pull/12421

    Args:
        directories: Those of the run.
        deadline: When to return in any case, in seconds of `time.monotonic`.
    """
    logs = (log for path in directories for log in (path / _LOG, *path.glob(f"{SENDERS}/wandb/*/{_LOG}")))
    late_s = max(0.0, LATE_S - min(map(age_s, logs), default=LATE_S))
    time.sleep(max(0.0, min(late_s, deadline - time.monotonic())))
