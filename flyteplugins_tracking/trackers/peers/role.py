"""Which of the ranks that share a run opens it on its node, and which attaches to a neighbour's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flyteplugins_tracking.trackers.base import RunRequest


@dataclass(frozen=True)
class NodeRole:
    """A rank's role among the ranks that share its run.

    Attributes:
        name: "leader": opens the run for itself and the other ranks of its node. It is the primary on the primary's
            node, and local rank 0 on the others. "follower": attaches to the leader's.
            "single": is the only rank of its node, or the ranks of its node are unknown.
        has_peers: Whether other nodes, ranks whose node is unknown, or tasks open the run too, now or later.
    """

    name: Literal["single", "leader", "follower"] = "single"
    has_peers: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> NodeRole:
        """The role of the rank that opens this run."""
        config, info = request.config, request.info
        if info is None:
            return cls(has_peers=request.has_other_writers)
        if config.run_mode != "shared":
            return cls()
        if info.worker_index is None or info.local_rank is None:
            return cls(has_peers=True)
        # An elastic job with one node today may have had several: all writers of a run must be of one kind.
        has_peers = config.rank_scope == "global" and (info.num_workers != 1 or request.has_other_writers)
        if not request.leads_node:
            return cls("follower", has_peers)
        return cls("single" if info.local_world_size == 1 else "leader", has_peers)
