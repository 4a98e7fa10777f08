"""Who of the ranks that share a run opens it, and who joins a neighbour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flyteplugins_tracking.trackers.base import RunRequest


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share its run.

    Attributes:
        role: "host": opens the run, for its neighbours too. "guest": attaches to it. "alone": has no neighbours, or
            they cannot be known.
        has_peers: Whether several nodes, ranks whose node is unknown, or tasks open the run; or may at another time.
    """

    role: Literal["alone", "host", "guest"] = "alone"
    has_peers: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> Place:
        """The place of the rank that opens its run."""
        config, info = request.config, request.info
        if info is None:
            return cls(has_peers=request.has_other_writers)
        if config.run_mode != "shared":
            return cls()
        if info.worker_index is None or info.local_rank is None:
            return cls(has_peers=True)
        # An elastic job that has one node today may have had several: one kind of writer for all of the run's life.
        has_peers = config.rank_scope == "global" and (info.num_workers != 1 or request.has_other_writers)
        if info.local_rank != 0:
            return cls("guest", has_peers)
        return cls("alone" if info.local_world_size == 1 else "host", has_peers)
