"""Processes: exit codes of signals, this one's variables, and values from Linux's /proc.

On a system without /proc, its values are empty or 0.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import glob

Env = Mapping[str, str]
"""The variables of a process, by name."""

# The exit codes that a shell gives for a process that a signal has ended: 128 and the signal's number, which is the
# same on every POSIX system: 15 for SIGTERM, 2 for SIGINT (Ctrl-C).
TERMINATED = 143
INTERRUPTED = 130


def set_variables(values: Mapping[str, str | None]) -> Callable[[], object]:
    """Set variables of this process, or unset those whose value is None. Returns what puts the old values back."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return lambda: set_variables(before)


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """As `set_variables`, for the block only."""
    put_back = set_variables(values)
    try:
        yield
    finally:
        put_back()


def environment() -> dict[str, str]:
    """Return this process's variables. `os.environ` itself raises a KeyError if another thread unsets one meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def machine() -> str:
    """Return a string that identifies this machine until it is started again."""
    return read("/proc/sys/kernel/random/boot_id") + os.uname().nodename


def parent(pid: int) -> int:
    """Return the parent of the process `pid`; 0 if that is not known."""
    if pid == os.getpid():  # also known without /proc
        return os.getppid()
    match = re.search(r"^PPid:\s*(\d+)$", read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(match[1]) if match else 0


def lineage() -> list[int]:
    """Return this process, its parent, and so on, up to the first process."""
    found = [os.getpid()]
    while (above := parent(found[-1])) > 0:
        found.append(above)
    return found


def start_time(pid: int) -> str:
    """Return when `pid` was started, in clock ticks since boot. With the id, this identifies a process.

    Field 22 of /proc/[pid]/stat: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    return _stat(pid).get(22, "")


def command_line(pid: int) -> list[str]:
    """Return the arguments that `pid` was started with, the program first."""
    return read(f"/proc/{pid}/cmdline").split("\0")


def directory(pid: int) -> str:
    """Return the working directory of `pid`; empty if that is not known."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def children(pid: int) -> list[int]:
    """Return the processes that `pid` has started and that are there, in the order of their starts."""
    pids = {int(child) for task in glob(f"/proc/{pid}/task/*/children") for child in read(task).split()}
    return sorted(pids, key=lambda child: (int(start_time(child) or 0), child))


def threads(name: str) -> list[int]:
    """Return the threads of this process with this name, of at most 15 characters, also those that are not Python's."""
    found = (int(os.path.basename(path)) for path in glob("/proc/self/task/*"))
    return [thread for thread in found if command_name(thread) == name]


def zombie_status(pid: int) -> int | None:
    """Return the status of a process that has ended and that its parent has not reaped; None for any other one.

    It is that of waitpid(2): field 52 of /proc/[pid]/stat.
    """
    fields = _stat(pid)
    return int(fields[52]) if fields.get(3) == "Z" else None


def state(pid: int) -> str:
    """Return the state of `pid`, a process or a thread: "R", "S", "T" (stopped by a signal), ...; empty without it."""
    return _stat(pid).get(3, "")


def image() -> str:
    """Return a text that changes when this process executes another program: the random start of its stack."""
    return _stat(os.getpid()).get(28, "")


def command_name(pid: int) -> str:
    """Return the name of the program that `pid` executes, of at most 15 characters."""
    return read(f"/proc/{pid}/comm").rstrip("\n")


def _stat(pid: int) -> dict[int, str]:
    """Return the fields of /proc/[pid]/stat by their numbers, from 3; none without it."""
    return dict(enumerate(read(f"/proc/{pid}/stat").rpartition(")")[2].split(), 3))


def started_at(pid: int | None = None) -> float:
    """Return when a process, or this one, was started, in seconds since the epoch; 0 if that is unknown."""
    ticks = start_time(os.getpid() if pid is None else pid)
    if not ticks:
        return 0.0
    # Not /proc/uptime: in a container with lxcfs it is the container's, and the ticks are not.
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")


def resident_memory() -> int | None:
    """Return the resident memory of this process, in bytes; None if it is unknown.

    https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html
    """
    fields = read("/proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def oom_kills() -> int:
    """Return how many processes of this one's cgroup the kernel has killed for their memory; 0 if that is unknown.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), and memory.oom_control of version 1.
    """
    # Version 2 names no controllers: https://man7.org/linux/man-pages/man7/cgroups.7.html
    for _, controllers, path in (line.split(":", 2) for line in read("/proc/self/cgroup").splitlines()):
        events = {
            "": f"/sys/fs/cgroup{path}/memory.events",
            "memory": f"/sys/fs/cgroup/memory{path}/memory.oom_control",
        }
        match = re.search(r"^oom_kill (\d+)$", read(events.get(controllers, "")), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def nearest_without(variable: str) -> int:
    """Return the nearest ancestor that was started without this variable: the launcher that sets it."""
    return next((pid for pid in lineage()[1:] if pid == 1 or variable not in variables_at_start(pid)), 0)


def has_handler(signum: int, pid: int | str = "self") -> bool:
    """Return whether a process has a handler for a signal, also one that is not Python's, as `faulthandler`'s."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", read(f"/proc/{pid}/status"), re.MULTILINE)
    return bool(match and int(match[1], 16) >> (signum - 1) & 1)


def variables_at_start(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with, if it is a process of this user."""
    entries = (entry.partition("=") for entry in read(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in entries}


def read(path: str) -> str:
    """Return what a file of the kernel says; empty if it is not there or may not be read."""
    try:
        with open(path, errors="replace", newline="") as file:  # arguments may have a carriage return
            return file.read()
    except OSError:
        return ""
