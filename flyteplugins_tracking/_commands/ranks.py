"""`python -m flyteplugins_tracking ranks`: the pulse of each rank of this machine's running jobs, one line a rank.

It reads the board of a job as its primary does, and takes no part in the job.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from flyteplugins_tracking._job import pulse as pulses
from flyteplugins_tracking._job.announcement import Announcement, running_jobs
from flyteplugins_tracking._job.board import Board, board_at
from flyteplugins_tracking._job.pulse import Pulse
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.columns import aligned

# How long a job's store may take to answer.
_STORE_S = 5.0
_REFRESH_S = 2.0
_HEAD = ("rank", "host", "pid", "state", "step", "step time", "own time", "last pulse", "memory", "CUDA memory")
_NO_JOB = "No job of this user with pulse_s runs on this machine. The job must have the same TMPDIR as this command.\n"
# What is known of a process of this machine by its state in /proc.
_STATES = {"": "ended", "Z": "ended", "T": "stopped", "t": "stopped"}

Boards = dict[str, Board]


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the jobs until they have ended. Returns 1 if there is none."""
    options = _parser().parse_args(arguments)
    if not running_jobs():
        sys.stderr.write(_NO_JOB)
        return 1
    boards: Boards = {}
    if options.once or not sys.stdout.isatty():
        sys.stdout.write(_text(boards) + "\n")
        return 0
    try:
        _show_live(lambda: _text(boards))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flyteplugins_tracking ranks",
        description="Show the ranks of the jobs that run on this machine with tracking_init(pulse_s=...): a line for "
        "each rank, also of those on other machines. On a terminal it continues until the jobs have ended.",
    )
    parser.add_argument("--once", action="store_true", help="print once; also if the output is not a terminal")
    return parser


def _show_live(text: Callable[[], str]) -> None:
    """Write `text()` again and again, each in the place of the last one."""
    height = 0
    while running_jobs():
        columns, rows = shutil.get_terminal_size()
        lines = [line[:columns] for line in text().splitlines()]
        if len(lines) >= rows:
            hidden = len(lines) - rows + 2
            lines = [*lines[: rows - 2], f"... and {hidden} more lines: --once shows all"]
        up = f"\x1b[{height}F" if height else ""
        sys.stdout.write(up + "\x1b[J" + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        height = len(lines)
        time.sleep(_REFRESH_S)


def _text(boards: Boards) -> str:
    return "\n\n".join("\n".join(_job_lines(job, boards)) for job in running_jobs())


def _job_lines(job: Announcement, boards: Boards) -> Iterator[str]:
    began = time.strftime("%F %T", time.localtime(job.began_at))
    yield f"{job.launcher}, world size {job.world_size}, pid {job.pid}, since {began}, pulse_s={job.pulse_s:g}"
    try:
        present = pulses.read(_board(job, boards), job.world_size)
    except (RuntimeError, OSError) as error:
        yield f"  its board cannot be read: {error}"
        return
    yield from table(present, job, time.time())


def _board(job: Announcement, boards: Boards) -> Board:
    """Return the job's board, over the connection of the last time."""
    key = json.dumps(job.address)
    if key not in boards:
        boards[key] = board_at(job.address, pulses.TOPIC, _STORE_S)
    return boards[key]


def table(present: Mapping[int, Pulse], job: Announcement, now: float) -> list[str]:
    """Return the lines of a job's ranks, with a heading.

    Args:
        present: The pulses by rank.
        job: The job.
        now: The time, in seconds since the epoch.
    """
    rows = [_cells(rank, present.get(rank), job, now) for rank in range(job.world_size)]
    return aligned(_HEAD, rows)


def _cells(rank: int, pulse: Pulse | None, job: Announcement, now: float) -> tuple[str, ...]:
    if pulse is None:
        return (str(rank), "", "", "absent", *[""] * (len(_HEAD) - 4))
    age_s = max(0.0, now - pulse.put_at)
    own_s = None if pulse.own_share is None or pulse.step_s is None else pulse.own_share * pulse.step_s
    return (
        str(rank),
        pulse.host,
        str(pulse.pid),
        state_of(pulse, job.pulse_s, age_s),
        str(pulse.steps),
        "" if pulse.step_s is None else f"{pulse.step_s:.3f} s",
        "" if own_s is None else f"{own_s:.3f} s",
        f"{age_s:.0f} s ago",
        _size(pulse.memory),
        _size(pulse.cuda_memory),
    )


def state_of(pulse: Pulse, pulse_s: float, age_s: float) -> str:
    """Return the state of a rank: that of its pulse; or what has happened to it since, as far as this machine knows."""
    if pulse.state != "running":
        return pulse.state
    known = _STATES.get(proc.state(pulse.pid)) if pulse.host == socket.gethostname() else None
    return known or ("silent" if age_s > pulses.SILENT_PULSES * pulse_s else "running")


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f} MiB"
