"""Runs that are logged offline. Each has a journal until its file is known to have all its rows.

What only the journals of a killed attempt have is added to its file: by the next attempt on this machine at its end,
or before `send` sends the file. So W&B's own viewer and `wandb sync` find these rows too.

If a run is offline because W&B could not be used, the next attempt that is online sends its rows.

Offline, the steps of a run begin at 0. So the rows are moved behind those that the run has. The distance is written to
the attempt's directory before the first of its rows is sent: the next attempt after a kill moves them equally far.
Moved rows keep their own step in a column, as after a rollback, if the function logs with `step=`.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import replace_whole, touch_own
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT, restart_count_of
from flyteplugins_tracking.trackers.journal.files import Journal, StoredJournal, stored
from flyteplugins_tracking.trackers.wandb import datastore, tail, vendor

logger = logging.getLogger(__name__)

_PREFIX = "offline-"
# In the header of a journal: whether the next attempt that is online sends the rows, and the machine that wrote it.
_AUTOMATIC, _HOST = "is_automatic", "host"
# How long wandb-core may take to write the end of a run that it has ended.
_END_S, _POLL_S = 5.0, 0.01
# In the header of a journal: the column for steps of rows that are moved. The header has their restart count too.
_STEP_METRIC = "step_metric"
_DISTANCE = "flyteplugins-tracking-moved-by.json"
# How many windows of a file are read for its summary, from its end: some 5 MB.
_MOST_WINDOWS = 3


class OfflineJournal(tail.RunJournal):
    """The journal of a run that is logged offline."""

    def __init__(self, run: Any, journal: Journal, is_automatic: bool) -> None:
        super().__init__(journal, [])
        self._run, self._is_automatic = run, is_automatic

    def acknowledged(self) -> None:
        """Remove the journals of a run that has ended, if its file has all rows and no next attempt is to send them."""
        self.journal.close()
        directory = self.journal.directory
        if not _is_whole(directory):
            vendor.restart_service(_END_S)
            if not _is_whole(directory):
                _warn_of_loss(self._run, directory)
        elif not self._is_automatic:
            super().acknowledged()
        _complete_earlier(self._run, directory)


class OfflineAttempt(tail.Attempt):
    """The records that an attempt has left which was logged offline."""

    def move(self, distance: int) -> None:
        """Move its rows to later steps."""
        if distance and self._has_user_steps():
            self._keep_steps()
        self.rows = {step + distance: row for step, row in self.rows.items()}
        self.last_step += distance
        for step, row in self.rows.items():
            row.step.num = step
            _set_step(row.item, step)
        for kind, record in self.others:
            if kind == "summary" and any(item.key == "_step" for item in record.update):
                _set_step(record.update, self.last_step)

    def _has_user_steps(self) -> bool:
        """Whether the function has logged with `step=`: then the journal's rows have steps."""
        entries = (entry for journal in self.journals for entry in journal.pending())
        return any(vendor.parse_row(entry.data).HasField("step") for entry in entries)

    def _keep_steps(self) -> None:
        """Give each row its own step in a column, and have charts use it."""
        header = self.journals[0].header
        for step, row in self.rows.items():
            present = {tail.key_of(item) for item in row.item}
            for key, value in {header[_STEP_METRIC]: step, RESTART_COUNT: header[RESTART_COUNT]}.items():
                if key not in present:
                    tail.add_value(row.item, key, value)
        self.others.insert(0, ("metric", vendor.step_metric_record(header[_STEP_METRIC])))

    def acknowledged(self) -> None:
        super().acknowledged()
        file = datastore.file_in(self.directory)
        if file is not None:
            touch_own(Path(f"{file}.synced"))  # for `wandb sync`, which would send it again


def is_offline(directory: Path) -> bool:
    """Whether this is the directory of a run that was logged offline."""
    return directory.resolve().name.startswith(_PREFIX)


def is_moved(directory: Path) -> bool:
    """Whether an attempt has begun to send what this directory has."""
    return (directory / _DISTANCE).exists()


def begin(run: Any, request: RunRequest, is_automatic: bool) -> None:
    """Keep a journal of a run that was opened offline.

    Args:
        run: The run.
        request: The decorator's request for it.
        is_automatic: Whether the next attempt that is online sends its rows.
    """
    if tail.JOURNAL in vars(run) or getattr(run, "disabled", False):
        return
    header = {
        "place": tail.Place.of(run),
        "step": 0,
        "is_shared": request.config.run_mode == "shared",
        "is_complete": False,
        _AUTOMATIC: is_automatic,
        _HOST: socket.gethostname(),
        _STEP_METRIC: request.config.step_metric,
        RESTART_COUNT: restart_count_of(request),
    }
    journal = Journal(tail.run_directory(run), tail.owner_name(secrets.token_hex(3)), header, tail.SEGMENTS)
    vars(run)[tail.JOURNAL] = OfflineJournal(run, journal, is_automatic)
    vendor.on_rows(run, journal.add)


def complete(directory: Path) -> list[StoredJournal]:
    """Add the rows that only its journals have to the file of a run that nobody writes. Returns the journals.

    Raises:
        OSError: The file cannot be written.
    """
    journals = stored(directory)
    file = datastore.file_in(directory)
    if not journals:
        return []
    attempt = tail.read(directory, journals, 0)
    if attempt.only_kept:
        place = tail.Place(*journals[0].header["place"])
        kinds = [vendor.parse_record(data)[0] for data in datastore.records(file)] if file is not None else []
        more = [] if "run" in kinds else [vendor.serialized("run", vendor.new_run(place))]
        more += [vendor.serialized("history", attempt.rows[step]) for step in attempt.only_kept]
        more += [vendor.serialized("summary", tail.summary(attempt.rows[step])) for step in attempt.only_kept[-1:]]
        datastore.add(file or directory / f"run-{place.run_id}.wandb", more)
    return list(journals)


def move_rest(directory: Path, next_step: int) -> None:
    """Move the rows that only its journals have to this step, if W&B has all others. They are then sent as if begun."""
    attempt = tail.read(directory, stored(directory), 0)
    if attempt.only_kept:
        replace_whole(directory / _DISTANCE, json.dumps(next_step - attempt.only_kept[0]))


def _complete_earlier(run: Any, own: Path) -> None:
    """Complete the files that earlier attempts of a run have left on this machine, and remove their journals."""
    for directory in tail.directories_of(own.parent, run.id, _PREFIX):
        journals = [] if directory == own else stored(directory)
        owners = [journal for journal in journals if _AUTOMATIC in journal.header]
        # On another machine, a process may have it open.
        is_left = owners and all(one.header[_HOST] == socket.gethostname() for one in owners)
        is_sent = any(directory.glob("*.synced")) or any(one.header[_AUTOMATIC] for one in owners)
        if not is_left or is_sent or any(journal.is_open() for journal in journals):
            continue
        try:
            for journal in complete(directory):
                journal.remove()
        except OSError as error:
            logger.warning("W&B: run %s: %s cannot be completed: %s", run.id, directory, error)


def _is_whole(directory: Path) -> bool:
    """Whether a run's file has all its rows: wandb-core writes the end last, and nothing after a failure."""
    file = datastore.file_in(directory)
    until = time.monotonic() + _END_S
    while file is not None:
        data, _ = next(datastore.windows(file, 2), ([], True))
        if any(vendor.parse_record(one)[0] == "exit" for one in data):
            return True
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return False


def _warn_of_loss(run: Any, directory: Path) -> None:
    """Say which rows of a run the disk has, whose file could not be written to its end."""
    attempt = tail.read(directory, stored(directory), 0)
    logger.warning(
        "W&B: run %s was not written completely, as on a full disk. %s has %d rows, up to step %d. The run went on to "
        "step %s: what was logged after step %d is lost",
        run.id,
        directory,
        len(attempt.rows),
        attempt.last_step,
        vendor.last_step(run),
        attempt.last_step,
    )


def earlier_summary(run: Any, key: str) -> str | None:
    """Return a text from the summary of the last attempt on this disk that was logged offline; None for none."""
    own = tail.run_directory(run)
    others = [other for other in tail.directories_of(own.parent, run.id, _PREFIX) if other != own]
    for file in map(datastore.file_in, reversed(others)):
        for data, _ in itertools.islice(datastore.windows(file), _MOST_WINDOWS) if file is not None else ():
            summaries = (content for kind, content in map(vendor.parse_record, data) if kind == "summary")
            texts = [item.value_json for one in summaries for item in one.update if tail.key_of(item) == key]
            if texts:
                text: str = json.loads(texts[-1])
                return text
    return None


def attempts(place: tail.Place, own: Path, next_step: int) -> list[tail.Attempt]:
    """Return the attempts of a run that were logged offline, with rows from `next_step` on."""
    found: list[tail.Attempt] = []
    for directory in tail.directories_of(own.parent, place.run_id, _PREFIX):
        attempt = read(directory, place)
        is_automatic = any(journal.header.get(_AUTOMATIC) for journal in attempt.journals)
        if not is_automatic or not attempt.rows or attempt.is_open():
            continue
        if not is_moved(directory):
            distance = max(0, next_step - min(attempt.rows))
            replace_whole(directory / _DISTANCE, json.dumps(distance))
            attempt.move(distance)
        next_step = max(next_step, attempt.last_step + 1)
        found.append(attempt)
    return found


def read(directory: Path, place: tail.Place) -> OfflineAttempt:
    """Read all rows of an attempt, moved to where they were sent, if that was begun."""
    journals = [one for one in stored(directory) if _is_same(tail.Place(*one.header["place"]), place)]
    attempt = OfflineAttempt(**vars(tail.read(directory, journals, 0)))
    if is_moved(directory):
        attempt.move(int(json.loads((directory / _DISTANCE).read_text())))
    return attempt


def _is_same(found: tail.Place, wanted: tail.Place) -> bool:
    """Whether it is the same run. Offline, the client does not know the user's default entity."""
    entities = ("", wanted.entity)
    names = (wanted.server, wanted.project, wanted.run_id)
    return found.entity in entities and (found.server, found.project, found.run_id) == names


def _set_step(items: Any, step: int) -> None:
    kept = [item for item in items if tail.key_of(item) != "_step"]
    del items[:]
    items.extend(kept)
    tail.add_value(items, "_step", step)
