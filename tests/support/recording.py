"""A tracker that records, in the place of W&B's, for what concerns the lifecycle and no vendor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.wandb import WandbTracker


@dataclass(eq=False)
class RecordedRun(Handle):
    id: str
    request: RunRequest
    exit_codes: list[int] = field(default_factory=list)
    finish_error: Exception | None = None

    @property
    def run(self) -> RecordedRun:
        return self

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if self.finish_error is not None:
            raise self.finish_error

    def end_early(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@dataclass
class Recorder:
    runs: list[RecordedRun] = field(default_factory=list)


def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Have every W&B run opened from here on recorded instead."""
    recorder, numbers = Recorder(), itertools.count()

    def open_recorded(_: WandbTracker, request: RunRequest) -> RecordedRun:
        run = RecordedRun(request.plan.run_id or f"random-{next(numbers)}", request)
        recorder.runs.append(run)
        return run

    monkeypatch.setattr(WandbTracker, "open", open_recorded)
    return recorder
