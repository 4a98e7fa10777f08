"""What the objects of both SDKs tell: their classes, and the nodes that an `Elastic` configuration asks for."""

from __future__ import annotations

from typing import Any

from flyteplugins_tracking._rank.plan import NodeRequest


def workers_of(elastic: Any) -> NodeRequest:
    """Return the nodes that an `Elastic` configuration of either SDK requests."""
    min_nodes, _, max_nodes = str(elastic.nnodes).partition(":")
    nproc = str(elastic.nproc_per_node)
    return NodeRequest(int(min_nodes), int(max_nodes or min_nodes), int(nproc) if nproc.isdecimal() else 1)


def class_names(target: Any) -> set[str]:
    """Return the names of an object's classes: an SDK that is not loaded has made none of them."""
    return {f"{t.__module__}.{t.__qualname__}" for t in type(target).__mro__}
