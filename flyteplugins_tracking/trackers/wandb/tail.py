"""Send what an earlier attempt has logged and W&B has not got, before the first row of this one.

wandb-core sends every 15 s, and SIGKILL of its process keeps it from sending the rest. Three sources have the rest:

- The run's file, `run-ID.wandb`, has what wandb-core has done: each row with its step, time and place.
- A journal for each writer has the rows that wandb-core was given. The file lacks the last 0.1 s of them, the last row
  with `step=`, which wandb-core holds until the next step, and what it had not read when its process died.
- The step at which W&B has the run continue says what the service has: in W&B's default mode, that is a prefix.

A journal is removed when its run has ended, and so has arrived. While a run's directory has one, it is pending.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import is_own_directory, link_or_copy, own_file_in, replace_whole, touch_own
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers.journal.files import Journal, StoredJournal, stored
from flyteplugins_tracking.trackers.wandb import datastore, vendor

logger = logging.getLogger(__name__)

# The run's attribute that holds its `RunJournal`.
JOURNAL = "_flyteplugins_tracking_journal"
# The run's attribute that holds what is still to be sent.
_REST = "_flyteplugins_tracking_rest"
# The journal of the process that has opened the run, and those of ranks that log into it.
_OWNER, _GUEST = "owner", "guest"
# How many segments of a journal are kept. The run's file has the older rows.
SEGMENTS = 2
# wandb-core writes its file within 0.1 s. A row that is older by so many seconds is there, unless it is held.
_SURELY_WRITTEN_S = 30.0
# How many rows are handed over before one is waited for.
_AT_ONCE = 100
# The file that has the exit code of a run whose end was not sent in time: wandb-core may not have written it.
_ENDED = "flyteplugins-tracking-ended"
# The file that says of a directory that its run was rewound later.
_REWOUND = "rewound"
# The records besides rows that are sent again.
_OTHERS = ("summary", "metric", "files")
# The files that wandb-core itself makes for each attempt.
_OF_AN_ATTEMPT = ("config.yaml", "output.log", "requirements.txt", "wandb-metadata.json", "wandb-summary.json")


class Place(NamedTuple):
    """Which run of which server it is. It is stored, so the server's address has no password."""

    server: str
    entity: str
    project: str
    run_id: str

    @classmethod
    def of(cls, run: Any) -> Place:
        """Return the place of an open run."""
        return cls(
            without_credentials(str(run.settings.base_url)), str(run.entity or ""), str(run.project), str(run.id)
        )


# Takes the place of a run, the directory of its attempt, and the step from which on it has no rows.
FindAttempts = Callable[[Place, Path, int], "Sequence[Attempt]"]


class RunJournal:
    """The journal of an open run, and the directories whose rows were sent with it."""

    def __init__(self, journal: Journal, adopted: Sequence[Attempt]) -> None:
        self.journal = journal
        self._adopted = adopted

    def acknowledged(self) -> None:
        """Remove the journals: the run has ended, and the service has everything."""
        self.journal.remove()
        for kept in stored(self.journal.directory):  # those of guests
            kept.remove()
        for attempt in self._adopted:
            attempt.acknowledged()


@dataclass
class Attempt:
    """The records that an earlier attempt has left in its directory.

    Attributes:
        directory: The directory.
        journals: Its journals.
        rows: The rows from a step on, by their steps.
        only_kept: The steps of those that only its journals have.
        others: The records of other kinds from about there on.
        last_step: The step of the last row; -1 if there is none.
        exit_code: None if the run was not ended.
        has_rows_before: Whether its file has all that the attempts before it had left.
    """

    directory: Path
    journals: Sequence[StoredJournal]
    rows: dict[int, Any] = field(default_factory=dict)
    only_kept: list[int] = field(default_factory=list)
    others: list[tuple[str, Any]] = field(default_factory=list)
    last_step: int = -1
    exit_code: int | None = None
    has_rows_before: bool = False

    def is_open(self) -> bool:
        """Whether a process has the run open."""
        return any(journal.is_open() for journal in self.journals if journal.paths[0].name.startswith(_OWNER))

    def drop_below(self, step: int) -> None:
        """Forget the rows of earlier steps, which the service has."""
        self.rows = {row_step: row for row_step, row in self.rows.items() if row_step >= step}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a row of another tracker's journal: at its step, or at the next one if that is taken or not given."""
        self.last_step = max(self.last_step + 1, -1 if line["step"] is None else int(line["step"]))
        record = vendor.new_record("HistoryRecord")
        record.step.num = self.last_step
        own = {"_step": self.last_step, "_timestamp": line["time"]}
        for key, value in {**line["row"], **own}.items():
            add_value(record.item, key, value)
        self.rows[self.last_step] = record
        self.others = [("summary", summary(record))]

    def acknowledged(self) -> None:
        """Remove the journals: the service has everything."""
        for journal in self.journals:
            journal.remove()


def owner_name(suffix: str) -> str:
    """Return the name of a journal of the process that has opened a run."""
    return f"{_OWNER}-{suffix}"


def begin(run: Any, deadline: float | None, is_shared: bool, find_more: FindAttempts | None = None) -> None:
    """Prepare a run that was just opened: send what earlier attempts have left, and keep a journal from now on.

    Args:
        run: The run.
        deadline: When to return, in seconds of `time.monotonic`: `rest` sends the rest. None to send all.
        is_shared: Whether other processes log into the run too.
        find_more: Finds attempts whose rows follow those of the others.
    """
    if JOURNAL in vars(run):  # another function has it open
        return
    sending = _safely(_begin(run, is_shared, find_more or (lambda *_: [])), run)
    for _ in sending:
        if deadline is not None and time.monotonic() > deadline:
            vars(run)[_REST] = sending
            return


def has_rest(run: Any) -> bool:
    """Whether `begin` has returned before all was sent. The run must not get rows until `send_rest` has returned."""
    return _REST in vars(run)


def send_rest(run: Any) -> None:
    """Send what `begin` had no time for."""
    for _ in vars(run).pop(_REST):
        pass


def _safely(sending: Iterator[object], run: Any) -> Iterator[object]:
    """Tracker errors must not change the training's outcome."""
    try:
        yield from sending
    except Exception:
        logger.warning(
            "W&B: run %s: the rows that an earlier attempt has left in %s could not be sent",
            run.id,
            run_directory(run).parent,
            exc_info=True,
        )


def _begin(run: Any, is_shared: bool, find_more: FindAttempts) -> Iterator[object]:
    place, directory = Place.of(run), run_directory(run)
    starting_step = vendor.starting_step(run)
    attempts: list[Attempt] = []
    is_complete = False
    try:
        attempts += _with_rows(pending(place, directory, starting_step), starting_step)
        last_step = max((attempt.last_step for attempt in attempts), default=-1)
        attempts += _with_rows(find_more(place, directory, max(starting_step, last_step + 1)), starting_step)
        yield from send(run, attempts)
        is_complete = True
    finally:
        step = vendor.starting_step(run)
        header = {"place": place, "step": step, "is_shared": is_shared, "is_complete": is_complete}
        journal = Journal(directory, owner_name(secrets.token_hex(3)), header, SEGMENTS)
        vars(run)[JOURNAL] = RunJournal(journal, attempts)
        vendor.on_rows(run, journal.add)


def _with_rows(attempts: Sequence[Attempt], starting_step: int) -> Iterator[Attempt]:
    """Yield those that have rows from this step on. The service has all of those that have none."""
    for attempt in attempts:
        if attempt.last_step < starting_step:
            attempt.acknowledged()
        elif not attempt.is_open():
            attempt.drop_below(starting_step)
            yield attempt


def begin_guest(run: Any, directory: str, place: Sequence[str], rank: int) -> Journal:
    """Keep a journal of a rank that logs into the run of another process, in that one's directory."""
    header = {"place": place, "is_shared": True}
    journal = Journal(Path(directory), f"{_GUEST}-{rank}-{secrets.token_hex(3)}", header, SEGMENTS)
    vendor.on_rows(run, journal.add)
    return journal


def remove_sent(run: Any) -> None:
    """Note that the run has ended, and that the service has everything."""
    journal = vars(run).get(JOURNAL)
    if journal is not None:
        journal.acknowledged()


def keep_unsent(run: Any) -> None:
    """Note that the run's wandb-core has died. The next opening sends what it has left."""
    journal = vars(run).get(JOURNAL)
    if journal is not None:
        journal.journal.close()


def mark_ended(run: Any, exit_code: int) -> None:
    """Note the exit code of a run whose end was not sent in time."""
    with contextlib.suppress(OSError):
        replace_whole(run_directory(run) / _ENDED, str(exit_code))


def mark_rewound(run: Any) -> None:
    """Note in the directories of earlier attempts that W&B has dropped rows of theirs, which must not be sent again."""
    own = run_directory(run)
    for directory in directories_of(own.parent, run.id):
        if directory != own:
            with contextlib.suppress(OSError):  # which the training must not end for
                touch_own(directory / _REWOUND)


def is_rewound(directory: Path) -> bool:
    """Whether W&B has dropped rows of a run's directory since they were sent."""
    return (directory / _REWOUND).exists()


def run_directory(run: Any) -> Path:
    """The directory of the run's `.wandb` file."""
    return Path(str(run.dir)).parent


def pending(place: Place, own: Path, starting_step: int = 0) -> list[Attempt]:
    """Return the other attempts of which the service may lack rows, in the order of their start.

    An attempt has first written what those before it had left. Once its file has a row of its own, it has all of that:
    the journals of those before it are removed, so that opening does not take longer with each attempt.
    """
    attempts: list[Attempt] = []
    is_covered = False
    for directory in reversed(directories_of(own.parent, place.run_id)):
        journals = [] if directory == own else journals_of(directory, place)
        if not journals:
            continue
        attempt = Attempt(directory, journals) if is_covered else read(directory, journals, starting_step)
        if not is_covered or attempt.is_open():
            attempts.append(attempt)
            is_covered = is_covered or attempt.has_rows_before
        else:
            attempt.acknowledged()
    return attempts[::-1]


def is_any_left(parent: Path, run_id: str) -> bool:
    """Whether an attempt of this run has left a journal below the directory of all runs."""
    return any(stored(directory) for directory in directories_of(parent, run_id))


def directories_of(parent: Path, run_id: str, prefix: str = "") -> list[Path]:
    """Return this user's directories of a run, in the order of their start.

    Another user may have made one, where others can write: its rows and files are not sent.
    """
    found = parent.glob(f"{prefix}run-*-{glob.escape(run_id)}*")
    return sorted(path for path in found if is_own_directory(path) and _run_id_of(path) == run_id)


def _run_id_of(directory: Path) -> str:
    """Return the id of a directory's run. The directory's own name may have a suffix, and its file's has none."""
    file = datastore.file_in(directory)
    return file.stem.removeprefix("run-") if file is not None else directory.name.partition("run-")[2].partition("-")[2]


def journals_of(directory: Path, place: Place) -> list[StoredJournal]:
    """Return the journals of this run in a directory."""
    return [journal for journal in stored(directory) if list(journal.header["place"]) == list(place)]


def send(run: Any, attempts: Sequence[Attempt]) -> Iterator[object]:
    """Hand the rows of earlier attempts to the run's wandb-core, each once, with their own steps and times."""
    rows = {step: row for attempt in attempts for step, row in attempt.rows.items()}
    if not rows:
        return
    vendor.skip_to(run, max(rows) + 1)
    last = max(rows)
    for number, step in enumerate(sorted(rows)):
        # Waiting for each takes 0.65 ms; never waiting would fill the memory.
        vendor.publish(run, "history", rows[step], waits=step == last or number % _AT_ONCE == 0)
        yield step
    for attempt in attempts:
        for kind, record in attempt.others:
            if kind != "files" or _link_files(attempt.directory, run_directory(run), record):
                vendor.publish(run, kind, record)
                yield kind
    logger.warning(
        "W&B: run %s: sent %d rows (steps %d to %d) that earlier attempts had logged and W&B had not received, from %s",
        run.id,
        len(rows),
        min(rows),
        max(rows),
        ", ".join(str(attempt.directory) for attempt in attempts if attempt.rows),
    )


def _link_files(earlier: Path, own: Path, files: Any) -> bool:
    """Give the attempt's files, such as images of rows, to the new run's directory. Returns whether there are any."""
    is_any = False
    for item in files.files:
        source, target = own_file_in(earlier / "files", item.path), own / "files" / item.path
        if item.path in _OF_AN_ATTEMPT or source is None or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source.resolve(), target)
        is_any = True
    return is_any


# Reading an attempt


class _Row(NamedTuple):
    """A row of a journal.

    Attributes:
        time_s: When it was logged.
        step: Its step, if that is known without the file.
        items: Its items, by their keys.
    """

    time_s: float
    step: int | None
    items: Mapping[str, Any]

    @property
    def stamp(self) -> Any:
        """The time that the row itself has, which is in the file too."""
        return _value(self.items["_timestamp"])


def read(directory: Path, journals: Sequence[StoredJournal], starting_step: int) -> Attempt:
    """Read the rows of a run's directory from a step on: those of its file, and those that only its journals have."""
    attempt = Attempt(directory, journals)
    file = datastore.file_in(directory)
    written_at = file.stat().st_mtime if file is not None else 0.0
    kept = _kept_rows(journals, written_at)
    logged_since = min((row.time_s for row in kept), default=written_at)
    in_file, last = _read_file(attempt, file, starting_step, written_at, logged_since)
    missing = [row for row in kept if not _is_taken(in_file, row.stamp)]
    _add_missing(attempt, missing, last, starting_step, journals)
    attempt.last_step = max(attempt.last_step, max(attempt.rows, default=-1))
    if attempt.exit_code is None and (directory / _ENDED).exists():
        attempt.exit_code = int((directory / _ENDED).read_text())
    return attempt


def _read_file(
    attempt: Attempt, file: Path | None, starting_step: int, written_at: float, logged_since: float
) -> tuple[Counter[Any], dict[str, Any]]:
    """Read the end of the file. Returns the times of its last rows, and the values of its last row."""
    for data, is_all in datastore.windows(file) if file is not None else ():
        parsed = [vendor.parse_record(one) for one in data]
        rows = [row for kind, row in parsed if kind == "history"]
        if not is_all and (not rows or rows[0].step.num >= starting_step):
            continue
        first, last = (_own_values(rows[0]), _own_values(rows[-1])) if rows else ({}, {})
        # How much older a row of the file may be than its last one, and still be one of the journals.
        since_s = float(last.get("_runtime", 0)) - (written_at - logged_since) - 1
        if not is_all and float(first.get("_runtime", 0)) > since_s:
            continue
        attempt.rows = {row.step.num: row for row in rows if row.HasField("step") and row.step.num >= starting_step}
        attempt.last_step = last.get("_step", -1)
        first_own = [journal.header["step"] for journal in attempt.journals if journal.header.get("is_complete")]
        attempt.has_rows_before = bool(first_own) and attempt.last_step >= max(first_own)
        attempt.others = [(kind, record) for kind, record in parsed if kind in _OTHERS]
        attempt.exit_code = next((record.exit_code for kind, record in parsed if kind == "exit"), None)
        return _stamps(rows, since_s), last
    return Counter(), {}


def _stamps(rows: Sequence[Any], since_s: float) -> Counter[Any]:
    """Return the times of the rows since a time of the run."""
    stamps: Counter[Any] = Counter()
    for row in reversed(rows):
        values = _own_values(row)
        if float(values.get("_runtime", 0)) < since_s:
            break
        stamps[values.get("_timestamp")] += 1
    return stamps


def _kept_rows(journals: Sequence[StoredJournal], written_at: float) -> list[_Row]:
    """Return the rows of the journals that the file may lack, by their times."""
    kept: list[_Row] = []
    for journal in journals:
        rows = list(_rows(journal))
        kept += [row for row in rows[:-1] if row.time_s > written_at - _SURELY_WRITTEN_S]
        if rows and (not journal.header["is_shared"] or rows[-1].time_s > written_at - _SURELY_WRITTEN_S):
            kept.append(rows[-1])  # wandb-core may have held it for long
    return sorted(kept, key=lambda row: row.time_s)


def _rows(journal: StoredJournal) -> Iterator[_Row]:
    """Put rows together from what wandb-core was given, as wandb-core does: calls of one step are one row.

    https://github.com/wandb/wandb/blob/main/core/internal/stream/handler.go: handlePartialHistorySync
    """
    is_known = not journal.header["before"] and not journal.header["is_shared"]
    step: int | None = journal.header["step"] if is_known else None
    items: dict[str, Any] = {}
    time_s = 0.0
    for entry in journal.pending():
        part = vendor.parse_row(entry.data)
        if part.HasField("step"):
            if step is not None and part.step.num < step:
                continue  # wandb-core drops it
            if items and part.step.num != step:
                yield _Row(time_s, step, items)
                items = {}
            step = part.step.num
        items.update({item.key or ".".join(item.nested_key): item for item in part.item})
        time_s = entry.time_s
        if part.action.flush if part.HasField("action") else not part.HasField("step"):
            yield _Row(time_s, step, items)
            items, step = {}, None if step is None else step + 1
    if items:
        yield _Row(time_s, step, items)


def _is_taken(stamps: Counter[Any], stamp: Any) -> bool:
    """Whether the file has a row of this time that stands for no other one."""
    stamps[stamp] -= 1
    return stamps[stamp] >= 0


def _add_missing(
    attempt: Attempt, missing: Sequence[_Row], last: Mapping[str, Any], starting_step: int, journals: Sequence[Any]
) -> None:
    """Add the rows that only journals have. They follow those of the file: wandb-core reads and writes in order."""
    first_steps = [journal.header["step"] for journal in journals if "step" in journal.header]
    step = last.get("_step", min(first_steps, default=0) - 1)
    has_own_summary = any(kind == "metric" and record.HasField("summary") for kind, record in attempt.others)
    for row in missing:
        step = max(step + 1, row.step if row.step is not None else 0)
        runtime_s = last.get("_runtime", 0) + max(0.0, row.time_s - last.get("_timestamp", row.time_s))
        attempt.last_step = max(attempt.last_step, step)
        if step >= starting_step:
            attempt.rows[step] = _record(row, {"_step": step, "_runtime": runtime_s})
            attempt.only_kept.append(step)
            if not has_own_summary:
                attempt.others.append(("summary", summary(attempt.rows[step])))


def _record(row: _Row, own: Mapping[str, Any]) -> Any:
    record = vendor.new_record("HistoryRecord")
    record.step.num = own["_step"]
    for item in row.items.values():
        record.item.add().CopyFrom(item)
    for key, value in own.items():
        add_value(record.item, key, value)
    return record


def add_value(items: Any, key: str, value: Any) -> None:
    """Add a value to the items of a record."""
    item = items.add()
    item.nested_key.append(key)
    item.value_json = json.dumps(value)


def key_of(item: Any) -> str:
    """Return the key of an item; of a nested one, the first part."""
    key: str = item.key or item.nested_key[0]
    return key


def summary(row: Any) -> Any:
    """Return the record of the summary that a row leaves."""
    record = vendor.new_record("SummaryRecord")
    for item in row.item:
        update = record.update.add()
        update.key, update.value_json = item.key, item.value_json
        update.nested_key.extend(item.nested_key)
    return record


def as_line(row: Any) -> dict[str, Any]:
    """Return a row as a line of a journal."""
    values = {".".join(item.nested_key) or item.key: _value(item) for item in row.item}
    own = {key: values.pop(key, None) for key in ("_step", "_timestamp", "_runtime")}
    return {"row": values, "step": own["_step"], "time": own["_timestamp"]}


def _own_values(row: Any) -> dict[str, Any]:
    """Return the values of W&B's own keys in a row of the file."""
    values = {}
    for item in row.item:
        key = key_of(item)
        if key in ("_step", "_timestamp", "_runtime"):
            values[key] = _value(item)
    return values


def _value(item: Any) -> Any:
    """Return the value of an item, which is a number if it has no JSON."""
    return json.loads(item.value_json) if item.value_json else item.number or item.integer
