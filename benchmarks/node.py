"""One node: its ranks as processes of a script, where they meet, and what they and their helpers take."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 1024  # of the kB that /proc counts in


def wait_for(path: Path, timeout_s: float = 120, unless: Callable[[], bool] = lambda: False) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until or unless():
            raise TimeoutError(path)
        time.sleep(0.005)


def meet(directory: Path, rank: int, moment: str) -> None:
    """In a rank: say that it has come to this moment, and go on when the one who measures says so."""
    (directory / f"{moment}-{rank}").touch()
    wait_for(directory / moment)


def place(rank: int, ranks: int) -> dict[str, str]:
    """What a launcher tells this rank of one node."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
    return {name: str(value) for name, value in told.items()}


@dataclass(frozen=True)
class Node:
    """The ranks that run."""

    processes: Sequence[subprocess.Popen[bytes]]
    directory: Path

    def await_all(self, moment: str) -> None:
        """Wait until each rank has come to this moment; they stay there until it is released."""
        for rank, process in enumerate(self.processes):
            wait_for(self.directory / f"{moment}-{rank}", unless=lambda process=process: process.poll() is not None)

    def release(self, moment: str) -> float:
        """Let them go on, and tell when that was."""
        (self.directory / moment).touch()
        return time.monotonic()

    def leave(self) -> None:
        assert [process.wait(60) for process in self.processes] == [0] * len(self.processes)

    def cpu_s(self) -> float:
        """The processor time of the ranks and of all that they have started."""
        own = {process.pid for process in self.processes}
        return cpu_s(own | children(own))

    def memory(self) -> tuple[Memory, Memory]:
        """Of the processes that the ranks have started, and of all."""
        own = {process.pid for process in self.processes}
        return Memory.of(children(own)), Memory.of(own | children(own))


@contextlib.contextmanager
def node(
    ranks: int, command: Callable[[int], Sequence[str | Path]], directory: Path, environment: Mapping[str, str]
) -> Iterator[Node]:
    """Start a rank for each `command(rank)`; the block's end is also that of those that are still there."""
    processes = []
    try:
        for rank in range(ranks):
            variables = {**environment, **place(rank, ranks), "STARTED": str(time.time())}
            processes.append(subprocess.Popen(command(rank), env=variables, cwd=directory, stdout=subprocess.DEVNULL))
        yield Node(processes, directory)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Memory:
    """What some processes take, in MiB.

    Attributes:
        processes: How many these are.
        pss: What each has by itself, and its part of what several share, of the program's pages for instance.
        rss: What each has resident, so that shared pages count in each.
        anonymous: What none has from a file: heaps and stacks.
    """

    processes: int
    pss: float
    rss: float
    anonymous: float

    @classmethod
    def of(cls, pids: Iterable[int]) -> Memory:
        found = [_rollup(pid) for pid in pids]
        sums = [sum(one.get(name, 0) for one in found) / _MIB for name in ("Pss", "Rss", "Anonymous")]
        return cls(len(found), *sums)


def children(pids: set[int]) -> set[int]:
    """All that these have started, and what those have."""
    parents = {pid: _parent(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in pids | found} - found:
        found |= more
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """The processor time that these have taken so far."""
    ticks = [int(part) for pid in pids for part in _stat(pid)[11:13]]  # utime and stime of proc_pid_stat(5)
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """What comes behind the command's name; nothing but zeros of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["0"] * 13


def _rollup(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return {}
