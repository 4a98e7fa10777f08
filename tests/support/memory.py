"""A limit for the memory of processes, above which the kernel kills them: a control group, which wants root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Give the file into which ids of processes are written. What they allocate from then on counts."""
    group, files = _new_group()
    try:
        for name in files:
            (group / name).write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        with suppress(OSError):
            group.rmdir()


def _new_group() -> tuple[Path, list[str]]:
    """Make a group below that of this process. Returns it and the names of the files with its limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    name = f"tests-{os.getpid()}"
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):  # cgroup v1
            group, files = _MOUNT / "memory" / path.lstrip("/") / name, ["memory.limit_in_bytes"]
        elif not controllers and (_MOUNT / "cgroup.controllers").exists():
            group, files = _MOUNT / path.lstrip("/") / name, ["memory.max"]
        else:
            continue
        try:
            group.mkdir()
            if (group / files[0]).exists():
                return group, files
            group.rmdir()
        except OSError as error:
            pytest.skip(f"this machine lets us limit no memory: {error}")
    pytest.skip("this machine lets us limit no memory: no control group for it")
