"""Runs that are kept in local files while their service cannot be used, and are sent to it later.

This is for services whose own clients have no such files. A run is a directory of JSON lines, with a file for each
process that has written to it: a header, the rows, the calls on the run object, and the run's end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.plan import RunPlan
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker, Unwatched
from flyteplugins_tracking.trackers.client import ClientHandle, Run
from flyteplugins_tracking.trackers.registry import find_tracker

logger = logging.getLogger(__name__)

# The parent of the runs' directories, in the job's working directory.
FOLDER = "tracking-offline"
_SENT = ".sent"
# The arguments that mean nothing to the process that sends the run later.
_OF_THIS_JOB = ("secret", "tracker", "primary_rank")


def open_or_keep(request: RunRequest, tracker: Tracker, open_run: Callable[[], ClientHandle]) -> ClientHandle:
    """Open the run by `open_run`. If the service cannot be used and `if_unavailable` allows it, open a local run.

    Raises:
        TrackerUnavailableError: The service cannot be used, and `if_unavailable` is "raise".
    """
    try:
        return open_run()
    except TrackerUnavailableError as error:
        if request.config.if_unavailable == "raise":
            raise
        handle = LocalHandle(request, tracker)
        if request.plan.primary or (request.node_leader is not None and request.leads_node):
            logger.warning(
                "%s This run is logged to files. Send it when %s answers: %s",
                error,
                tracker.title,
                handle.how_to_send(handle.directory),
            )
        return handle


class Journal:
    """One process's file of a run. Each line is written immediately, so that it outlives the process."""

    def __init__(self, request: RunRequest, tracker: Tracker, run_id: str) -> None:
        """Prepare the file of the run `run_id`. The first line creates it."""
        self.directory = os.path.abspath(os.path.join(FOLDER, f"{tracker.name}-{run_id}"))
        self._header = _header(request, tracker, run_id)
        attempt, rank = self._header["attempt"], request.info.rank if request.info else 0
        # Sorted by name, the files are in the order of the attempts, each attempt's primary rank first.
        who = f"{0 if request.plan.primary else 1}-rank-{rank}-{secrets.token_hex(3)}"
        self._path = os.path.join(self.directory, f"{attempt:04}-{int(time.time()):x}-{who}.jsonl")
        self._file: Any = None

    def row(self, row: Mapping[str, Any], step: Any, time_s: float | None = None) -> None:
        """Keep a row."""
        self._add({"row": row, "step": step, "time": time_s or time.time()})

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep a call of a method of the run object."""
        self._add({"call": method, "args": args, "kwargs": kwargs})

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Keep what the run tells of its job: see `Handle.record_event`."""
        self._add({"event": name, "values": dict(values), "text": text})

    def end(self, exit_code: int) -> None:
        """Keep the run's end."""
        self._add({"exit_code": exit_code})

    def _add(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            os.makedirs(self.directory, exist_ok=True)
            self._file = open(self._path, "a")  # noqa: SIM115 it is open until the process ends
            self._file.write(json.dumps(self._header, default=str) + "\n")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class LocalRun(Run):
    """The object that `get_run` returns for a run in files. Calls on it are kept, and made when the run is sent."""

    def __init__(self, handle: LocalHandle) -> None:
        super().__init__(handle)
        self._journal = handle.journal
        self._warn_once = WarnOnce(logger)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._keep(name, args, kwargs)

    def _keep(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            self._journal.call(name, args, kwargs)
        except TypeError:
            text = "run %s is logged to files as JSON: a call of %s() is lost, since JSON cannot hold its arguments"
            self._warn_once(name, text, self.id, name)


class LocalHandle(ClientHandle):
    """An open run that is kept in files."""

    def __init__(self, request: RunRequest, tracker: Tracker) -> None:
        super().__init__(request, tracker.title)
        self.journal = Journal(request, tracker, self.id)
        self.directory = self.journal.directory
        self.run = LocalRun(self)

    @property
    def url(self) -> str | None:
        """A run in files has no page."""
        return None

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        row = {key: value for key, value in row.items() if self._fits(key, value)}
        if row:
            self.journal.row(row, step.item() if callable(getattr(step, "item", None)) else step)

    def _fits(self, key: str, value: Any) -> bool:
        if isinstance(value, (int, float, str)):
            return True
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            self._values.warn_once(
                key, f"a value of type {type(value).__name__} is left out: the run is logged to files as JSON"
            )
            return False
        return True

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.journal.event(name, values, text)

    def end(self, exit_code: int) -> None:
        self.journal.end(exit_code)

    def unsent(self) -> Sequence[str]:
        return [self.directory]

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory)


def how_to_send(directory: str) -> str:
    """Return the command that sends a run from its directory."""
    return f"python -m flyteplugins_tracking.send {directory}"


def send(directory: Path) -> str:
    """Send a run from its directory, and mark its files as sent.

    Returns:
        The id of the run.

    Raises:
        TrackerUnavailableError: The service still cannot be used, and no file is marked; or the service has not taken
            all rows, and the rest is kept in `directory`.
        ValueError: `directory` has no files to send.
    """
    there = {path: _lines(path) for path in sorted(directory.glob("*.jsonl"))}
    files = {path: lines for path, lines in there.items() if lines}
    if not files:
        raise ValueError(f"{directory} has no files of a run that are not sent yet")
    kept_again = {directory}
    for paths in _attempts(files):
        kept_again |= _send_attempt([files[path] for path in paths])
        _mark_as_sent(paths)
    _mark_as_sent(there.keys() - files.keys())
    unsent = sorted(str(path) for path in kept_again if any(path.glob("*.jsonl")))
    if unsent:
        raise TrackerUnavailableError(
            f"a part of the run could not be sent. Send it later: {how_to_send(' '.join(unsent))}"
        )
    return str(next(iter(files.values()))[0]["id"])


def _lines(path: Path) -> list[Any]:
    """Return the complete lines of a file: a process that was killed, or a full disk, leaves an incomplete one."""
    lines = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                logger.warning("%s: line %d is incomplete, and is left out", path, number)
    is_one = bool(lines) and isinstance(lines[0], dict) and "tracker" in lines[0]
    return lines if is_one else []


def _mark_as_sent(paths: Iterable[Path]) -> None:
    for path in paths:
        path.rename(path.with_name(path.name + _SENT))


def _attempts(files: Mapping[Path, Sequence[Any]]) -> Iterator[list[Path]]:
    """Yield the files that are sent together: those of the ranks of one attempt."""
    for attempt in dict.fromkeys(lines[0]["attempt"] for lines in files.values()):
        headers = {path: lines[0] for path, lines in files.items() if lines[0]["attempt"] == attempt}
        primaries = [path for path, header in headers.items() if header["primary"]]
        yield [path for path in headers if path not in primaries[1:]]
        for primary in primaries[1:]:  # of a later job, which does not count attempts: the last job's end is the run's
            yield [primary]


def _send_attempt(files: Sequence[list[Any]]) -> set[Path]:
    """Send the files of one attempt's ranks. The primary opens first and ends last: its end is the run's.

    Returns:
        The directories in which the tracker may have kept rows again.
    """
    in_order = sorted(files, key=lambda lines: not lines[0]["primary"])
    opened = [(_open(lines[0]), lines[1:]) for lines in in_order]
    opened[0][0].ends_run = True
    for handle, lines in opened:
        _replay(handle, lines)
    for handle, lines in reversed(opened):
        handle.finish(next((line["exit_code"] for line in reversed(lines) if "exit_code" in line), 1))
    return {Path(kept) for handle, _ in opened for kept in handle.unsent()}


def _header(request: RunRequest, tracker: Tracker, run_id: str) -> dict[str, Any]:
    arguments = {name: value for name, value in request.config.arguments.items() if name not in _OF_THIS_JOB}
    return {
        "tracker": tracker.name,
        "id": run_id,
        "group": request.plan.group,
        "primary": request.plan.primary,
        "attempt": request.run_metadata.get("restart_count", 0) + request.run_metadata.get("attempt_number", 0),
        "arguments": {**arguments, "run_mode": "auto", "if_unavailable": "raise", "rank_prefix": False},
        "run_metadata": dict(request.run_metadata),
    }


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


def _replay(handle: ClientHandle, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        if "row" in line:
            handle.replay(line["row"], line["step"], line["time"])
        elif "call" in line:
            _call(handle, line["call"], line["args"], line["kwargs"])
        elif "event" in line:
            handle.record_event(line["event"], line["values"], line["text"])


def _call(handle: ClientHandle, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Repeat a kept call. A call that can never succeed must not keep the rest from being sent."""
    try:
        getattr(handle.run, name)(*args, **kwargs)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        logger.warning(
            "run %s: the kept call of %s() fails, and is lost: %s: %s", handle.id, name, type(error).__name__, error
        )
    except Exception as error:
        raise TrackerUnavailableError(
            f"the kept call of {name}() has failed: {type(error).__name__}: {error}"
        ) from error
