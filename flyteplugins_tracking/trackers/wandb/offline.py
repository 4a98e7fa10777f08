"""Attempts that were logged offline, since W&B could not be used: the next one that is online sends their rows.

Offline, the steps of a run begin at 0. So the rows are moved behind those that the run has. The distance is written to
the attempt's directory before the first of its rows is sent: the next attempt after a kill moves them equally far.
Moved rows keep their own step in a column, as after a rollback, if the function logs with `step=`.
"""

from __future__ import annotations

import glob
import itertools
import json
import secrets
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import replace_whole
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import RESTART_COUNT, restart_count_of
from flyteplugins_tracking.trackers.journal.files import Journal, stored
from flyteplugins_tracking.trackers.wandb import datastore, tail, vendor

_PREFIX = "offline-"
# In the header of a journal: the column for steps of rows that are moved. The header has their restart count too.
_STEP_METRIC = "step_metric"
_DISTANCE = "flyteplugins-tracking-moved-by.json"
# How many windows of a file are read for its summary, from its end: some 5 MB.
_MOST_WINDOWS = 3


class OfflineJournal(tail.RunJournal):
    """The journal of a run that is logged offline."""

    def acknowledged(self) -> None:
        """Leave the journal to the next attempt: the run has ended, and nothing of it is sent."""
        self.journal.close()


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
            Path(f"{file}.synced").touch()  # for `wandb sync`, which would send it again


def is_offline(directory: Path) -> bool:
    """Whether this is the directory of a run that was logged offline."""
    return directory.resolve().name.startswith(_PREFIX)


def is_moved(directory: Path) -> bool:
    """Whether an attempt has begun to send what this directory has."""
    return (directory / _DISTANCE).exists()


def begin(run: Any, request: RunRequest) -> None:
    """Keep a journal of a run that was opened offline because W&B could not be used."""
    header = {
        "place": tail.Place.of(run),
        "step": 0,
        "is_shared": False,
        "is_complete": False,
        _STEP_METRIC: request.config.step_metric,
        RESTART_COUNT: restart_count_of(request),
    }
    journal = Journal(tail.run_directory(run), tail.owner_name(secrets.token_hex(3)), header, tail.SEGMENTS)
    vars(run)[tail.JOURNAL] = OfflineJournal(journal, [])
    vendor.on_rows(run, journal.add)


def earlier_summary(run: Any, key: str) -> str | None:
    """Return a text from the summary of the last attempt on this disk that was logged offline; None for none."""
    own = tail.run_directory(run)
    others = own.parent.glob(f"{_PREFIX}run-*-{glob.escape(run.id)}")
    for file in map(datastore.file_in, sorted((other for other in others if other != own), reverse=True)):
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
        if not attempt.journals or not attempt.rows or attempt.is_open():
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
