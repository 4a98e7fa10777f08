"""Run `scripted_training.py` against the recording server, break something, and compare what was logged and arrived."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb_files import read_runs

from support import jobs
from support.waiting import wait_until
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

# A key in the message of what the scripted training raises.
SECRET = "0123456789abcdef0123456789abcdef01234567"
ENDS = jobs.PROGRAMS / "scripted_training.py"
FLYTE_ENDS = jobs.PROGRAMS / "flyte_scripted_workers.py"
# A row that was logged so shortly before a kill may still be on its way to the local file.
FRESH_S = 0.2 * jobs.TIME_SCALE
Row = tuple[int, int]  # the process that logged it, and its number there


@dataclass(frozen=True)
class Outcome:
    """What is known after a fault.

    Attributes:
        logged: The rows whose `log` has returned.
        fresh: Those of them that had been logged for less than `FRESH_S` when the fault came.
        arrived: The rows that the server keeps.
        duplicates: How many rows arrived more than once.
        exit_codes: Those that the server was told for the run, in their order.
        state: The run's state at the end.
        returncode: The job's.
        seconds: From the fault to the job's end; None where nothing was done to the job.
        slowest_log_s: The longest that one `log` took.
        steps: The `_step` of each row that arrived.
        config: The run's config at the end.
        failures: For each run, the rank and the type of the failure that its summary tells; "-" where it tells none.
        told: Whether each run that has failed, also in an earlier attempt, has its text as a file, without a key.
        local: The rows in the local files.
        leaked: What does not end with the job.
    """

    logged: frozenset[Row]
    fresh: frozenset[Row]
    arrived: frozenset[Row]
    duplicates: int
    exit_codes: tuple[int, ...]
    state: str
    runs: int
    returncode: int
    output: str
    seconds: float | None
    slowest_log_s: float
    steps: tuple[int, ...]
    config: Mapping[str, Any]
    failures: tuple[str, ...]
    told: bool
    local: frozenset[Row]
    leaked: tuple[str, ...]
    notes: Mapping[int, tuple[str, ...]] = field(repr=False)

    @property
    def lost(self) -> int:
        return len(self.logged - self.arrived)

    def assert_each_once(self, one_writer: bool = True) -> None:
        """Assert that the server has each row once: also one that was logged as its process was killed, or not that.

        Args:
            one_writer: Whether the rows have one counter of steps.
        """
        last = {pid: max(number for other, number in self.logged if other == pid) for pid, _ in self.logged}
        assert self.logged <= self.arrived
        assert all(number == last.get(pid, -1) + 1 for pid, number in self.arrived - self.logged)
        assert self.duplicates == 0
        assert not one_writer or list(self.steps) == list(range(len(self.steps)))


class Job:
    """A job of `scripted_training.py` that is under way."""

    def __init__(self, server: WandbServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.fault_at: float | None = None
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], env: Mapping[str, str] | None = None, **settings: Any) -> subprocess.Popen[str]:
        variables = {
            **self.server.environment,
            "TRAIN_SETTINGS": json.dumps(settings),
            "SOME_KEY": SECRET,
            **(env or {}),
        }
        process = jobs.start(command, self.directory, variables)
        self._started.append(process)
        return process

    def notes(self) -> dict[int, tuple[str, ...]]:
        """What each process has written down, by its id."""
        paths = sorted(self.directory.glob("notes-*"), key=lambda path: path.stat().st_mtime)
        return {int(path.name.removeprefix("notes-")): tuple(path.read_text().splitlines()) for path in paths}

    def wait_for(self, line: str, count: int = 1) -> list[int]:
        """Wait until `count` processes have written `line` down; their ids."""

        def writers() -> list[int]:
            return [pid for pid, lines in self.notes().items() if line in lines]

        self.wait_until(lambda: len(writers()) >= count, f"no {line!r}")
        return writers()

    def wait_until(self, holds: Callable[[], object], why: str, timeout_s: float = 240) -> None:
        """Wait until `holds()` is true; it cannot become so when everything that was started has ended."""
        try:
            wait_until(holds, *self._started, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{why} in {self.notes()}: {error}") from None

    def rows_logged(self, but_not: Collection[int] = ()) -> dict[int, int]:
        """How many rows each process has logged."""
        notes = {pid: lines for pid, lines in self.notes().items() if pid not in but_not}
        return {pid: sum(line.startswith("logged ") for line in lines) for pid, lines in notes.items()}

    def rows_stored(self) -> frozenset[Row]:
        """The rows in the local files."""
        folder = self.directory / "wandb"
        stored = read_runs(folder) if folder.exists() else []
        return frozenset((row["pid"], row["n"]) for run in stored for row in run.rows)

    def log_more(self, rows: int, but_not: Collection[int] = ()) -> None:
        """Wait until each process that logs has logged so many more rows: none of its `log` calls blocks."""
        before = {pid: count for pid, count in self.rows_logged(but_not).items() if count}
        self.wait_until(
            lambda: all(self.rows_logged()[pid] >= count + rows for pid, count in before.items()),
            f"not {rows} more rows than {before}",
        )

    def wait_until_stored(self, rows: int) -> None:
        """Wait until the local files have so many rows of each process that logs."""

        def stored() -> Counter[int]:
            return Counter(pid for pid, _ in self.rows_stored())

        pids = [pid for pid, count in self.rows_logged().items() if count]
        self.wait_until(lambda: all(stored()[pid] >= rows for pid in pids), f"not {rows} rows are stored")

    def wait_until_blocked(self, pid: int) -> None:
        """Wait until the main thread of this process has stayed in one wait of the kernel's for 0.2 s."""
        path = Path("/proc", str(pid), "task", str(pid), "status")
        since, seen = time.monotonic(), ""

        def is_blocked() -> bool:
            nonlocal since, seen
            lines = path.read_text().splitlines()
            now = "".join(line for line in lines if line.startswith(("State:", "voluntary", "nonvoluntary")))
            if now != seen or "State:\tS" not in now:
                since, seen = time.monotonic(), now
            return time.monotonic() - since > 0.2

        self.wait_until(is_blocked, f"{pid} is not blocked")

    def pids(self, program: str) -> list[int]:
        """The job's processes of this name."""
        running = _processes_with(f"TRAIN_DIR={self.directory}")
        return [pid for pid, command in running.items() if Path(command.split()[0]).name == program]

    def signal(self, pid: int, number: int = signal.SIGTERM) -> None:
        self.fault_at = time.monotonic()
        os.kill(pid, number)

    def go(self) -> None:
        (self.directory / "go").touch()

    def outcome(self, timeout_s: float = 240) -> Outcome:
        """Wait for the end of all that was started, and look."""
        done = [jobs.finish(process, self.directory, timeout_s) for process in self._started]
        seconds = None if self.fault_at is None else time.monotonic() - self.fault_at
        leaked = self._outlive()
        notes = self.notes()
        logs = [
            (pid, *line.split()[1:]) for pid, lines in notes.items() for line in lines if line.startswith("logged ")
        ]
        runs = self.server.runs
        rows = [row for run in runs for row in run.rows]
        arrived = [(row["pid"], row["n"]) for row in rows]
        return Outcome(
            logged=frozenset((int(pid), int(n)) for pid, n, _, _ in logs),
            fresh=frozenset((int(pid), int(n)) for pid, n, _, at in logs if self._is_fresh(float(at))),
            arrived=frozenset(arrived),
            duplicates=len(arrived) - len(set(arrived)),
            exit_codes=tuple(code for run in runs for code in run.exit_codes),
            state=runs[-1].state if runs else "",
            runs=len(runs),
            returncode=done[0].returncode,
            output="\n".join(one.output for one in done),
            seconds=seconds,
            slowest_log_s=max((float(seconds) for _, _, seconds, _ in logs), default=0.0),
            steps=tuple(row.get("_step", -1) for row in rows),  # none in W&B's shared mode before 0.25
            config=runs[-1].config if runs else {},
            failures=tuple(_failure(run) for run in sorted(runs, key=lambda run: run.id)),
            told=all(_is_told(run) for run in runs),
            local=self.rows_stored(),
            leaked=leaked,
            notes=notes,
        )

    def _is_fresh(self, logged_at: float) -> bool:
        return self.fault_at is not None and self.fault_at - FRESH_S < logged_at < self.fault_at + FRESH_S

    def _outlive(self, timeout_s: float = 10 * jobs.TIME_SCALE) -> tuple[str, ...]:
        """The processes of the job that do not end, by their command lines. wandb-core takes 2 s after a SIGKILL."""
        until = time.monotonic() + timeout_s
        while (running := _processes_with(f"TRAIN_DIR={self.directory}")) and time.monotonic() < until:
            time.sleep(0.1)
        return tuple(running.values())


def _failure(run: RecordedRun) -> str:
    summary = run.summary
    if summary.get("failure/rank", "") == "":
        return "-"
    assert summary["failure/host"] == socket.gethostname()
    return f"{summary['failure/rank']} {summary['failure/type']}"


def _is_told(run: RecordedRun) -> bool:
    text = run.files.get("failure.txt", b"").decode()
    message = str(run.summary.get("failure/message", ""))
    # An attempt that succeeds clears the summary. The text of an earlier one stays as a file.
    *earlier, last = run.exit_codes or [None]
    has_failed = run.summary.get("failure/rank", "") != "" or (last == 0 and not set(earlier) <= {0, 130, 143})
    return bool(message in text and bool(text) == has_failed and SECRET not in text + message)


def _processes_with(variable: str) -> dict[int, str]:
    """Their command lines, by their ids."""
    found = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and variable in (process / "environ").read_text(errors="replace").split("\0"):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return {pid: command for pid, command in found.items() if command}


@contextmanager
def job(directory: Path) -> Iterator[Job]:
    with WandbServer() as server:
        yield Job(server, directory)


def python() -> list[str]:
    return [sys.executable, str(ENDS)]


def torchrun(*options: str, ranks: int = 2) -> list[str]:
    return [*jobs.torchrun("--standalone", f"--nproc-per-node={ranks}", "--monitor-interval=0.1", *options), str(ENDS)]


def flyte() -> list[str]:
    return [sys.executable, str(FLYTE_ENDS)]


def ends(how: str | Mapping[str, str], **settings: Any) -> dict[str, Any]:
    """The settings with which all ranks, or each its own way, end so."""
    return {"ends": {"*": how} if isinstance(how, str) else dict(how), **settings}
