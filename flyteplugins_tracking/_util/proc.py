"""What Linux's /proc tells of processes. Where there is none, what is asked for is empty or 0."""

from __future__ import annotations

import os
import re
from pathlib import Path


def machine() -> str:
    """This machine, until it is started again."""
    return _read("/proc/sys/kernel/random/boot_id") + os.uname().nodename


def parent(pid: int) -> int:
    """The process that started `pid`, or took it over."""
    match = re.search(r"^PPid:\s*(\d+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(match[1]) if match else 0


def start_time(pid: int) -> str:
    """Clock ticks since boot, field 22 of proc(5)'s stat: with the id it names a process for good."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def command_line(pid: int) -> list[str]:
    """The arguments that `pid` was started with, its own name first."""
    return _read(f"/proc/{pid}/cmdline").split("\0")


def nearest_without(variable: str) -> int:
    """The nearest ancestor that was not given this variable: a launcher, behind the shells and scripts it started."""
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
