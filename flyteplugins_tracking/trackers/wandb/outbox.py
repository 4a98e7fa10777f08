"""The rows of W&B runs that the service may not have: kept in journals, and logged again by a later attempt.

wandb-core sends every 15 s, and SIGKILL of its process keeps it from sending the rest. So each process that logs into a
run keeps its rows in a journal in the run's directory, until the run has ended: then all have arrived.

What the service has of a run is a prefix. The step at which the next opening starts tells how long it is. That attempt
logs the rest again before the function's first row, with the steps and times that the rows had. A process that writes a
run alone knows the steps of its rows. If there are several, as in a shared run, wandb-core gives the steps, and the
run's file (`run-ID.wandb`) has them.

An offline run's file has all its rows, but for the last 0.1 s of an attempt that was killed. The next attempt here logs
these into its own file, or `send` logs them when it has sent the file. If a run is offline because W&B could not be
used, the next attempt that is online sends its rows, behind those that the run has. Rows that are moved so keep their
own step in a column, as after a rollback.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import (
    is_own_directory,
    is_own_file,
    open_own,
    own_file_in,
    own_text,
    replace_whole,
    touch_own,
)
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT, restart_count_of
from flyteplugins_tracking.trackers.journal import Journal, StoredJournal, encode, stored
from flyteplugins_tracking.trackers.wandb import datastore, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Row

logger = logging.getLogger(__name__)

# The run's attributes that hold its `Outbox`, and what keeps plain rows: see `plain_rows`.
OUTBOX, _PLAIN = "_flyteplugins_tracking_outbox", "_flyteplugins_tracking_plain_rows"
_OFFLINE = "offline-"
# Files in a run's directory: how far its rows were moved when they were sent; and that its run was rewound later.
_MOVED, _REWOUND = "flyteplugins-tracking-moved-by.json", "rewound"
# That a forked child has logged too; and a text that is kept offline for the next attempt.
_FORKED, _STATE = "flyteplugins-tracking-forked", "flyteplugins-tracking-state"
# The most bytes of the latter.
_LONGEST_STATE = 1 << 20
# The steps that a shared run's file is read back for, so that each of its writers has a row among them.
_OVERLAP = 1000
# How long wandb-core may take to write the end of a run that it has ended.
_END_S, _POLL_S = 5.0, 0.01
# How long after the last acknowledged rows W&B's count of them may be wrong, and how often it is asked for.
_LATE_S, _ASK_S = 6.0, 0.5
# How much of wandb-core's log is read, from its end.
_LOG_BYTES = 65_536


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

    def is_same(self, other: Place) -> bool:
        """Whether it is the same run. Offline, the client does not know the user's default entity."""
        return self._replace(entity="") == other._replace(entity="") and self.entity in ("", other.entity)


# Attempts on this disk


@dataclass
class Attempt:
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
    def first_step(self) -> int | None:
        """The step from which on its rows are its own. None if it has not sent all of those of earlier attempts."""
        known = [journal.header.get("first_step") for journal in self.journals]
        return max((step for step in known if step is not None), default=None)

    @property
    def exit_code(self) -> int | None:
        """The status with which it has ended its run; None if it was killed before."""
        if not self.journals:
            return datastore.exit_code(self.directory)
        lines = chain.from_iterable(journal.segments()[-1].lines() for journal in self.journals)
        return next((line["exit_code"] for line in lines if "exit_code" in line), None)

    @property
    def moved_by(self) -> int | None:
        """How far its rows are moved at the service; None if nothing of an offline run was sent from here."""
        with contextlib.suppress(ValueError):  # damaged, or there is none
            return int(own_text(self.directory / _MOVED) or "")
        return None if is_offline(self.directory) else 0

    def move_to(self, step: int) -> None:
        """Have its first row get this step, unless it is a later one: for good, also if the row is sent again."""
        first = next(self._rows(0), None)
        if first is not None:
            self.move(max(0, step - first.step))

    def move(self, distance: int) -> None:
        """Move its rows by so many steps."""
        replace_whole(self.directory / _MOVED, str(distance))

    def rows(self, since: int = 0) -> Iterator[Row]:
        """Yield its rows from a step on, in their order and where they are at the service."""
        distance = self.moved_by or 0
        for row in self._rows(since - distance):
            if row.step >= since - distance:
                yield row._replace(step=row.step + distance, values=self.with_columns(row)) if distance else row

    def missing(self) -> list[Row]:
        """Return the rows that its file lacks, with their own steps."""
        last = datastore.last_step(self.directory)
        return [row for row in self._rows(last + 1) if row.step > last] if self.journals else []

    @property
    def step_metric(self) -> str | None:
        """The column for the steps of rows that are moved."""
        return self.journals[0].header.get("step_metric") if self.journals else None

    def with_columns(self, row: Row) -> Mapping[str, Any]:
        """Return the values of a row that gets another step: with its own one in a column, if that was given."""
        if not row.is_placed or self.step_metric is None:
            return row.values
        return {self.step_metric: row.step, RESTART_COUNT: self.journals[0].header[RESTART_COUNT], **row.values}

    def _rows(self, since: int) -> Iterator[Row]:
        if not self.journals:
            return datastore.rows(self.directory, since)
        if all(one.header["step"] is not None for one in self.journals) and not is_own_file(self.directory / _FORKED):
            in_order = sorted(self.journals, key=lambda journal: int(journal.header["step"]))
            return chain.from_iterable(_rows_of(journal, since) for journal in in_order)
        return self._rows_of_writers(since)

    def _rows_of_writers(self, since: int) -> Iterator[Row]:
        """Yield the rows of several writers from a step on: those of the file, then what it lacks, by time."""
        in_file, is_all = datastore.tail(self.directory, since - _OVERLAP)
        yield from (row for row in in_file if row.step >= since)
        times = {row.time for row in in_file}
        begin = -math.inf if is_all or not in_file else in_file[0].time
        rest: list[Row] = []
        for journal in self.journals:
            rows = list(_rows_of(journal, 0))
            last = max((n for n, row in enumerate(rows) if row.time in times or row.time < begin), default=-1)
            rest += rows[last + 1 :]
        step = in_file[-1].step + 1 if in_file else self.first_step or 0
        yield from (row._replace(step=step + n) for n, row in enumerate(sorted(rest, key=lambda row: row.time)))

    def clear(self) -> None:
        """Remove what is to be sent: the service has everything."""
        self.remove_journals()
        file = datastore.file_in(self.directory)
        if is_offline(self.directory) and file is not None:
            touch_own(Path(f"{file}.synced"))  # for `wandb sync`, which would send it again

    def remove_journals(self) -> None:
        """Remove the journals: their rows are elsewhere too."""
        for journal in self.journals:
            journal.remove()


def _rows_of(journal: StoredJournal, since: int) -> Iterator[Row]:
    """Put the rows of a journal together from their parts. Files of which the service has all rows are left out."""
    segments = journal.segments()
    while len(segments) > 1 and (step := segments[1].header["step"]) is not None and step < since:
        segments.pop(0)
    row: Row | None = None
    for entry in chain.from_iterable(segment.pending() for segment in segments):
        head, _, data = entry.data.partition(b"\n")
        if not data:  # the run's end
            continue
        step, is_placed = map(int, head.split())
        values = json.loads(data) if data.startswith(b"{") else vendor.parse_row(data)
        if row is not None and (step < 0 or step != row.step):
            yield row
            row = None
        row = Row(step, values if row is None else {**row.values, **values}, journal.paths[0].parent, bool(is_placed))
    if row is not None:
        yield row


def attempt_at(directory: Path, place: Place | None = None) -> Attempt:
    """Return what is in a directory, of this run if one is given."""
    journals = stored(directory)
    if place is not None:
        journals = [journal for journal in journals if Place(*journal.header["place"]).is_same(place)]
    return Attempt(directory, journals)


def pending(place: Place, parent: Path, since: int) -> list[Attempt]:
    """Return the attempts that were online and have rows that the service may lack, in the order of their start.

    An attempt has first sent what those before it had left. If the service has rows of its own, it has all of that.
    """
    attempts: list[Attempt] = []
    is_covered = False
    for directory in reversed(directories_of(parent, place.run_id, "run-")):
        attempt = attempt_at(directory, place)
        if not attempt.journals or attempt.is_open():
            continue
        if is_covered:
            attempt.clear()
            continue
        attempts.append(attempt)
        first_step = attempt.first_step
        is_covered = first_step is not None and first_step <= since
    return attempts[::-1]


def _automatic(place: Place, parent: Path) -> Iterator[Attempt]:
    """Yield the attempts of a run that were offline because W&B could not be used."""
    for directory in directories_of(parent, place.run_id, _OFFLINE):
        attempt = attempt_at(directory, place)
        is_sent = attempt.moved_by is None and is_synced(directory)
        if any(one.header.get("is_automatic") for one in attempt.journals) and not is_sent and not attempt.is_open():
            yield attempt


def directories_of(parent: Path, run_id: str, prefix: str = "") -> list[Path]:
    """Return this user's directories of a run, in the order of their start.

    Another user may have made one, where others can write: its rows and files are not sent.
    """
    found = parent.glob(f"{prefix or '*run-'}*-{glob.escape(run_id)}*")
    return sorted(path for path in found if is_own_directory(path) and _run_id_of(path) == run_id)


def _run_id_of(directory: Path) -> str:
    """Return the id of a directory's run. The directory's own name may have a suffix, and its file's has none."""
    file = datastore.file_in(directory)
    return file.stem.removeprefix("run-") if file is not None else directory.name.partition("run-")[2].partition("-")[2]


def is_offline(directory: Path) -> bool:
    """Whether this is the directory of a run that was logged offline."""
    return directory.resolve().name.startswith(_OFFLINE)


def is_any_left(parent: Path, run_id: str) -> bool:
    """Whether an attempt of this run has left a journal below the directory of all runs."""
    return any(stored(directory) for directory in directories_of(parent, run_id))


def run_directory(run: Any) -> Path:
    """The directory of the run's `.wandb` file."""
    return Path(str(run.dir)).parent


def is_synced(directory: Path) -> bool:
    """Whether `wandb sync` has sent the file of this directory."""
    return any(map(is_own_file, directory.glob("*.synced")))


def mark_rewound(run: Any) -> None:
    """Note in the directories of earlier attempts that W&B has dropped rows of theirs, which must not be sent again."""
    own = run_directory(run)
    for directory in directories_of(own.parent, run.id):
        if directory != own:
            with contextlib.suppress(OSError):  # which the training must not end for
                touch_own(directory / _REWOUND)


def is_rewound(directory: Path) -> bool:
    """Whether W&B has dropped rows of a run's directory since they were sent."""
    return is_own_file(directory / _REWOUND)


# Logging again


def rows_of(attempts: Iterable[Attempt], since: int) -> Iterator[Row]:
    """Yield the rows of attempts from a step on, in the order of their steps."""
    return heapq.merge(*(attempt.rows(since) for attempt in attempts), key=lambda row: row.step)


def log_again(run: Any, kind: Any, rows: Iterable[Row], step_metric: str | None) -> Iterator[Row]:
    """Log rows that attempts have left, each with its step and time.

    Args:
        run: An open run.
        kind: Its class, whose methods log at any time.
        rows: The rows.
        step_metric: The column for steps, which rows have that were moved.
    """
    is_defined = False
    for row in rows:
        if not is_defined and RESTART_COUNT in row.values and step_metric in row.values:
            is_defined = bool(kind.define_metric(run, "*", step_metric=step_metric))
        for value in row.values.values():
            if isinstance(value, (dict, list)):
                _save_media(run, kind, row.directory / "files", value)
        kind.log(run, dict(row.values), step=row.step, commit=True)
        yield row


def _save_media(run: Any, kind: Any, files: Path, value: Any) -> None:
    """Have the files of a value, such as an image, be uploaded with this run."""
    if isinstance(value, str):
        source = own_file_in(files, value) if value.startswith("media/") else None
        if source is not None and not source.is_symlink():  # the client has copied it there
            kind.save(run, glob.escape(str(source)), base_path=str(files), policy="now")
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            _save_media(run, kind, files, part)


# The open run


class Outbox:
    """What an open run has logged and W&B may lack: its journal, and the attempts whose rows were sent with it.

    Attributes:
        first_step: The step of the first row that is not an earlier attempt's; None if it is not known.
        next_step: The step of the next row; None if other processes log into the run too.
    """

    first_step: int | None = None
    next_step: int | None = None

    def __init__(self, run: Any, has_one_writer: bool, **more: Any) -> None:
        """Send and keep nothing yet: see `send_earlier`.

        Args:
            run: The open run, before its methods are guarded.
            has_one_writer: Whether no other process logs into the run.
            more: What else the readers of the journal need: values of JSON.
        """
        self.directory, self.place = run_directory(run), Place.of(run)
        self._run, self._kind = run, type(run)
        self._has_one_writer, self._more = has_one_writer, more
        self._earlier: list[Attempt] = []
        self._journal: Journal | None = None
        self._sending = self._begin()

    @property
    def is_kept(self) -> bool:
        """Whether there is a journal."""
        return self._journal is not None

    def send_earlier(self, deadline: float = math.inf) -> bool:
        """Send what earlier attempts have left. The run must not get rows until that is done.

        Args:
            deadline: When to return, in seconds of `time.monotonic`. The next call continues.

        Returns:
            Whether it is done.
        """
        return all(time.monotonic() < deadline for _ in self._sending)

    def for_guests(self) -> dict[str, Any]:
        """Return the values with which a rank that logs into this run keeps a journal beside this one."""
        return {"place": self.place, "directory": str(self.directory)}

    def put(self, row: bytes, step: int | None, commit: bool | None) -> None:
        """Keep a row, or a part of one, that wandb-core has got.

        Args:
            row: The row, as `record_of` takes it.
            step: The step that was given with it.
            commit: Whether it was said that the row is complete; None if nothing was said.
        """
        assert self._journal is not None
        if self.next_step is not None and step is not None:
            if step < self.next_step:
                return  # wandb-core drops it
            self.next_step = step
        self._journal.header["step"] = self.next_step
        self._journal.add(record_of(row, self.next_step, step is not None))
        if self.next_step is not None and (commit or (commit is None and step is None)):
            self.next_step += 1

    def end(self, exit_code: int) -> None:
        """Keep the status with which the run is ended now: it may not be sent in time."""
        if self._journal is not None:
            self._journal.add(encode({"exit_code": exit_code}))

    def note_child(self) -> None:
        """Note that a forked child logs into the run: this process does not know the steps of its own rows anymore."""
        if self.is_kept:
            with contextlib.suppress(OSError):
                touch_own(self.directory / _FORKED)

    def close(self) -> None:
        """Leave the journal to the next opening, or to `send`: the run's wandb-core has died."""
        if self._journal is not None:
            self._journal.close()

    def clear(self) -> None:
        """Remove the journals: the run has ended, and the service has everything."""
        self.close()
        for attempt in (attempt_at(self.directory), *self._earlier):
            attempt.clear()

    def _begin(self) -> Iterator[object]:
        """Send what earlier attempts have left, then keep a journal."""
        step, is_complete = int(self._run.starting_step), False
        try:
            for row in self._send(step):
                step = row.step + 1
                yield row
            is_complete = True
        except Exception:  # tracker errors must not change the training's outcome
            logger.warning(
                "W&B: run %s: the rows that an earlier attempt has left in %s could not be sent",
                self.place.run_id,
                self.directory.parent,
                exc_info=True,
            )
        self._keep(step, step if is_complete else None)

    def _send(self, since: int) -> Iterator[Row]:
        first, count, step, directories = since, 0, since, set()
        for row in log_again(self._run, self._kind, self._left(since), self._more["step_metric"]):
            first, count, step = first if count else row.step, count + 1, row.step + 1
            directories.add(str(row.directory))
            yield row
        if count:
            logger.warning(
                "W&B: run %s: sent %d rows (steps %d to %d) that earlier attempts had logged and W&B had not received, "
                "from %s",
                self.place.run_id,
                count,
                first,
                step - 1,
                ", ".join(sorted(directories)),
            )

    def _left(self, since: int) -> Iterator[Row]:
        """Yield the rows of earlier attempts that W&B lacks."""
        parent, step = self.directory.parent, since
        automatic = list(_automatic(self.place, parent)) if self._has_one_writer else []
        placed = [*pending(self.place, parent, since), *(one for one in automatic if one.moved_by is not None)]
        self._earlier = [*placed, *(one for one in automatic if one.moved_by is None)]
        for row in rows_of(placed, since):
            step = row.step + 1
            yield row
        for attempt in self._earlier[len(placed) :]:
            attempt.move_to(step)
            for row in attempt.rows(since):
                step = row.step + 1
                yield row

    def _keep(self, step: int, first_step: int | None) -> None:
        self.first_step, self.next_step = step, step if self._has_one_writer else None
        header = {"place": self.place, "step": self.next_step, "first_step": first_step, **self._more}
        self._journal = Journal(self.directory, f"owner-{secrets.token_hex(3)}", header)
        keep_rows(self._run, self.put)


class OfflineOutbox(Outbox):
    """The outbox of a run that is logged offline: its file has the rows, if it is written to its end."""

    def send_earlier(self, deadline: float = math.inf) -> bool:  # noqa: ARG002 of the online ones
        self._keep(0, 0)
        return True

    def end(self, exit_code: int) -> None:
        """Log what the files of earlier attempts lack, so that `wandb sync` sends it, and keep the status."""
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
            # Those of an attempt that was killed while it did this.
            known = {row.time for later in attempts[number + 1 :] for row in later.rows() if later.journals}
            for row in attempt.missing():
                if row.time not in known:
                    self._kind.log(self._run, dict(attempt.with_columns(row)), commit=True)
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


class NoOutbox(Outbox):
    """The outbox of a run of which no attempt can send again what another one has logged. It keeps nothing."""

    def __init__(self) -> None:
        self._journal, self._earlier, self._sending = None, [], iter(())

    def for_guests(self) -> dict[str, Any]:
        """Have them keep nothing either."""
        return {"place": None, "directory": None}

    def clear(self) -> None:
        """Do nothing."""


def open_outbox(run: Any, request: RunRequest, *, sends: bool, has_one_writer: bool, is_automatic: bool) -> None:
    """Give a run that was just opened its outbox.

    Args:
        run: The run.
        request: The decorator's request for it.
        sends: Whether rows can be sent again.
        has_one_writer: See `Outbox`.
        is_automatic: Whether the next attempt that is online sends the rows of this one, which is offline.
    """
    if OUTBOX in vars(run):  # another function has it open
        return
    if not sends or run.disabled:
        return
    vars(run)[OUTBOX] = (OfflineOutbox if run.offline else Outbox)(
        run,
        has_one_writer,
        is_automatic=is_automatic,
        host=socket.gethostname(),
        step_metric=request.config.step_metric,
        restart_count=restart_count_of(request),
    )


def of(run: Any) -> Outbox:
    """Return the outbox of an open run."""
    found: Outbox | None = vars(run).get(OUTBOX)
    return NoOutbox() if found is None else found


# What an attempt leaves to the next one on this disk: W&B's client does not read its files


def save_state(run: Any, text: str) -> None:
    """Keep a text in the run's directory."""
    with contextlib.suppress(OSError):
        replace_whole(run_directory(run) / _STATE, text)


def saved_states(run: Any) -> list[str]:
    """Return the texts that earlier attempts on this disk have kept."""
    own = run_directory(run)
    earlier = [path for path in directories_of(own.parent, run.id) if path != own]
    return [text for path in earlier if (text := own_text(path / _STATE, _LONGEST_STATE)) is not None]


def guest_journal(directory: str, place: Sequence[str], rank: int) -> Journal:
    """Return a journal for a rank that logs into the run of another process, in that one's directory."""
    return Journal(Path(directory), f"guest-{rank}-{secrets.token_hex(3)}", {"place": place, "step": None})


def keep_rows(run: Any, keep: vendor.KeepRow, is_only: bool = False) -> bool:
    """Call `keep` with each row: see `vendor.on_rows`. Returns False if who logs has to use `plain_rows`."""
    is_done = vendor.on_rows(run, keep, is_only)
    if not is_done:
        vars(run)[_PLAIN] = keep
    return is_done


def plain_rows(run: Any) -> vendor.KeepRow | None:
    """Return what keeps the rows of a run, made by `plain`, if W&B's client does not show its own."""
    keep: vendor.KeepRow | None = vars(run).get(_PLAIN)
    return keep


def plain(data: Mapping[str, Any]) -> bytes:
    """Return the plain values of a row, such as numbers and texts."""
    values = {}
    for key, value in data.items():
        number = value.item() if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0 else value
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(number)
            values[key] = number
    return encode(values)


def record_of(row: bytes, step: int | None = None, is_placed: bool = False) -> bytes:
    """Return a row as a record of a journal.

    Args:
        row: The row: a JSON object, or as W&B's client has serialized it, which takes a tenth of the time.
        step: Its step, if this process knows it.
        is_placed: Whether the function has given the step.
    """
    return b"%d %d\n%b" % (-1 if step is None else step, is_placed, row)


# A count that is late


def await_count(directory: Path, run_id: str, counts: Callable[[], tuple[int, int] | None], deadline: float) -> None:
    """Return when W&B counts all rows that it has acknowledged, in the last seconds, to attempts of a run.

    A run that is opened again continues at the count that W&B gives, and W&B counts 2 to 4 s late. Rows that are
    written at too low a count take the place of others: https://github.com/wandb/wandb/pull/12421

    Args:
        directory: The directory of all runs.
        run_id: The run's id.
        counts: Asks W&B for the number of rows and the last step; None if it does not say.
        deadline: When to return in any case, in seconds of `time.monotonic`.
    """
    found = [path / "logs" / "debug-internal.log" for path in directories_of(directory, run_id)]
    logs = [path for path in found if _age_s(path) < _LATE_S]
    lines = max((acknowledged_lines(log) for log in logs), default=0)
    while lines and not _is_right(counts(), lines):
        if min(map(_age_s, logs)) > _LATE_S or time.monotonic() + _ASK_S > deadline:
            return
        time.sleep(_ASK_S)


def acknowledged_lines(log: Path) -> int:
    """Return how many rows of the run W&B has, as wandb-core has logged; 0 if it has sent none.

    A request that was not answered before the kill counts: W&B may have it.
    """
    lines, sent = 0, None
    with contextlib.suppress(OSError), open(open_own(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        for text in file.read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(text)
                if entry["msg"] == "filestream: sending request":
                    sent = entry["history_offset"] + entry["history_lines"] if "history_offset" in entry else None
                elif entry["msg"] == "filestream: request sent":
                    lines, sent = sent if sent is not None and entry["status"].startswith("200") else lines, None
    return lines if sent is None else sent


def _is_right(counts: tuple[int, int] | None, lines: int) -> bool:
    """Whether W&B counts all rows, and its last step is not an earlier row's: steps rise by 1 at least."""
    return counts is not None and counts[0] >= lines and counts[1] + 1 >= counts[0]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return _LATE_S
