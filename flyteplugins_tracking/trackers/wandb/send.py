"""Send run directories of W&B: of each, what W&B has not got.

wandb's own `sync` refuses the directory of a run that was online, or appends all of it to what W&B has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._job.failure import FAILURE_KEYS
from flyteplugins_tracking._util.files import own_text, replace_whole
from flyteplugins_tracking._util.modules import installed_version
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import listed, without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.config import OWNER
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.journal import encode, require_all_sent
from flyteplugins_tracking.trackers.outbox import how_to_send, require_server
from flyteplugins_tracking.trackers.vendor_parts import numbers
from flyteplugins_tracking.trackers.wandb import datastore, forced_run_id, outbox, roles, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Row
from flyteplugins_tracking.trackers.wandb.ending import Upload
from flyteplugins_tracking.trackers.wandb.outbox import AttemptOnDisk, Left, Place, WandbOutbox, attempt_at

logger = logging.getLogger(__name__)

# How long W&B may take to count the rows that it has got: it counts 2 to 4 s late.
_CONFIRMED_S, _POLL_S = 30.0, 0.5
# The first version whose `sync` is done by wandb-core, as one of several writers if it is told so. It asks whether to
# send, unless it gets an option that older ones refuse.
_SYNC_OF_CORE_SINCE = "0.28.1"
# How long ago W&B's client has written a file that it still writes, in seconds: it does so every 15 s.
_WRITTEN_S = 30.0
# The command `wandb`. Unlike `python -m wandb`, it does not look for its module in the working directory.
_WANDB = "import runpy, sys; del sys.path[0]; runpy.run_module('wandb', run_name='__main__', alter_sys=True)"
# The exit codes of a run's states.
STATES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1, "preempted": TERMINATED}
# The errors of a wandb-core that dies while it starts.
_OF_SERVICE = "wandb.sdk.lib.service"
# The file of a `LaterEnd`, and its most bytes.
_LATER, _LONGEST_LATER = "flyteplugins-tracking-later.json", 1 << 24
# How long a run may take to end whose sending has failed, in seconds.
_CUT_S = 1.0


def is_run_directory(directory: Path) -> bool:
    """Whether W&B's client has written this directory."""
    return any(directory.glob("*.wandb"))


def is_unsent(directory: Path) -> bool:
    """Whether W&B's client has logged this run offline, and its file was not sent."""
    return is_run_directory(directory) and outbox.is_offline(directory) and not outbox.is_synced(directory)


def may_be_written(directory: Path) -> bool:
    """Whether W&B's client alone, which keeps no journal, may still log to a run: what it logs later would be lost."""
    attempt, file = attempt_at(directory), datastore.file_in(directory)
    is_new = file is not None and not attempt.journals and outbox.age_s(file) < _WRITTEN_S
    return is_new and attempt.exit_code is None


def in_order(directories: Iterable[Path]) -> list[Path]:
    """Return directories in the order in which they are sent: that of their start.

    Those that were online come first: their rows have their steps at W&B already. Its primary, which ends the run,
    follows the other ranks. Roles follow the owner, which has made the run.
    """

    def place_of(directory: Path) -> tuple[bool, bool, bool, tuple[float, str]]:
        label = label_in(directory)
        return not is_rank(directory), not label, outbox.is_offline(directory), outbox.start_of(directory)

    return sorted(directories, key=place_of)


def is_rank(directory: Path) -> bool:
    """Whether a directory's writer is of the job that ends the run, and not a role."""
    label = label_in(directory)
    return not label or re.fullmatch(r"rank-\d+", label) is not None


def label_in(directory: Path) -> str:
    """Return the name of a writer that does not end the run: of a role, or another rank than the primary. Or else "".

    It is the suffix that `open._adapt_to_part` has W&B's client give the directory. The client's own is a number: of a
    directory whose name was taken, since the run was opened twice in a second.
    """
    behind_time = directory.name.partition("run-")[2].partition("-")[2]  # an id may be "run"
    suffix = behind_time.removeprefix(outbox.run_id_of(directory)).removeprefix("-")
    return "" if suffix.isdecimal() else suffix


def send(directory: Path, together: Collection[Path] = ()) -> str:
    """Send a directory, with those of other attempts of its run beside it.

    Args:
        directory: The directory.
        together: The directories that are sent by the same command.

    Returns:
        What W&B has of it now, in words.

    Raises:
        TrackerUnavailableError: It was not sent, or W&B has not confirmed that it has it; or a process is writing it.
    """
    size, described, attempt = outbox.file_size(directory), datastore.description(directory), attempt_at(directory)
    if any(journal.is_open() for journal in attempt.journals):
        raise TrackerUnavailableError(f"a process is writing to {directory}: wait for its end")
    if described is None and not any(True for _ in attempt.rows()):
        require_all_sent(directory)
        if outbox.is_offline(directory):
            outbox.mark_synced(directory, size)
        return f"{directory} has no rows: its process was killed while it opened the run"
    is_offline = outbox.is_offline(directory)
    if (attempt.journals or is_unsent(directory)) and not os.access(directory, os.W_OK):  # `wandb sync` does not say so
        text = f"{directory} cannot be written, and it must note what is sent: a read-only file system, or permissions"
        raise TrackerUnavailableError(text, is_outage=False)
    # The journals have the server that was set up where it was logged, which may be another one.
    place, kept = (place_of(attempt, described, is_set_up_here=is_here) for is_here in (is_offline, False))
    if not is_offline:
        require_server(directory, "WANDB_BASE_URL", place.server, vendor.session().settings.base_url)
    own = Left(kept, directory.parent, lambda other: other.directory == directory)
    if (column := roles.column_in(attempt)) is not None:
        text = _Numbered(place, own, column, described).send(together)
    elif is_offline:
        text = _send_offline(place, own, attempt, described)
    else:
        text = _send_rows(place, _with_online(own), directory, described)
    require_all_sent(directory)
    return text


class _Close:
    """The close of a run in the process that has logged it: how long it may take, and what is said with it.

    Attributes:
        run: The run as it is opened to send what is left; None before that.
        say_again: Called with that run, behind the rows.
    """

    def __init__(self, limit: EndLimit, say_again: Callable[[Any], object]) -> None:
        self.run: Any = None
        self.limit, self.say_again = limit, say_again
        self._upload: Upload | None = None

    def lasts(self) -> bool:
        """Whether there is time left."""
        return self.limit.lasts() if self._upload is None else self._upload.lasts()

    def opened(self, run: Any) -> None:
        """Take note of the run."""
        self.run, self._upload = run, Upload(run, self.limit)


def send_left(run: Any, limit: EndLimit, say_again: Callable[[Any], object]) -> bool:
    """Have another wandb-core send what this process has kept of its run, and end it with the status in its journal.

    Args:
        run: The run, which has ended, or whose wandb-core has died.
        limit: How long that may take.
        say_again: Called with the run as it is opened once more, behind the rows.

    Returns:
        Whether W&B has everything.
    """
    directory, place, close = outbox.run_directory(run), Place.of(run), _Close(limit, say_again)

    def send_all() -> None:
        with nullcontext() if run.id == forced_run_id() else vendor.outside_sweep():
            while not _send_in_process(directory, place, close):
                logger.warning("W&B: wandb-core has died while it sent what is left of run %s", run.id)

    is_done = False
    try:
        vendor.finish_while(close.lasts, run, send_all)
        is_done = True
    except TimeoutError:
        logger.warning("W&B: run %s was not sent completely: %s", run.id, limit.why)
    except Exception:  # tracker errors must not change the training's outcome
        logger.warning("W&B: run %s was not sent completely", run.id, exc_info=True)
    finally:
        if not is_done and close.run is not None:
            vendor.set_finished(close.run)
            vendor.restart_service(_CUT_S)
    return is_done


def _send_in_process(directory: Path, place: Place, close: _Close) -> bool:
    """Send what is left of a run once. Returns False if wandb-core has died meanwhile."""
    vendor.drop_unusable_service()
    attempt = attempt_at(directory)
    own = Left(place, directory.parent, lambda other: other.directory == directory)
    try:
        if (column := roles.column_in(attempt)) is not None:
            _Numbered(place, own, column, None, close).send(())
        else:
            outbox.await_count(directory.parent, place.run_id, close.limit.until)
            _send_rows(place, _with_online(own), directory, None, close)
    except Exception as error:
        if isinstance(error, vendor.service_gone(close.run, error)) or type(error).__module__.startswith(_OF_SERVICE):
            time.sleep(_POLL_S)
            return False
        raise
    return True


def _with_online(own: Left) -> Left:
    """Return what attempts have left: that one, and those that were online, of which a later one has the rest."""
    known = own.directories
    return Left(own.place, own.parent, lambda other: other.directory in known or _is_left_online(other))


def _is_left_online(attempt: AttemptOnDisk) -> bool:
    return bool(attempt.journals) and not outbox.is_offline(attempt.directory)


def require_unwritten(found: vendor.Stored | None, parent: Path, run_id: str) -> None:
    """Refuse a run that a process elsewhere has open: one of both would overwrite the other's rows.

    A run that is "running", and whose last row is of an attempt on this disk, was killed here.

    Args:
        found: What W&B has of the run.
        parent: The directory of the runs on this disk.
        run_id: The run's id.

    Raises:
        TrackerUnavailableError: A process elsewhere may have it open.
    """
    if found is None or found.state != "running" or found.last_at is None:
        return
    here = [path for path in outbox.directories_of(parent, run_id) if not may_be_written(path)]
    if not any(found.last_at in attempt_at(path).logged_at() for path in here):
        raise TrackerUnavailableError(
            f"W&B shows run {run_id} as running, with rows that no ended process has logged here: what is sent now "
            "could take the place of rows. Send it when that process has ended: W&B shows a killed one as crashed "
            "after some minutes"
        )


def _send_offline(place: Place, own: Left, attempt: AttemptOnDisk, described: Any) -> str:
    """Send what the only writer of a run has logged offline."""
    directory, files = attempt.directory, Files(place, own)
    was_sent = outbox.is_synced(directory)
    # Attempts online that were killed: their rows have places in the run, and may be a part of the offline ones.
    online = Left(place, own.parent, _is_left_online)
    if online.attempts or online.is_open:
        last = (online.directories or [directory])[-1]
        _send_rows(place, online, last, datastore.description(last))
    reader = vendor.Reader(place)
    if not was_sent and reader.stored() is not None:
        outbox.await_count(directory.parent, place.run_id, time.monotonic() + outbox.LATE_S)
    if not was_sent and not _is_next(attempt, described, reader.stored()):
        from flyteplugins_tracking.trackers.wandb.live import LiveRun

        run = LiveRun([directory])
        run.finish([directory])
        return f"sent {run.rows} rows of run {place.run_id}"
    rows = 0 if described is None else _sync(directory, place)
    missing = sum(1 for _ in (attempt.missing() if outbox.is_synced(directory) else attempt.rows()))
    if missing:
        _send_rows(place, own, directory, described)
    attempt.remove_journals()
    files.send_rest(directory)
    if was_sent and not missing:
        return f"{directory} has nothing that is not sent yet"
    return f"sent {directory}: W&B has the {rows + missing} rows"


def _is_next(attempt: AttemptOnDisk, described: Any, found: vendor.Stored | None) -> bool:
    """Whether `wandb sync` can put all of an attempt behind what W&B has of its run.

    It sends all rows of a file, has the run end as that did, and starts at the run's first row if the client was not
    told to resume the run.
    """
    if outbox.starting_step(attempt.directory, of_live=True) is not None or outbox.is_marked(attempt.directory):
        return False
    if found is None or found.last_step < 0:
        return True
    times, last_at = attempt.logged_at(), found.last_at
    was_begun = last_at in times and outbox.starting_step(attempt.directory) is not None
    return was_begun or (described is not None and described.resume and (last_at is None or last_at < min(times)))


def _sync(directory: Path, place: Place) -> int:
    """Send what was logged offline: of W&B, only the client can do that. Its exit status does not tell what arrived.

    Returns:
        The number of rows in the file.

    Raises:
        TrackerUnavailableError: W&B does not count them.
    """
    size, steps = outbox.file_size(directory), [row.step for row in datastore.rows(directory)]
    before = vendor.Reader(place).stored()
    require_unwritten(before, directory.parent, place.run_id)
    if _was_sent(directory, steps, before):
        outbox.mark_synced(directory)
    wanted = len(steps) if outbox.is_synced(directory) or before is None else before.rows + len(steps)
    _run_sync(directory)
    until = time.monotonic() + _CONFIRMED_S
    while (found := vendor.stored_run(place)) is None or found.rows < wanted:
        if time.monotonic() > until:
            count = 0 if found is None else found.rows
            raise TrackerUnavailableError(
                f"W&B has not confirmed {directory}: it counts {count} rows of run {place.run_id}, and should count "
                f"{wanted}. Keep the directory, and look again: {how_to_send(str(directory))}. If the count stays, "
                f"send it again: wandb sync --include-synced {shlex.quote(str(directory))}"
            )
        time.sleep(_POLL_S)
    outbox.mark_synced(directory, size)  # the client does not, if the end of the file is damaged
    exit_code = datastore.exit_code(directory)  # `wandb sync` before 0.28 tells W&B 0 in any case
    if exit_code is not None and (exit_code == 0) != (found.state == "finished"):
        with _opened(place, {}, exit_code):
            pass
    return len(steps)


def _run_sync(directory: Path, **variables: str) -> None:
    """Run `wandb sync`.

    Raises:
        TrackerUnavailableError: It has failed. If it succeeds, W&B may still lack rows.
    """
    command = [sys.executable, "-c", _WANDB, "sync", *(["--yes"] if _is_sync_of_core() else []), str(directory)]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:  # noqa: S603 our own
        while process.poll() is None:
            _note_sending(directory)
            time.sleep(_POLL_S)
    if process.returncode:
        raise TrackerUnavailableError(f"{directory} was not sent: wandb sync has failed, as it has printed")


def _note_sending(directory: Path) -> None:
    """Note that rows were sent just now, which W&B may count late."""
    with suppress(OSError):
        os.utime(directory.joinpath(*outbox.LOG))


def _is_sync_of_core() -> bool:
    """Whether wandb-core does what `wandb sync` is to do."""
    return numbers(installed_version("wandb") or "") >= numbers(_SYNC_OF_CORE_SINCE)


def _was_sent(directory: Path, steps: Sequence[int], stored: vendor.Stored | None) -> bool:
    """Whether `wandb sync` has sent the whole file of an attempt that was killed, and not marked it.

    It marks no file whose end is torn, and sends such a file again each time.
    """
    if stored is None or not steps or datastore.exit_code(directory) is not None:
        return False
    begun = outbox.starting_step(directory)
    return begun is not None and stored.last_step >= begun + max(steps)


def _send_rows(place: Place, left: Left, directory: Path, described: Any, close: _Close | None = None) -> str:
    """Open the run, log what W&B lacks of it, and end it. If that is killed, its rows are in a directory beside."""
    if left.is_open:
        raise TrackerUnavailableError(f"a process is writing to run {place.run_id}: wait for its end")
    found, exit_code, files = vendor.stored_run(place), left.exit_code, Files(place, left)
    if close is None:
        require_unwritten(found, left.parent, place.run_id)
    left.compare(found)
    later = LaterEnd.of(left.attempts, found) if left.attempts and close is None else None
    files.ask(found)
    # A run that nobody has ended may be continued by a job elsewhere.
    is_ended = found is not None and (found.state != "running" or exit_code is None)
    text = f"W&B has all of {directory}: run {place.run_id}"
    if close or found is None or not is_ended or files or any(True for _ in left.rows(found.last_step + 1)):
        if later is not None:
            exit_code = later.exit_code
        if exit_code is None:
            exit_code = 1 if found is None else STATES.get(found.state, 1)
        own = directory.with_name(f"run-{time.strftime('%Y%m%d_%H%M%S')}-{place.run_id}")
        is_new = found is None and described is not None
        arguments = datastore.arguments_of(described) if is_new else {}
        with ExitStack() as undo, _opened(place, arguments, exit_code, close=close) as run:
            box = WandbOutbox(run, own, has_one_writer=True, step_metric=left.step_metric, exit_code=exit_code)
            undo.callback(box.close)  # one that is open is not read
            files.send(run)
            count = box.send(left)
            if later is not None:
                later.restore(run)
        box.clear()
        with suppress(OSError):
            own.rmdir()
        _note_sending(directory)
        if later is not None:
            later.path.unlink(missing_ok=True)
        text = f"sent {count} rows of run {place.run_id}"
    left.clear()
    files.require_sent(directory)
    return text


def _is_later(last_at: float | None, times: Collection[float]) -> bool:
    """Whether a row was logged after all rows of these times."""
    return last_at is not None and last_at > max(times, default=last_at)


def _logged_at(attempts: Iterable[AttemptOnDisk]) -> set[float]:
    """Return the times of all rows of attempts. Reads their files."""
    return set[float]().union(*(one.logged_at() for one in attempts))


class LaterEnd(NamedTuple):
    """How a later attempt has left a run that gets rows of an earlier one: it is left so again.

    It is in a file until all is sent: the run's state, config and summary change meanwhile.

    Attributes:
        path: The file, in the directory of the first of the earlier attempts.
        exit_code: The status with which the run has ended.
        config: Its config.
        summary: Its summary, with the time of its last row.
    """

    path: Path
    exit_code: int
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, attempts: Sequence[AttemptOnDisk], found: vendor.Stored | None) -> LaterEnd | None:
        """Return it for attempts that are sent; None if one of them is the run's last one."""
        if found is None:
            return None
        path, times, last_at = attempts[0].directory / _LATER, _logged_at(attempts), found.last_at
        values = json.loads(own_text(path, _LONGEST_LATER) or "null")
        kept = None if values is None else cls(path, **values)
        if last_at is None or last_at in times or any(one.is_open() for one in attempts):
            return kept
        if not _is_later(last_at, times):
            return None
        if kept is not None and kept.summary.get("_timestamp") == last_at:
            return kept
        made = cls(path, STATES.get(found.state, 1), dict(found.config), found.plain_summary)
        replace_whole(path, encode({"exit_code": made.exit_code, "config": made.config, "summary": made.summary}))
        return made

    def restore(self, run: Any) -> None:
        """Give an open run its config and summary."""
        run.config.update(self.config, allow_val_change=True)
        vendor.forget(run, FAILURE_KEYS)
        vendor.update_summary(run, self.summary)


class Files:
    """The files and artifacts of attempts that did not send everything."""

    def __init__(self, place: Place, left: Left) -> None:
        """Look for them.

        Args:
            place: The run where it is sent, which alone is asked. The server that the job knew may be another one.
            left: The attempts.
        """
        self._place, self._kept = place, left.place
        self._artifacts, self._saved = left.artifacts(), left.saved_files((*left.online, *left.offline))
        self._lacking: list[vendor.KeptArtifact | str] = []

    def __bool__(self) -> bool:
        return bool(self._artifacts or self._saved)

    def ask(self, found: vendor.Stored | None) -> None:
        """Leave out the files that W&B has."""
        names = list(self._saved) if found is None else found.lacks(list(self._saved))
        self._saved = {name: self._saved[name] for name in names}

    def send(self, run: Any) -> None:
        """Send them with an open run."""
        kind = type(run)
        self._lacking += [name for name, files in self._saved.items() if not outbox.save_again(run, kind, files, name)]
        # One after the other, as they were logged: the last one of a name is the latest.
        self._lacking += [one for one in self._artifacts if not vendor.was_sent(one.send(run))]

    def send_rest(self, directory: Path) -> None:
        """Send what `wandb sync` has not: it does not tell. W&B takes no artifact twice."""
        found = vendor.stored_run(self._place) if self else None
        self.ask(found)
        if found is not None and self:
            exit_code = datastore.exit_code(directory)
            if exit_code is None or _is_later(found.last_at, attempt_at(directory).logged_at()):
                exit_code = STATES.get(found.state, 1)
            with _opened(self._place, {}, exit_code) as run:
                self.send(run)
        self.require_sent(directory)

    def require_sent(self, directory: Path) -> None:
        """Keep the artifacts that could not be sent, so that it is said again.

        Raises:
            TrackerUnavailableError: W&B does not have everything.
        """
        self._lacking += self._not_taken()
        if not self._lacking:
            return
        outbox.keep_artifacts(directory, self._kept, [one for one in self._lacking if not isinstance(one, str)])
        names = [one if isinstance(one, str) else f"artifact {one.name}" for one in self._lacking]
        raise TrackerUnavailableError(
            f"{directory} was sent, but for files and artifacts that W&B lacks: {listed(names)}. They are not on this "
            "disk, or W&B does not take them. Log them again, or remove the directory to give them up"
        )

    def _not_taken(self) -> list[str]:
        """Return the files that were sent just now, and that W&B has not got."""
        sent, until = [name for name in self._saved if name not in self._lacking], time.monotonic() + _CONFIRMED_S
        while sent and ((found := vendor.stored_run(self._place)) is None or (sent := found.lacks(sent))):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        return sent


class _Numbered:
    """Sends a directory of a run with several writers, which may write to it meanwhile. It is sent as one of them."""

    def __init__(self, place: Place, left: Left, column: str, described: Any, close: _Close | None = None) -> None:
        """Look at what W&B has of the run.

        Args:
            place: The run.
            left: The directory.
            column: The column with the numbers of its rows.
            described: The record with which the run was opened, if there is one.
            close: The close of the run, in the process that has logged it.
        """
        (self._attempt,), self._close = left.attempts, close
        self._directory, self._label = self._attempt.directory, label_in(self._attempt.directory)
        self._place, self._left, self._column, self._described = place, left, column, described
        self._role, self._rows, self._files = (
            roles.role_of(column),
            roles.NumberedRows(left, column),
            Files(place, left),
        )
        self._found = vendor.stored_run(place)
        # The status with which the run is to end. Of a rank that comes after the run's end: that with which it has.
        ended_with = None if self._found is None else STATES.get(self._found.state)
        # Of all its rows, in any order: what was sent from another rank's directory just now comes behind later rows.
        logged_at = self._found.values("_timestamp", column) if self._found and ended_with is not None else []
        # Whether its run has gone on after it. Then it is left as that has left it.
        self._is_past = _is_later(max(logged_at, default=None), _logged_at(left.attempts))
        self._is_late = ended_with is not None and (bool(self._label) or self._is_past)
        is_ends = not self._label and not self._is_past
        self._exit_code = left.exit_code if is_ends else ended_with if self._role == OWNER else None

    def send(self, together: Collection[Path]) -> str:
        """Send it, beside other directories, and return what W&B has now, in words.

        Raises:
            TrackerUnavailableError: The run's primary or owner has not made it yet, or W&B has not confirmed the rows.
        """
        self._require_run(together)
        self._await_late_rows()
        count = len(set(self._numbers(self._lacking())))
        is_whole = count == len(self._rows) and self._attempt.is_unsent_file() and self._described is not None
        if is_whole and not self._is_late:  # W&B would show the run as running again
            self._sync()
        self._log_rest()
        self._left.clear()
        self._end_again()
        self._files.require_sent(self._directory)
        run_id = self._place.run_id
        return f"sent {count} rows of run {run_id}" if count else f"W&B has all of {self._directory}: run {run_id}"

    def _require_run(self, together: Collection[Path]) -> None:
        run_id, is_rank = self._place.run_id, self._role == OWNER
        of_run = [path for path in together if outbox.run_id_of(path) == run_id]
        if self._found is not None or not self._label or (is_rank and not all(map(label_in, of_run))):
            return
        part, other = "this rank", "job's primary rank"
        if not is_rank:
            part, other = f"role {self._role!r}", "job with roles=[...]"
        raise TrackerUnavailableError(
            f"{self._directory} was not sent: W&B has no run {run_id}, which {part} has joined. Send the directory of "
            f"the {other} first"
        )

    def _await_late_rows(self) -> None:
        late_s = self._rows.late_s()
        if self._found is not None and late_s:
            text = "W&B: run %s: waiting %.0f s, as rows that were sent just now may not be found before"
            logger.warning(text, self._place.run_id, late_s)
            time.sleep(late_s)

    def _sync(self) -> None:
        """Send the whole file, with its config, summary, console and system metrics, if wandb-core does that."""
        if not _is_sync_of_core():
            return
        _run_sync(
            self._directory,
            WANDB_MODE="shared",
            WANDB_X_LABEL=self._label or self._role,
            WANDB_X_PRIMARY=str(not self._label),
            WANDB_X_UPDATE_FINISH_STATE=str(not self._label),
        )
        self._require(set(self._numbers(datastore.rows(self._directory))))

    def _log_rest(self) -> None:
        """Log the rows that W&B lacks, send files that it lacks, and end the run if it is not ended."""
        self._found = found = vendor.stored_run(self._place)
        self._files.ask(found)
        is_open = found is None or (self._exit_code is not None and found.state == "running")
        if not (is_open or self._close or self._files or any(True for _ in self._lacking())):
            return
        is_new = found is None and self._described is not None
        arguments = datastore.arguments_of(self._described) if is_new else {}
        with self._opened(arguments, ends_run=is_open or not self._label) as run:
            self._files.send(run)
            outbox.log_again(run, type(run), self._lacking(), None, self._left.media)
            if self._is_past and found is not None:
                vendor.update_summary(run, found.plain_summary)
        self._require(set(self._numbers(self._rows.lacking())))

    def _end_again(self) -> None:
        """End the run as it had ended, if W&B shows it as running because of what was sent."""
        if self._role != OWNER:
            roles.end_again(self._place, self._role)
        elif self._is_late and (found := vendor.stored_run(self._place)) is not None and found.state == "running":
            with self._opened({}, ends_run=True):
                pass

    def _opened(self, arguments: Mapping[str, Any], *, ends_run: bool) -> AbstractContextManager[Any]:
        shared = roles.shared_settings(self._role, ends_run=ends_run and self._exit_code is not None)
        return _opened(self._place, arguments, self._exit_code or 0, shared, self._directory, self._close)

    def _lacking(self) -> Iterator[Row]:
        """Yield the rows that W&B lacks."""
        is_there = self._found is not None
        self._rows.look(roles.numbers_at(self._place, self._column, self._rows.since) if is_there else ())
        return self._rows.lacking()

    def _numbers(self, rows: Iterable[Row]) -> Iterator[Any]:
        return (row.values.get(self._column) for row in rows)

    def _require(self, wanted: Collection[Any]) -> None:
        """Wait until W&B has the rows with these numbers."""
        until, self._found = time.monotonic() + _CONFIRMED_S, vendor.stored_run(self._place)
        while not set(self._numbers(self._lacking())).isdisjoint(wanted):
            if time.monotonic() > until:
                text = f"W&B has not confirmed all rows of {self._directory}. Send it again later"
                raise TrackerUnavailableError(f"{text}: {how_to_send(str(self._directory))}")
            time.sleep(_POLL_S)
            self._found = self._found or vendor.stored_run(self._place)


@contextmanager
def _opened(
    place: Place,
    described: Mapping[str, Any],
    exit_code: int,
    shared: Mapping[str, Any] | None = None,
    parent: Path | None = None,
    close: _Close | None = None,
) -> Iterator[Any]:
    """Open the run for the body, and end it with this status. The client's files are below `parent` meanwhile."""
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        # With its host, as a run that goes on there has it: the service shows it as running until it is ended.
        here = {} if close is None else {"init_timeout": max(1.0, close.limit.left_s), "x_disable_machine_info": False}
        before = vendor.open_runs()
        with vendor.opening.lock:
            run = vendor.open_to_send(place, described, folder, {**(shared or {}), **here})
        try:
            if close is not None:
                close.opened(run)
            yield run
            if close is not None:
                close.say_again(run)
            if exit_code == 0 and shared is None:
                vendor.forget(run, FAILURE_KEYS)
            if exit_code == TERMINATED:
                run.mark_preempting()
            run.finish(exit_code=exit_code)
        except BaseException:
            others = [run for run in vendor.open_runs() if run.id != place.run_id]  # other threads have opened them
            vendor.end_interrupted(place.run_id, [*before, *others], 1, _CUT_S)
            raise


def place_of(attempt: AttemptOnDisk, described: Any, is_set_up_here: bool) -> Place:
    """Return which run it is: what the journal says, or else of the server and entity that are set up here.

    Args:
        attempt: The attempt.
        described: The record with which the run was opened, if there is one.
        is_set_up_here: Whether the server is that which is set up here in any case, as for `wandb sync`.
    """
    kept = Place(*attempt.journals[0].header["place"]) if attempt.journals else None
    if kept is not None and not is_set_up_here:
        return kept
    of_run = described or kept
    assert of_run is not None
    return Place(without_credentials(vendor.session().settings.base_url), of_run.entity, of_run.project, of_run.run_id)
