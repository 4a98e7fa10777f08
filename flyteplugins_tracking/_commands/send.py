"""`flyteplugins-tracking send DIRECTORY...`: send what local directories have and their services have not.

A directory is that of a run, or one with runs below it. The trackers' own variables say where the services are.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import cast

from flyteplugins_tracking._commands.directories import SENT, Found, require_unwatched
from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking._runs.opening import require
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.files import age_s, is_own_file, touch_own
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking.errors import TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.base import NoSigterm, RunRequest
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.journal import StoredJournal, require_all_sent, stored
from flyteplugins_tracking.trackers.kept import SENT_LATER, OutboxHandle
from flyteplugins_tracking.trackers.outbox import but_for, how_to_send, require_server, servers_in
from flyteplugins_tracking.trackers.registry import find_tracker
from flyteplugins_tracking.trackers.wandb import attempts as wandb_files
from flyteplugins_tracking.trackers.wandb import sender, vendor

_LONGEST_ID, _LONGEST_S = 200, 3.2e7
# The arguments that only the job's own process takes. Settings may name a proxy for the key, or files to upload. The
# variables here name the servers: they are the same, or the run is refused.
_OF_ITS_JOB = ("settings", "webhook_url", "tracking_uri", "server_url")
# How long ago a killed process of another machine has written a journal at least, in seconds.
_WRITTEN_S = 120.0
_EXAMPLE = "example: flyteplugins-tracking send wandb; with --watch, on a login node, while jobs log to W&B there"


def main(arguments: list[str]) -> int:
    """Send the run of each directory, and return the exit status of the process. It can be repeated."""
    parser = argparse.ArgumentParser("flyteplugins-tracking send", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="send what is there, and end: the default")
    how.add_argument("--watch", action="store_true", help="stay, and send what runs of W&B log, while they log it")
    parser.add_argument("--interval", type=float, default=15.0, metavar="S", help="with --watch: seconds between looks")
    killed_help = "with --watch: seconds after its last sign of life when a run's process counts as killed"
    parser.add_argument("--killed-after", type=float, default=120.0, metavar="S", help=killed_help)
    until_help = "with --watch: end when no run is open and all is sent"
    parser.add_argument("--until-done", action="store_true", help=until_help)
    given = parser.parse_args(arguments)
    if not (0 < given.interval <= _LONGEST_S and 0 < given.killed_after <= _LONGEST_S):
        parser.error("--interval and --killed-after are seconds, more than 0, and a year at most")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of directories may have characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ["WANDB_MODE"] = "online"  # that of the jobs may be set here too
    try:
        if given.watch:
            from flyteplugins_tracking._commands import watch

            watch.watch(given.directories, given.interval, given.killed_after, until_done=given.until_done)
        found, failed = Found(given.directories), list[str]()
        for text in chain(found.texts, _send(list(found.runs.values()), failed)):
            sys.stdout.write(f"{printable(text)}\n")
        if problems := [*failed, *found.away.values()]:
            raise TrackerUnavailableError("\n".join(problems))
    except (TrackingError, ValueError, OSError) as error:
        sys.stderr.write(f"cannot send: {printable(str(error))}\n")
        return 1
    return 0


def _send(paths: Sequence[Path], failed: list[str]) -> Iterator[str]:
    """Send each run. Yields what was sent, in words, and adds what was not to `failed`."""
    of_wandb = wandb_files.in_order(path for path in paths if wandb_files.is_run_directory(path))
    others = [path for path in paths if path not in of_wandb]
    for path in [*others, *of_wandb]:
        try:
            if path in of_wandb:
                require_unwatched(path)
                yield sender.send(path)
            else:
                yield send_directory(path)
        except Exception as error:  # it does not keep the others from being sent
            if path in of_wandb:  # before 0.31, this process would wait at its exit for the end of the run
                with suppress(TrackingError):
                    vendor.kill_service()
            is_said = isinstance(error, (TrackingError, ValueError))
            failed.append(str(error) if is_said else f"{path} was not sent: {type(error).__name__}: {error}")


def send_directory(directory: Path) -> str:
    """Send a run of MLflow, Pluto or Trackio from its directory, and remove what is sent. Returns that in words.

    Raises:
        TrackerUnavailableError: Not everything was sent, since the service still cannot be used, for one.
        ValueError: `directory` is not that of a run.
    """
    journals = stored(directory)
    if any(journal.is_open() or _may_be_written_elsewhere(journal) for journal in journals):
        raise TrackerUnavailableError(f"a process is writing to {directory}, or was just now: wait for its end")
    is_begun = is_own_file(directory / SENT)
    # A killed process whose rows have all arrived has left a journal without lines, and a run without an end.
    left = [one for one in journals if not is_begun or any(True for _ in one.lines())]
    if not left and not is_begun:
        raise ValueError(
            f"{directory} has nothing of a run" if directory.is_dir() else f"{directory} is not a directory"
        )
    _require_sendable(directory, left)
    touch_own(directory / SENT)
    attempts = list(_attempts_of(left))
    rejected = sum(_send_attempt(attempt, ends_run=attempt is attempts[-1]) for attempt in attempts)
    _remove_empty(directory)
    if stored(directory):
        command = how_to_send(str(directory))
        raise TrackerUnavailableError(f"a part of the run could not be sent. Send it later: {command}")
    require_all_sent(directory)
    if rejected:
        raise TrackerUnavailableError(f"{directory} was sent{but_for(rejected)}", is_outage=False)
    return (
        f"sent {directory} as run {left[0].header['id']}" if left else f"{directory} has nothing that is not sent yet"
    )


def _may_be_written_elsewhere(journal: StoredJournal) -> bool:
    """Whether a process of another machine has just written it: its lock may not be seen here (NFS with nolock)."""
    is_here = journal.header.get("host", socket.gethostname()) == socket.gethostname()
    if is_here or age_s(journal.path) > _WRITTEN_S:
        return False
    return not any("exit_code" in line for line in journal.lines(also_sent=True))


def _require_sendable(directory: Path, journals: Iterable[StoredJournal]) -> None:
    """Refuse journals of a server that is not set up here, of a third party's tracker, or without a usable id.

    A server that the job's variables named may have another address here: then this process has a variable too.

    Raises:
        TrackerUnavailableError: There is one.
        ConfigError: An id cannot be that of a run.
    """
    for journal in journals:
        check_run_id("id", journal.header["id"], longest=_LONGEST_ID)
        of_job = journal.header.get("servers")
        named = of_job if isinstance(of_job, dict) else {}
        missing = {one: str(address) for one, address in named.items() if not os.environ.get(one)}
        for variable, address in {**missing, **servers_in(journal.header["arguments"])}.items():
            require_server(directory, variable, address, os.environ.get(variable))
        if (tracker := journal.header["tracker"]) not in SENT_LATER:
            text = f"{directory} is of tracker={tracker!r}: its own documentation says how its runs are sent"
            raise TrackerUnavailableError(text, is_outage=False)


def _remove_empty(directory: Path) -> None:
    """Remove what has nothing to send."""
    for journal in stored(directory):  # without lines: of a process that was killed when it made it, or had sent all
        if not journal.is_open() and not any(True for _ in journal.entries()):
            journal.remove()


def _attempts_of(journals: Sequence[StoredJournal]) -> Iterator[list[StoredJournal]]:
    """Yield the journals that are sent together: those of the ranks of one attempt, its primary's first."""
    for attempt in dict.fromkeys(journal.header["attempt"] for journal in journals):
        together = [journal for journal in journals if journal.header["attempt"] == attempt]
        primaries = [journal for journal in together if journal.header["primary"]]
        yield [*primaries[:1], *(journal for journal in together if journal not in primaries)]
        for primary in primaries[1:]:  # of a later job, which does not count attempts: the last job's end is the run's
            yield [primary]


def _send_attempt(journals: Sequence[StoredJournal], *, ends_run: bool) -> int:
    """Send the journals of one attempt's ranks. The first one's end is the run's, if this is the last attempt.

    Returns:
        How many rows the service has rejected.
    """
    handle = _open_run(journals)
    handle.ends_run = ends_run
    handle.finish(handle.earlier_exit_code)
    return handle.rejected_rows


def _open_run(earlier: Sequence[StoredJournal]) -> OutboxHandle:
    """Open the run of these journals, which are of one attempt, at its service.

    Raises:
        TrackerUnavailableError: The service cannot be used.
    """
    header = earlier[0].header
    tracker = find_tracker(header["tracker"])
    require(tracker)
    arguments = {name: value for name, value in header["arguments"].items() if name not in _OF_ITS_JOB}
    config = TrackingConfig.from_arguments({**arguments, "tracker": header["tracker"]})
    run_id, group, is_primary = (header[name] for name in ("id", "group", "primary"))
    plan = RunPlan(True, run_id, group, is_primary, writers=1)
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
            sigterm=NoSigterm(),
            deadline=time.monotonic() + config.init_timeout_s,
            earlier=earlier,
        )
    )
    return cast("OutboxHandle", handle)
