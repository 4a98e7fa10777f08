"""Runs kept in local files while their service is not there, and how they are sent to it later.

For services whose own clients have no such files. A run is a directory of JSON lines, a file for each process that has
written to it: what the run was to be, its rows, what was called on it, and its end.
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
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker, Unwatched
from flyteplugins_tracking.trackers.client import ClientHandle, Run
from flyteplugins_tracking.trackers.registry import find_tracker

logger = logging.getLogger(__name__)

# Where the directories are, below the one that the job runs in.
FOLDER = "tracking-offline"
_SENT = ".sent"


def open_or_keep(request: RunRequest, tracker: Tracker, open_run: Callable[[], ClientHandle]) -> ClientHandle:
    """The run that `open_run` opens; or a local one, where the service is not there and that was asked for.

    Raises:
        TrackerUnavailableError: The service is not there, and `if_unavailable` is "raise".
    """
    try:
        return open_run()
    except TrackerUnavailableError as error:
        if request.config.if_unavailable == "raise":
            raise
        handle = LocalHandle(request, tracker)
        if request.plan.primary or (request.info is not None and request.info.local_rank == 0):
            logger.warning(
                "%s This run is logged to files. Send it when %s is there: %s",
                error,
                tracker.title,
                handle.how_to_send(handle.directory),
            )
        return handle


class Journal:
    """One process's file of a run. Each line is written at once, so that it outlives the process."""

    def __init__(self, request: RunRequest, tracker: Tracker, run_id: str) -> None:
        """Of the run that `tracker` calls `run_id`. The file is made with the first line."""
        self.directory = os.path.abspath(os.path.join(FOLDER, f"{tracker.name}-{run_id}"))
        self._header = _header(request, tracker, run_id)
        attempt, rank = self._header["attempt"], request.info.rank if request.info else 0
        # Sorted by their names, they are in the order of the attempts, each one's primary first.
        who = f"{0 if request.plan.primary else 1}-rank-{rank}-{secrets.token_hex(3)}"
        self._path = os.path.join(self.directory, f"{attempt:04}-{int(time.time()):x}-{who}.jsonl")
        self._file: Any = None

    def row(self, row: Mapping[str, Any], step: Any, time_s: float | None = None) -> None:
        """Keep a row."""
        self._add({"row": row, "step": step, "time": time_s or time.time()})

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep a call of one of the run's methods."""
        self._add({"call": method, "args": args, "kwargs": kwargs})

    def end(self, exit_code: int) -> None:
        """Keep the run's end."""
        self._add({"exit_code": exit_code})

    def _add(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            os.makedirs(self.directory, exist_ok=True)
            self._file = open(self._path, "a")  # noqa: SIM115 until the process ends
            self._file.write(json.dumps(self._header, default=str) + "\n")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class LocalRun(Run):
    """What `get_run` gives while the run is kept in files: what is called on it is kept too, to be called later."""

    def __init__(self, handle: LocalHandle) -> None:
        super().__init__(handle)
        self._journal = handle.journal
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._keep(name, args, kwargs)

    def _keep(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            self._journal.call(name, args, kwargs)
        except TypeError:
            if name not in self._told:
                self._told.add(name)
                logger.warning("run %s is logged to files, which cannot hold what %s() is called with", self.id, name)


class LocalHandle(ClientHandle):
    """A run that is kept in files."""

    def __init__(self, request: RunRequest, tracker: Tracker) -> None:
        super().__init__(request, tracker.title)
        self.journal = Journal(request, tracker, self.id)
        self.directory = self.journal.directory
        self.run = LocalRun(self)

    @property
    def url(self) -> str | None:
        """See `Handle.url`."""
        return None

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        """See `ClientHandle.write`."""
        row = {key: value for key, value in row.items() if self._fits(key, value)}
        if row:
            self.journal.row(row, step.item() if callable(getattr(step, "item", None)) else step)

    def _fits(self, key: str, value: Any) -> bool:
        if isinstance(value, (int, float, str)):
            return True
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            self._values.tell(key, f"a {type(value).__name__} is left out: the run is logged to files, as JSON")
            return False
        return True

    def end(self, exit_code: int) -> None:
        """See `ClientHandle.end`."""
        self.journal.end(exit_code)

    def unsent(self) -> Sequence[str]:
        """See `Handle.unsent`."""
        return [self.directory]

    def how_to_send(self, directory: str) -> str:
        """See `Handle.how_to_send`."""
        return how_to_send(directory)


def how_to_send(directory: str) -> str:
    """The command that sends a run which is kept in files."""
    return f"python -m flyteplugins_tracking.send {directory}"


def send(directory: Path) -> str:
    """Send what is kept in a run's directory, and mark it as sent.

    Returns:
        The id of the run.

    Raises:
        TrackerUnavailableError: The service is still not there, and nothing is marked; or it has not taken all, and
            the rest is kept in `directory`.
        ValueError: There is nothing to send in `directory`.
    """
    there = {path: _lines(path) for path in sorted(directory.glob("*.jsonl"))}
    files = {path: lines for path, lines in there.items() if lines}
    if not files:
        raise ValueError(f"{directory} has no files of a run that is to be sent")
    kept_again = {directory}
    for paths in _attempts(files):
        kept_again |= _send_attempt([files[path] for path in paths])
        _mark_as_sent(paths)
    _mark_as_sent(there.keys() - files.keys())
    left = sorted(str(one) for one in kept_again if any(one.glob("*.jsonl")))
    if left:
        raise TrackerUnavailableError(
            f"not all of it could be sent. Send the rest later: {how_to_send(' '.join(left))}"
        )
    return str(next(iter(files.values()))[0]["id"])


def _lines(path: Path) -> list[Any]:
    """Those that are whole: a process that is killed, or a full disk, leaves a part of one."""
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
    """Those that are sent together: of the ranks of one attempt."""
    for attempt in dict.fromkeys(lines[0]["attempt"] for lines in files.values()):
        headers = {path: lines[0] for path, lines in files.items() if lines[0]["attempt"] == attempt}
        primaries = [path for path, header in headers.items() if header["primary"]]
        yield [path for path in headers if path not in primaries[1:]]
        for primary in primaries[1:]:  # of a later job, which does not count its attempts: its end is the last
            yield [primary]


def _send_attempt(files: Sequence[list[Any]]) -> set[Path]:
    """Send what the ranks of one attempt have kept. The primary's end is the run's: it opens first and ends last.

    Returns:
        Where the tracker may have kept some of it again.
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
    arguments = {name: value for name, value in request.config.arguments.items() if name not in ("secret", "tracker")}
    return {
        "tracker": tracker.name,
        "id": run_id,
        "group": request.plan.group,
        "primary": request.plan.primary,
        "attempt": request.facts.get("restart_count", 0) + request.facts.get("attempt_number", 0),
        "arguments": {**arguments, "run_mode": "auto", "if_unavailable": "raise", "rank_prefix": False},
        "facts": dict(request.facts),
    }


def _open(header: Mapping[str, Any]) -> ClientHandle:
    tracker = find_tracker(header["tracker"])
    config = TrackingConfig.of({**header["arguments"], "tracker": header["tracker"]})
    plan = RunPlan(opens=True, run_id=header["id"], group=header["group"], primary=header["primary"], writers=1)
    handle = tracker.open(
        RunRequest(
            plan=plan,
            known_id=plan.run_id,
            config=config,
            info=None,
            has_other_writers=False,
            facts=header["facts"],
            read_secret=lambda: None,
            may_prompt=sys.stdin is not None and sys.stdin.isatty(),
            watch=Unwatched(),
            deadline=time.monotonic() + config.init_timeout_s,
        )
    )
    if not isinstance(handle, ClientHandle):
        raise TrackerUnavailableError(f"{tracker.title} sends what it has kept by itself")
    return handle


def _replay(handle: ClientHandle, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        if "row" in line:
            handle.replay(line["row"], line["step"], line["time"])
        elif "call" in line:
            _call(handle, line["call"], line["args"], line["kwargs"])


def _call(handle: ClientHandle, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call what was called then. What never can be does not hold up all else."""
    try:
        getattr(handle.run, name)(*args, **kwargs)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        logger.warning("run %s: %s() cannot be called any more: %s: %s", handle.id, name, type(error).__name__, error)
    except Exception as error:
        raise TrackerUnavailableError(f"{name}() has failed: {type(error).__name__}: {error}") from error
