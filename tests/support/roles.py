"""Jobs of a run with roles: start them, and compare what was logged and arrived."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import jobs
from support.backends import Backend, Kept
from support.waiting import wait_for_file

PROJECT, RUN_ID = "rl", "grpo-42"


class Roles:
    """The jobs of one run, each of `roles.py`, in one directory."""

    def __init__(self, backend: Backend, directory: Path, **env: str) -> None:
        self.backend, self.directory, self.env = backend, directory, {**backend.environment(), **env}
        directory.mkdir(exist_ok=True)

    def start(
        self, role: str | None = None, ranks: int = 0, env: Mapping[str, str] | None = None, **settings: Any
    ) -> Any:
        """Start a role's job, or the owner's, in this process or with ranks of torchrun."""
        given = {"tracker": self.backend.name, "id": RUN_ID, "role": role, **settings}
        command = [str(jobs.PROGRAMS / "roles.py"), json.dumps(given)]
        launcher = jobs.torchrun("--standalone", f"--nproc-per-node={ranks}") if ranks else [sys.executable]
        return jobs.start([*launcher, *command], self.directory, {**self.env, **(env or {})})

    def finish(self, process: Any, timeout_s: float = 240) -> jobs.Done:
        return jobs.finish(process, self.directory, timeout_s)

    def run(self, role: str | None = None, ranks: int = 0, **settings: Any) -> jobs.Done:
        return self.finish(self.start(role, ranks, **settings))

    def wait(self, name: str, process: Any) -> None:
        """Wait until a job is so far: "open-NAME" for one."""
        wait_for_file(self.directory / name, process)

    def go(self, name: str) -> None:
        (self.directory / name).touch()

    def kill(self, name: str, process: Any, *, waits: bool = True) -> None:
        """Kill the process of a role, or the owner's, and wait for its end."""
        os.kill(int((self.directory / f"pid-{name}").read_text()), signal.SIGKILL)
        if waits:
            process.wait()

    @property
    def server(self) -> Any:
        """The recording server of W&B, or of Pluto."""
        return self.backend._server  # type: ignore[attr-defined]

    def send(self, *directories: Path) -> jobs.Done:
        """Send local directories."""
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", *directories]
        return jobs.run(command, self.directory, self.env)

    @property
    def stored(self) -> Kept:
        (run,) = self.backend.runs(PROJECT)
        return run

    def logged(self, name: str) -> Counter[int]:
        """The rows that a role, or the owner, has logged: also one that it was logging when killed, if that arrived."""
        numbers: dict[str, set[int]] = {"begins": set(), "logged": set()}
        for line in (self.directory / f"logged-{name}").read_text().splitlines():
            what, number = line.split()
            numbers[what].add(int(number))
        return Counter(numbers["logged"] | numbers["begins"] & set(self.arrived(name)))

    def arrived(self, name: str) -> Counter[int]:
        """Those that the service has."""
        key = {"owner": "rank0", "node-0": "rank0", "node-1": "rank1"}.get(name, f"{name}/rank0")
        return Counter({value: count for (of, value), count in self.stored.points.items() if of == key})
