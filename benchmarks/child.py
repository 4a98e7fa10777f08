"""One process that a benchmark measures: alone, in an environment and a directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from node import place
from paired import Figures
from support.jobs import environment


def alone(directory: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that has what is installed beside its interpreter, and not this tree."""
    return {name: value for name, value in environment(directory, **variables).items() if name != "PYTHONPATH"}


def rank_of_eight(rank: int) -> dict[str, str]:
    """What torchrun tells this rank of a node of eight."""
    return {**place(rank, 8), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def measured(
    python: Path, *arguments: str, variables: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Figures:
    """Run Python so to its end: its seconds, those of CPU with its children's, and what it has found itself.

    The time at which it is started is in its variable STARTED. It writes its figures, a JSON object, to figures.json.
    """
    with tempfile.TemporaryDirectory() as name:
        variables = {**(variables or {}), "STARTED": str(time.time())}
        began = time.perf_counter()
        process = subprocess.Popen(
            [python, *arguments],
            cwd=name,
            env=alone(Path(name), variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        deadline = threading.Timer(timeout_s, process.kill)
        deadline.start()
        _, status, usage = os.wait4(process.pid, 0)  # which tells the CPU time of this child alone
        wall_s = time.perf_counter() - began
        deadline.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        found = Path(name, "figures.json")
        figures: Figures = json.loads(found.read_text()) if found.exists() else {}
        return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, **figures}
