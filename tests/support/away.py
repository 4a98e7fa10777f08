"""A tracker whose service a test has at hand: it takes rows, rejects some of them, or is away."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking import get_run, tracking_init
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.journal import Line
from flyteplugins_tracking.trackers.kept import OutboxHandle, open_or_keep
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError

# Where a run keeps what its service has not taken, below the working directory.
LEFT = Path("tracking-offline", "away-train")


class Service:
    """Takes lines unless a test has it do something else."""

    def __init__(self) -> None:
        self.taken: list[Line] = []
        self.calls = 0
        self.is_away = threading.Event()
        self.enough = float("inf")  # how many lines it takes
        self.rejects: Any = lambda number: False

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        self.calls += 1
        if self.is_away.is_set() or len(self.taken) >= self.enough:
            raise AwayError("it is away")
        if any(self.rejects(line["row"]["n"]) for line in lines if "row" in line):
            raise RejectedError("it is not right")
        self.taken += lines

    @property
    def numbers(self) -> list[int]:
        return [line["row"]["n"] for line in self.taken if "row" in line]


class Away(Tracker):
    name, title = "away", "Away"

    def __init__(self, service: Service | None = None) -> None:
        self.service = service

    def open(self, request: RunRequest) -> Handle:
        return open_or_keep(request, self, lambda: self.open_at_service(request))

    def open_at_service(self, request: RunRequest) -> OutboxHandle:
        if self.service is None:
            raise TrackerUnavailableError("Away does not answer.")
        return OutboxHandle(request, self, self.service)


def log(service: Service | None, numbers: Iterable[int], **arguments: Any) -> None:
    """Have a function log these numbers: to files, if there is no service."""
    arguments = {"project": "p", "id": "train", "if_unavailable": "degrade", **arguments}

    @tracking_init(tracker=Away(service), **arguments)
    def train() -> None:
        for number in numbers:
            get_run().log({"n": number}, step=number)

    train()
