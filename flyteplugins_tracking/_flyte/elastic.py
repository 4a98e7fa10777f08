"""The nodes that both SDKs' `Elastic` configurations ask for."""

from __future__ import annotations

from typing import Any

from flyteplugins_tracking._rank.plan import NodeRequest


def workers_of(elastic: Any) -> NodeRequest:
    """Return the nodes that an `Elastic` configuration of either SDK requests."""
    min_nodes, _, max_nodes = str(elastic.nnodes).partition(":")
    nproc = str(elastic.nproc_per_node)
    return NodeRequest(int(min_nodes), int(max_nodes or min_nodes), int(nproc) if nproc.isdecimal() else 1)
