"""The other writers of a run: who ends it waits for them, through the store of the launcher or of the ranks."""

from __future__ import annotations

import logging
import os

from flyteplugins_tracking._job.store import job_store
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.peers.attendance import Attendance

logger = logging.getLogger(__name__)


class Writers:
    """The other nodes, or ranks, that write to the run, as far as the job has a store to ask."""

    def __init__(self, request: RunRequest, title: str, label: str, others: list[str]) -> None:
        """Enter.

        Args:
            request: Whose run it is.
            title: What messages call the service.
            label: This writer's name.
            others: The names of all those that the primary waits for.
        """
        self._request, self._title, self._label, self._others = request, title, label, others
        store = None if request.info is None else job_store(request.info, os.environ)
        self._attendance = None if store is None else Attendance(store, f"{title}/{request.known_id}")
        # Whether the run may have been there: the service would say so of one that another writer has just created.
        self.is_retry = request.is_retry
        if self._attendance is not None and request.plan.primary:
            self._attendance.enter_as_primary()
        elif self._attendance is not None:
            self.is_retry |= self._attendance.enter(label)

    @classmethod
    def of_ranks(cls, request: RunRequest, title: str) -> Writers | None:
        """Where each rank is a writer; None where the run has one."""
        info, config = request.info, request.config
        if info is None or config.run_mode != "shared":
            return None
        if config.rank_scope == "global":
            return cls(request, title, f"rank-{info.rank}", [f"rank-{rank}" for rank in range(1, info.world_size)])
        local = range(1, info.local_world_size or 1)
        return cls(request, title, f"local-rank-{info.local_rank}", [f"local-rank-{rank}" for rank in local])

    def leave(self) -> None:
        """What this writer has to write is written."""
        if self._attendance is not None and not self._request.plan.primary:
            self._attendance.leave(self._label)

    def wait(self) -> None:
        """On the primary, wait for the others: what they have logged is to come before the run's end."""
        request = self._request
        if self._attendance is None or not request.plan.primary:
            return
        timeout_s = request.config.finish_timeout_s
        missing = self._attendance.wait(self._others, timeout_s, until=lambda: request.watch.terminated)
        if missing:
            logger.warning(
                "%s: run %s ends. finish_timeout_s=%g after the primary rank's function had returned, these had not "
                "written all to it: %s.",
                self._title,
                request.plan.run_id,
                timeout_s,
                ", ".join(missing),
            )
