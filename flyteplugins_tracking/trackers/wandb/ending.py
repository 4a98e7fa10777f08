"""The end of a W&B run: how long its upload is waited for, what W&B lacks then, and who has stopped a trial."""

from __future__ import annotations

import os
import signal
from typing import Any

from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.threads import wait_until
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.wandb import vendor
from flyteplugins_tracking.trackers.wandb.attempts import Place
from flyteplugins_tracking.trackers.wandb.vendor import Progress

_NOTHING = Progress(0, 0, (), False)
# How wandb-core tells the upload of an artifact.
_ARTIFACT = "uploading artifact "
# The unit of sizes in messages.
_MB = 1e6
# A variable that W&B's agent sets for its trials.
_OF_TRIAL = "WANDB_SWEEP_PARAM_PATH"
# How much later than a trial its agent may be gone after a signal to both, in seconds.
_GONE_S, _POLL_S = 0.5, 0.01


class Upload:
    """The upload at a run's end. wandb-core does it, and tells how far it is.

    Attributes:
        place: Where the run is.
        limit: How long the end may take.
        run: The run; None before it is open, in a process that opens it again for its end.
    """

    def __init__(self, place: Place, limit: EndLimit, run: Any = None) -> None:
        self.place, self.limit, self.run = place, limit, run
        self._last, self._most = _NOTHING, 0
        limit.left = self._left

    def lasts(self) -> bool:
        """Whether it is still waited for."""
        progress = None if self.run is None else vendor.progress_of(self.run)
        if progress is not None:
            if self._has_moved(progress):
                self.limit.moved()
            self._last = progress
            is_under_way = progress.doing and not progress.is_troubled and not self.run.offline
            # A store may take minutes to answer for a large file, and nothing moves meanwhile.
            self.limit.asks = self._answers if is_under_way else None
        return self.limit.lasts()

    @property
    def artifacts(self) -> list[str]:
        """The names of the artifacts that W&B has not got."""
        return [one.removeprefix(_ARTIFACT) for one in self._last.doing if one.startswith(_ARTIFACT)]

    def _has_moved(self, progress: Progress) -> bool:
        """Whether something was sent since the last look. A file whose upload has failed begins again."""
        last = self._last
        has_grown = progress.uploaded > self._most or last.uploaded < progress.uploaded < progress.total
        self._most = max(self._most, progress.uploaded)
        return has_grown or not set(last.doing) <= set(progress.doing)

    def _answers(self) -> bool:
        return vendor.stored_run(self.place) is not None

    def _left(self) -> str:
        doing, of_files = "; ".join(self._last.doing[:3]), ""
        if self._last.total:
            of_files = f"{self._last.uploaded / _MB:.1f} of {self._last.total / _MB:.1f} MB of files are uploaded"
        return "; ".join(filter(None, (of_files, doing)))


def agent_of_trial() -> int:
    """Return the id of W&B's agent that has started this process for a trial of a sweep; 0 if none has."""
    is_trial = _OF_TRIAL in proc.variables_at_start(os.getpid())
    return proc.nearest_without(_OF_TRIAL) if is_trial else 0


def has_stopped_trial(agent: int) -> bool:
    """Whether a SIGTERM is the agent's. One from outside ends the agent too, unless it has a handler.

    W&B starts a trial again that was preempted, and one that its agent has stopped must not be.
    """
    if not agent or proc.has_handler(signal.SIGTERM, agent):
        return False
    return not wait_until(lambda: proc.state(agent) in ("", "Z"), _GONE_S, _POLL_S)
