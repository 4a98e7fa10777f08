"""Send run directories of W&B: of each, what W&B has not got.

wandb's own `sync` refuses the directory of a run that was online, or appends all of it to what W&B has.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import touch_own
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.journal import how_to_send, require_server
from flyteplugins_tracking.trackers.journal.files import StoredJournal, stored
from flyteplugins_tracking.trackers.journal.lines import exit_code_in
from flyteplugins_tracking.trackers.wandb import datastore, offline, tail, vendor

# The file that says of a directory that a process has begun to send it.
_SENDING = "flyteplugins-tracking-sending"
# How long W&B may take to count the rows that it has got: it counts 2 to 4 s late.
_CONFIRMED_S, _POLL_S = 30.0, 0.5
_STATES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1}


def is_run_directory(directory: Path) -> bool:
    """Whether W&B's client has written this directory."""
    return any(directory.glob("*.wandb"))


def send(directories: Sequence[Path], servers: Sequence[str]) -> Iterator[str]:
    """Send these directories in the order of their start, with those of other attempts of their runs beside them.

    Args:
        directories: The directories.
        servers: The servers that may get the key of this process, besides the one that W&B's client is set up for.

    Yields:
        For each directory, what W&B has of it now, in words.

    Raises:
        TrackerUnavailableError: Some were not sent, or W&B has not confirmed that it has them; or a process is writing
            one. All others were sent.
    """
    failed: list[str] = []
    # By their times: a run that was online goes on offline behind that.
    for directory in sorted(directories, key=lambda one: one.name.removeprefix("offline-")):
        try:
            is_unsent = offline.is_offline(directory) and not offline.is_moved(directory)
            journals = _complete(directory) if is_unsent else ()
            described = _description(directory)
            if described is None and (offline.is_offline(directory) or not stored(directory)):
                yield f"{directory} has no rows: its process was killed while it opened the run"
            elif is_unsent:
                yield _sync(directory, described, journals)
            else:
                yield _send(directory, described, servers)
        except (TrackerUnavailableError, OSError, ValueError) as error:
            failed.append(f"{directory} was not sent: {error}" if isinstance(error, OSError) else str(error))
    if failed:
        raise TrackerUnavailableError("\n".join(failed))


def _complete(directory: Path) -> Sequence[StoredJournal]:
    """Add what only its journals have to the file of a run that was logged offline. Returns the journals.

    Raises:
        TrackerUnavailableError: A process is writing it, or the file cannot be written.
    """
    if any(journal.is_open() for journal in stored(directory)):
        raise TrackerUnavailableError(f"a process is writing to {directory}: wait for its end")
    try:
        if not any(directory.glob("*.synced")):
            return offline.complete(directory)
        # `wandb sync` has sent the file, and does not send it again: the rest is placed behind what W&B has.
        described = _description(directory)
        in_place = None if described is None else _stored(_configured_place(described))
        if in_place is not None:
            offline.move_rest(directory, in_place.last_step + 1)
    except OSError as error:
        raise TrackerUnavailableError(
            f"{directory} was not sent: the rows of its journals cannot be added to its file: {error}"
        ) from error
    return ()


def _sync(directory: Path, described: Any, journals: Sequence[StoredJournal]) -> str:
    """Send what was logged offline: of W&B, only the client can do that. Its exit status does not tell what arrived."""
    place = _configured_place(described)  # not the journal's: `wandb sync` sends to the server that is set up here
    file = datastore.file_in(directory)
    rows = sum(vendor.parse_record(data)[0] == "history" for data in datastore.records(file)) if file else 0
    before = _rows_stored(place)
    wanted = rows if Path(f"{file}.synced").exists() else (before or 0) + rows
    command = [sys.executable, "-m", "wandb", "sync", "--yes", str(directory)]
    if subprocess.run(command, check=False).returncode:  # noqa: S603 our own
        raise TrackerUnavailableError(f"{directory} was not sent: wandb sync has failed, as it has printed")
    until = time.monotonic() + _CONFIRMED_S
    while (count := _rows_stored(place)) is None or count < wanted:
        if time.monotonic() > until:
            raise TrackerUnavailableError(
                f"W&B has not confirmed {directory}: it counts {count or 0} rows of run {place.run_id}, and should "
                f"count {wanted}. Keep the directory, and look again: {how_to_send(str(directory))}. If the count "
                f"stays, send it again: wandb sync --include-synced {shlex.quote(str(directory))}"
            )
        time.sleep(_POLL_S)
    for journal in journals:
        journal.remove()
    return f"sent {directory}: W&B has the {rows} rows"


def _rows_stored(place: tail.Place) -> int | None:
    """Return how many rows of a run W&B counts; None if it does not have the run, or does not answer."""
    found = _stored(place)
    return None if found is None else found.rows


def _stored(place: tail.Place) -> vendor.Stored | None:
    return vendor.stored_run("/".join(filter(None, place[1:])), place.server)


def _send(directory: Path, described: Any, servers: Sequence[str]) -> str:
    if tail.is_rewound(directory):
        return f"nothing of {directory} is sent: its run was rewound since then, and continues in a later directory"
    place = _place(directory, described)
    require_server(directory, place.server, [vendor.default_settings().base_url, *servers])
    attempts = [*tail.pending(place, directory), _read(directory, place)]
    if any(attempt.is_open() for attempt in attempts):
        raise TrackerUnavailableError(f"a process is writing to run {place.run_id}: wait for its end")
    found = _stored(place)
    last_step, exit_code = max(attempt.last_step for attempt in attempts), attempts[-1].exit_code
    marker = directory / _SENDING
    is_left_open = exit_code is not None or marker.exists()  # by us, and not by a job that continues it
    is_ended = found is not None and (found.state != "running" or not is_left_open)
    if found is not None and is_ended and found.last_step >= last_step:
        for attempt in attempts:
            attempt.acknowledged()
        return f"W&B has all of {directory}: run {place.run_id}"
    if exit_code is None:
        exit_code = 1 if found is None else _STATES.get(found.state, 1)
    touch_own(marker)
    description = vendor.description(described) if described is not None else {}
    count = _send_rest(place, attempts, description if found is None else None, exit_code)
    for attempt in attempts:
        attempt.acknowledged()
    marker.unlink()
    return f"sent {count} rows of run {place.run_id}"


def _read(directory: Path, place: tail.Place) -> tail.Attempt:
    if offline.is_offline(directory):
        return offline.read(directory, place)
    return tail.read(directory, tail.journals_of(directory, place), 0)


def _send_rest(
    place: tail.Place, attempts: Sequence[tail.Attempt], described: Mapping[str, Any] | None, exit_code: int
) -> int:
    """Open the run, send what it lacks, and end it. Returns the number of rows."""
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = vendor.open_to_send(place, described, folder)
        try:
            for attempt in attempts:
                attempt.drop_below(vendor.starting_step(run))
            count = len({step for attempt in attempts for step in attempt.rows})
            for _ in tail.send(run, attempts):
                pass
            run.finish(exit_code=exit_code)
        except BaseException:
            wandb.teardown(1)
            raise
    return count


def as_lines(directory: Path) -> list[Any]:
    """Return a run as the lines of a journal, for another tracker: a header, the rows, the end."""
    described = _description(directory)
    if described is None:
        raise TrackerUnavailableError(f"{directory} has no rows: its process was killed while it opened the run")
    arguments = {name: value for name, value in vendor.description(described).items() if value is not None}
    arguments.pop("job_type", None)
    attempt = tail.read(directory, stored(directory), 0)
    rows = [tail.as_line(attempt.rows[step]) for step in sorted(attempt.rows)]
    header = {
        "tracker": "wandb",
        "id": described.run_id,
        "group": described.run_group or None,
        "primary": True,
        "attempt": 0,
        "arguments": {**arguments, "project": described.project},
        "run_metadata": {},
    }
    return [header, *rows, {"exit_code": 1 if attempt.exit_code is None else attempt.exit_code}]


def replay(lines: Sequence[Any]) -> int:
    """Send a run of another tracker's journal to W&B. Rows that W&B has are not sent. Returns the number of rows."""
    header, arguments = lines[0], lines[0]["arguments"]
    names = ("name", "group", "tags", "notes", "config")
    described = {name: arguments[name] for name in names if arguments.get(name) is not None}
    settings = vendor.default_settings()
    place = tail.Place(
        without_credentials(settings.base_url), settings.entity or "", arguments.get("project") or "", header["id"]
    )
    attempt = tail.Attempt(Path(), ())
    for line in lines:
        if "row" in line:
            attempt.add(line)
    return _send_rest(place, [attempt], {**described, "group": header["group"]}, exit_code_in(lines))


def _description(directory: Path) -> Any:
    """Return the record with which the run was opened; None if its process was killed before it had written any.

    Raises:
        TrackerUnavailableError: It is damaged, or another user's.
    """
    file = datastore.file_in(directory)
    if file is None and is_run_directory(directory):
        raise TrackerUnavailableError(f"{directory} was not sent: its .wandb file is not a file of this user")
    kinds = []
    for data in () if file is None else datastore.records(file):
        kind, record = vendor.parse_record(data)
        kinds.append(kind)
        if kind == "run":
            return record
    if "history" in kinds:
        raise TrackerUnavailableError(f"{file} is damaged: it has rows, and does not say which run they are of")
    return None


def _place(directory: Path, described: Any) -> tail.Place:
    """Return which run it is: what its journal says, or else of the server and entity that are set up here."""
    for journal in stored(directory):
        return tail.Place(*journal.header["place"])
    return _configured_place(described)


def _configured_place(described: Any) -> tail.Place:
    return tail.Place(
        without_credentials(vendor.default_settings().base_url), described.entity, described.project, described.run_id
    )
