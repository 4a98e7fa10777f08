"""The other ranks of this machine, as processes: which have ended, and with what status. Linux only.

A rank that a signal has ended leaves no word. Its parent, the launcher's agent, reaps it within a tenth of a second. A
file descriptor of the process shows its end immediately, and its status can be read until then; since Linux 6.15 also
afterwards, from the descriptor (https://man7.org/linux/man-pages/man2/PIDFD_GET_INFO.2const.html).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flyteplugins_tracking._job.failure import Failure
from flyteplugins_tracking._job.watch import WATCH, Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import rank_variable
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.proc import TERMINATED

# include/uapi/linux/pidfd.h
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
# A sibling may be started after this rank: they are looked for again until all are there.
_LOOK_AGAIN_S, _LONGEST_PAUSE_S = 0.05, 60.0
# Two threads of this process notice that a rank has ended, and that the launcher has sent SIGTERM for that: torchrun
# within a millisecond of seeing the end, which may be immediately. They may notice it in the wrong order, by this much.
_NOTICE_S = 0.05
# As much, for a rank that has exited by itself: with torch imported, one that exits in its handler of a SIGTERM needs
# 7.5 ms at least, nearly all of them to free its memory. Such a handler may raise KeyboardInterrupt too.
_EXIT_NOTICE_S = 0.005
# A variable with more digits is no rank.
_MOST_DIGITS = 10
# How long after a rank's end its agent ends the others, or their collectives are cut.
_UNKNOWN_S = 10.0


@dataclass(frozen=True)
class Ended:
    """A sibling that has ended.

    Attributes:
        rank: Its rank.
        pid: The process.
        status: The status of waitpid(2); None if it could not be read in time.
        at: When this was noticed, in seconds of `time.monotonic`. For one that a signal has ended while the watch was
            busy: since when the watch was busy.
    """

    rank: int
    pid: int
    status: int | None
    at: float = field(default_factory=time.monotonic)

    @property
    def signal(self) -> int:
        """The signal that has ended it; 0 for none, and if that is unknown. A shell around it exits with 128+n."""
        if self.status is None:
            return 0
        code = os.waitstatus_to_exitcode(self.status)
        number = -code if code < 0 else code - 128
        return number if number in signal.valid_signals() else 0

    def is_cause(self, terminated_at: float | None) -> bool:
        """Whether it may be why the job ends: not if it returned, or was terminated with this process.

        Args:
            terminated_at: When SIGTERM came to this process; None if it has not. The agent sends it after it has seen
                that a rank has ended, and a scheduler sends it to all: a rank may exit because of it.
        """
        if self.status == 0 or self.signal == signal.SIGTERM or self.exit_code == TERMINATED:
            return False
        if self.status is None:  # it may have returned, long ago
            now_s = time.monotonic() if terminated_at is None else terminated_at
            return now_s - _UNKNOWN_S < self.at < now_s
        margin_s = _NOTICE_S if self.signal not in (0, signal.SIGINT) else _EXIT_NOTICE_S
        return terminated_at is None or self.at < terminated_at + margin_s

    @property
    def exit_code(self) -> int:
        """The status as a shell has it: 128+n for signal n; 1 if it is unknown."""
        if self.status is None:
            return 1
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def failure(self, is_out_of_memory: bool) -> Failure:
        """Return the failure of a rank that has left no word."""
        word = "ended without a word"
        if self.status is None:
            kind, how = "unknown", "its status is unknown"
        elif self.signal == signal.SIGINT:  # Ctrl-C goes to all ranks: this one was interrupted alone, or first
            kind, word, how = "SIGINT", "was interrupted", "signal 2"
        elif self.signal:
            kind = signal.Signals(self.signal).name
            memory = "out of memory" if is_out_of_memory else "often out of memory"
            how = f"signal {self.signal}, {memory if self.signal == signal.SIGKILL else kind}"
        else:
            kind, how = "exit", f"exit code {self.exit_code}"
        return Failure(
            rank=self.rank,
            type=kind,
            message=f"{word} ({how})",
            exit_code=self.exit_code,
            is_secondary=self.signal == signal.SIGABRT,  # NCCL's watchdog aborts the ranks that have lost another one
            failed_at=time.time() - (time.monotonic() - self.at),
        )


class Siblings(Duty):
    """The other ranks that the same process has started. The watch sleeps until one ends."""

    def __init__(self, info: DistributedInfo) -> None:
        """Look for them: what ends from here on is seen, however late the thread starts."""
        self._info = info
        self._ended: dict[int, Ended] = {}
        self._oom_kills = proc.oom_kills()
        self._running = select.epoll()
        self._processes: dict[int, tuple[int, int]] = {}  # rank and process, by descriptor
        self._known, self._seen = set[int](), set[int]()  # ranks, and processes
        self._lock = threading.Lock()  # held while ends are read
        self._pause_s = _LOOK_AGAIN_S
        self.descriptor = self._running.fileno()
        self._look_for_new()

    def running(self) -> set[int]:
        """Return the ranks that have not ended, of those that were found."""
        self._read_ends()
        return {rank for rank, _ in list(self._processes.values())}

    def returned(self) -> set[int]:
        """Return the ranks that have ended with status 0."""
        return {ended.rank for ended in list(self._ended.values()) if ended.status == 0}

    def failures(self, terminated_at: float | None, *, with_unknown: bool = True) -> list[Failure]:
        """Return the siblings that may be why the job ends, in the order of their ends. See `Ended.is_cause`.

        Args:
            terminated_at: When SIGTERM came to this process; None if it has not.
            with_unknown: Whether those count that may have returned: their status is unknown.
        """
        self._read_ends()  # the watch may wait for its store
        if not self._ended:
            return []
        _, named = _named(self._info)  # by now, a rank may be there whose place a helper of the launcher's has had
        ranks = [ended for ended in list(self._ended.values()) if named.get(ended.rank, ended.pid) == ended.pid]
        ranks = [ended for ended in ranks if with_unknown or ended.status is not None]
        failed = [ended for ended in ranks if ended.is_cause(terminated_at)]
        is_out_of_memory = proc.oom_kills() > self._oom_kills
        return [ended.failure(is_out_of_memory) for ended in failed]

    def next_wait_s(self) -> float:
        if self._is_complete:
            return math.inf
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def look(self) -> None:
        self._read_ends()
        if not self._is_complete:
            self._look_for_new()

    def at_sigterm(self) -> None:
        self._read_ends(may_wait=False)

    def _read_ends(self, *, may_wait: bool = True) -> None:
        read_at = time.monotonic()  # before the system calls, after which this thread may wait for the interpreter
        seen_at = WATCH.awake_since or read_at
        if not self._lock.acquire(blocking=may_wait):
            return  # they are read just now
        try:
            for descriptor, _ in [] if self._running.closed else self._running.poll(0):
                rank, pid = self._processes.pop(descriptor)
                ended = Ended(rank, pid, _status(descriptor, pid), read_at)
                has_exited = ended.signal in (0, signal.SIGINT)
                self._ended[rank] = ended if has_exited else replace(ended, at=seen_at)
                self._running.unregister(descriptor)  # a forked child may have a copy, and keep it open
                os.close(descriptor)
        finally:
            self._lock.release()

    def end(self, has_failed: bool) -> None:  # noqa: ARG002 nobody is told
        with self._lock:
            self._running.close()
            for descriptor in self._processes:
                os.close(descriptor)

    @property
    def _is_complete(self) -> bool:
        return len(self._known) >= (self._info.local_world_size or 1) - 1

    def _look_for_new(self) -> None:
        for rank, pid in _siblings(self._info).items():
            if rank not in self._known and pid not in self._seen:
                self._seen.add(pid)
                # One that has ended may be a helper of the launcher's: then the rank is still looked for.
                if proc.zombie_status(pid) is None:
                    self._known.add(rank)
                with contextlib.suppress(OSError):
                    descriptor = os.pidfd_open(pid)
                    self._processes[descriptor] = (rank, pid)
                    self._running.register(descriptor, select.POLLIN)


def can_watch(info: DistributedInfo) -> bool:
    """Whether this machine has other ranks, and can tell of their ends."""
    return hasattr(os, "pidfd_open") and Path("/proc/self/stat").exists() and (info.local_world_size or 1) > 1


def _siblings(info: DistributedInfo) -> Mapping[int, int]:
    """Return the process of each other rank that this machine's launcher process has started, by rank."""
    children, by_variable = _named(info)
    by_order = _by_order(info, children, by_variable)
    is_named = info.rank in by_variable
    found = by_order if not is_named or by_variable.items() <= by_order.items() else by_variable
    return {rank: pid for rank, pid in found.items() if rank != info.rank}


def _named(info: DistributedInfo) -> tuple[Sequence[int], Mapping[int, int]]:
    """Return the processes that the launcher has started here, and those whose variables tell a rank, by that."""
    variable = rank_variable(info.launcher)
    # A shell around each rank ends with its rank's status.
    children = proc.children(proc.nearest_without(variable))
    ranks_by_pid = {pid: proc.variables_at_start(pid).get(variable, "") for pid in children}
    return children, {
        int(rank): pid for pid, rank in ranks_by_pid.items() if rank.isdecimal() and len(rank) < _MOST_DIGITS
    }


def _by_order(info: DistributedInfo, children: Sequence[int], by_variable: Mapping[int, int]) -> Mapping[int, int]:
    """Return the ranks of this machine if they can be told by their order, this one too: they are started in theirs.

    Processes of multiprocessing get their variables after their start. One that has ended, and that its parent has not
    reaped, has neither variables nor a command line.
    """
    own_program = proc.command_line(os.getpid())[:1]
    programs: list[list[str]] = [[""], []] if info.rank in by_variable else [own_program, [""], []]
    named = set(by_variable.values())
    ranks = [pid for pid in children if pid in named or proc.command_line(pid)[:1] in programs]
    ranks = [pid for pid in ranks if "resource_tracker" not in " ".join(proc.command_line(pid))]
    if len(ranks) != info.local_world_size or info.local_rank is None or ranks[info.local_rank] != os.getpid():
        return {}
    return {info.rank - info.local_rank + index: pid for index, pid in enumerate(ranks)}


def _status(descriptor: int, pid: int) -> int | None:
    """Return the status of a process that has ended: from /proc until it is reaped, then from the descriptor."""
    status = proc.zombie_status(pid)
    if status is not None:
        return status
    answer = bytearray(struct.pack("=Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
        if struct.unpack_from("=Q", answer)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("=i", answer, 60)[0])
    return None
