"""The shipped recorder, for tests of what a tracker is asked for: `get_run().request`."""

from __future__ import annotations

from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.registry import find_tracker


class RequestRecorder(RecordingTracker):
    """Takes W&B's name, arguments and variables. Pass it as `tracker=`: claims and signals stay the real ones."""

    def __init__(self) -> None:
        super().__init__(instead_of=find_tracker("wandb"))

    def open(self, request: RunRequest) -> Handle:
        handle = super().open(request)
        handle.run.request = request
        return handle
