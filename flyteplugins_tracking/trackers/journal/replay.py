"""Send runs that were logged to files: the other half of `local`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.files import touch_own
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Unwatched
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.journal import addresses_in, arguments_to_send, how_to_send, require_server
from flyteplugins_tracking.trackers.journal.files import StoredJournal, has_records, remove_torn, stored
from flyteplugins_tracking.trackers.journal.lines import decode_all, exit_code_in
from flyteplugins_tracking.trackers.journal.relog import relog
from flyteplugins_tracking.trackers.registry import find_tracker

# The file that says of an empty directory that its run was sent.
_SENT = "sent"
# The arguments that are not of one tracker.
_OF_EVERY_TRACKER = ("project", "name", "group", "tags", "notes", "config")
# What the header of a run's journal has, with its types.
_HEADER: Mapping[str, type | tuple[type, ...]] = {
    **{"tracker": str, "id": str, "group": (str, type(None)), "primary": bool, "attempt": int},
    **dict.fromkeys(("arguments", "run_metadata"), dict),
}
_LONGEST_ID = 200


def send(directory: Path, servers: Sequence[str]) -> str | None:
    """Send a run from its directory, and remove what is sent.

    Args:
        directory: The directory.
        servers: The servers that may get the keys of this process, besides those that its variables name.

    Returns:
        The id of the run; None if all was sent before.

    Raises:
        TrackerUnavailableError: The service still cannot be used, and nothing is removed; or the service has not taken
            all rows, and the rest is kept in `directory`.
        ValueError: `directory` is not that of a run.
    """
    journals = {number: (journal, _lines(journal)) for number, journal in enumerate(stored(directory))}
    if any(journal.is_open() for journal, _ in journals.values()):
        raise TrackerUnavailableError(f"a process is writing to {directory}: wait for its end")
    is_begun = (directory / _SENT).exists()
    # A killed process whose rows have all arrived has left a journal without lines, and a run without an end.
    files = {number: lines for number, (_, lines) in journals.items() if len(lines) > 1 or not is_begun}
    if not files and is_begun:
        _remove_rest(directory)
        return None
    if not files:
        raise ValueError(f"{directory} has nothing of a run")
    for lines in files.values():
        for address in addresses_in(lines[0]["arguments"]):
            require_server(directory, address, [*os.environ.values(), *servers])
    touch_own(directory / _SENT)
    kept_again = {directory}
    with _claimed([journal for journal, _ in journals.values()]):
        for numbers in _attempts(files):
            kept_again |= _send_attempt([files[number] for number in numbers], str(directory))
            for number in numbers:
                journals[number][0].remove()
    _remove_rest(directory)
    unsent = sorted(str(path) for path in kept_again if stored(path))
    if unsent:
        raise TrackerUnavailableError(f"a part of the run could not be sent. Send it later: {how_to_send(unsent)}")
    return str(next(iter(files.values()))[0]["id"])


def is_empty(directory: Path) -> bool:
    """Whether a directory has nothing of any run: its process was killed before it had logged anything."""
    return directory.is_dir() and not (directory / _SENT).exists() and not has_records(directory)


def _remove_rest(directory: Path) -> None:
    """Remove the journals without lines: of a process that was killed when it made one, or had sent all."""
    for journal in stored(directory):
        if not journal.is_open() and not journal.pending():
            journal.remove()
    remove_torn(directory)


def runs_of(directory: Path) -> list[list[Any]]:
    """Return the journals of a directory, each as its header and its lines.

    Raises:
        ValueError: `directory` is not that of a run.
    """
    runs = [_lines(journal) for journal in stored(directory)]
    if not runs:
        raise ValueError(f"{directory} has nothing of a run")
    return runs


def replay(lines: Sequence[Any], tracker: str, first: int = 0) -> str:
    """Send a run of any tracker to another one, with its id, config, steps, times and end.

    Args:
        lines: The run, as `runs_of` returns it.
        tracker: The other tracker's name.
        first: How many rows that one has already.

    Returns:
        The run's id.
    """
    header = lines[0]
    arguments = {name: value for name, value in header["arguments"].items() if name in _OF_EVERY_TRACKER}
    handle = _open({**header, "tracker": tracker, "arguments": arguments})
    handle.ends_run = True
    rows = [line for line in lines if "row" in line][first:]
    relog(handle, rows, "")
    handle.finish(exit_code_in(lines))
    unsent = handle.unsent()
    if isinstance(unsent, list) and [path for path in unsent if stored(Path(path))]:
        raise TrackerUnavailableError(f"a part of the run could not be sent. Send it later: {how_to_send(unsent[0])}")
    return handle.id


@contextlib.contextmanager
def _claimed(journals: Sequence[StoredJournal]) -> Iterator[None]:
    """Keep the tracker that sends these journals from sending them as those of an earlier attempt too."""
    for journal in journals:
        journal.claim()
    try:
        yield
    finally:
        for journal in journals:
            journal.release()


def _lines(journal: StoredJournal) -> list[Any]:
    """Return the header of a journal, and its pending lines.

    Raises:
        ValueError: It is not that of a run.
    """
    header = journal.header
    if not all(isinstance(header.get(name), kind) for name, kind in _HEADER.items()):
        raise ValueError(f"{journal.paths[0]} does not say which run it is of")
    check_run_id("id", header["id"], longest=_LONGEST_ID)
    return [{**header, "arguments": arguments_to_send(header["arguments"])}, *decode_all(journal.pending())]


def _attempts(files: Mapping[int, Sequence[Any]]) -> Iterator[list[int]]:
    """Yield the journals that are sent together: those of the ranks of one attempt."""
    for attempt in dict.fromkeys(lines[0]["attempt"] for lines in files.values()):
        headers = {number: lines[0] for number, lines in files.items() if lines[0]["attempt"] == attempt}
        primaries = [number for number, header in headers.items() if header["primary"]]
        yield [number for number in headers if number not in primaries[1:]]
        for primary in primaries[1:]:  # of a later job, which does not count attempts: the last job's end is the run's
            yield [primary]


def _send_attempt(files: Sequence[list[Any]], directory: str) -> set[Path]:
    """Send the files of one attempt's ranks. The primary opens first and ends last: its end is the run's.

    Returns:
        The directories in which the tracker may have kept rows again.
    """
    in_order = sorted(files, key=lambda lines: not lines[0]["primary"])
    opened = [(_open(lines[0]), lines[1:]) for lines in in_order]
    opened[0][0].ends_run = True
    for handle, lines in opened:
        handle.keep_end(exit_code_in(lines))
        relog(handle, lines, directory)
    for handle, lines in reversed(opened):
        handle.finish(exit_code_in(lines))
    return {Path(kept) for handle, _ in opened for kept in handle.unsent()}


def _open(header: Mapping[str, Any]) -> ClientHandle:
    tracker = find_tracker(header["tracker"])
    config = TrackingConfig.from_arguments({**header["arguments"], "tracker": header["tracker"]})
    plan = RunPlan(opens=True, run_id=header["id"], group=header["group"], primary=header["primary"], writers=1)
    handle = tracker.open(
        RunRequest(
            plan=plan,
            planned_run_id=plan.run_id,
            config=config,
            info=None,
            has_other_writers=False,
            run_metadata=header["run_metadata"],
            read_secret=lambda: None,
            may_prompt=sys.stdin is not None and sys.stdin.isatty(),
            watch=Unwatched(),
            deadline=time.monotonic() + config.init_timeout_s,
        )
    )
    if not isinstance(handle, ClientHandle):
        raise TrackerUnavailableError(f"{tracker.title} itself sends the runs that it has kept: see its documentation")
    return handle
