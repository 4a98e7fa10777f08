"""Where the boards of this machine's running jobs are: a small file of each, for the user who wants to look at them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flyteplugins_tracking._job.board import make_private, user_directory
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.whole_file import write_whole

_FOLDER = "jobs"


@dataclass(frozen=True)
class Announcement:
    """A job that runs on this machine, and its board. It holds no keys: a board's address is no secret in its job.

    Attributes:
        address: See `Board.address`.
        world_size: The number of ranks.
        pulse_s: Seconds between two pulses.
        launcher: The job's launcher.
        pid: The process that has written this.
        process_started: When that process was started: with the id, this identifies it.
        began_at: When its function began, in seconds since the epoch.
    """

    address: Mapping[str, Any]
    world_size: int
    pulse_s: float
    launcher: str
    pid: int = field(default_factory=os.getpid)
    process_started: str = field(default_factory=lambda: proc.start_time(os.getpid()))
    began_at: float = field(default_factory=time.time)

    @classmethod
    def publish(cls, address: Mapping[str, Any] | None, info: DistributedInfo, pulse_s: float) -> Announcement | None:
        """Write the file of this process's job, readable for its user only. None if its board has no address."""
        if address is None:
            return None
        announcement = cls(address, info.world_size, pulse_s, info.launcher)
        path = announcement._path
        make_private(path.parent)
        write_whole(path, json.dumps(asdict(announcement)), mode=0o600)
        return announcement

    def withdraw(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    @property
    def is_stale(self) -> bool:
        """Whether its process has ended without removing it."""
        return proc.state(self.pid) in ("", "Z") or proc.start_time(self.pid) != self.process_started

    @property
    def _path(self) -> Path:
        return user_directory() / _FOLDER / f"{self.pid}.json"


def running_jobs() -> list[Announcement]:
    """Return the jobs of this user on this machine, one for each board, in the order of their begin.

    The files of processes that have ended are removed.
    """
    found: dict[str, Announcement] = {}
    folder = user_directory() / _FOLDER
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            if path.stat().st_uid != os.getuid():
                continue
            announcement = Announcement(**json.loads(path.read_text()))
            if announcement.is_stale:
                announcement.withdraw()
            else:
                found.setdefault(json.dumps(announcement.address), announcement)
    return sorted(found.values(), key=lambda job: job.began_at)
