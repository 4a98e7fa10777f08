"""Values about processes, from Linux's /proc. On a system without /proc they are empty or 0."""

from __future__ import annotations

import os
import re
from pathlib import Path


def machine() -> str:
    """Return a text that identifies this machine until it is started again."""
    return _read("/proc/sys/kernel/random/boot_id") + os.uname().nodename


def parent(pid: int) -> int:
    """Return the parent of the process `pid`."""
    match = re.search(r"^PPid:\s*(\d+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(match[1]) if match else 0


def start_time(pid: int) -> str:
    """Return when `pid` was started, in clock ticks since boot. With the id, this identifies a process.

    Field 22 of /proc/[pid]/stat: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def command_line(pid: int) -> list[str]:
    """Return the arguments that `pid` was started with, the program first."""
    return _read(f"/proc/{pid}/cmdline").split("\0")


def nearest_without(variable: str) -> int:
    """Return the nearest ancestor that was started without this variable: the launcher that sets it."""
    pid = os.getppid()
    while pid > 1 and variable in _variables_at_start(pid):
        pid = parent(pid)
    return pid


def _variables_at_start(pid: int) -> set[str]:
    return {entry.partition("=")[0] for entry in _read(f"/proc/{pid}/environ").split("\0")}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
