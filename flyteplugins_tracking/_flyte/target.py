"""What both SDKs' modules need of the decorators and of their tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flyteplugins_tracking._rank.plan import NodeRequest
from flyteplugins_tracking.trackers.config import TrackingConfig


class Decorator(NamedTuple):
    """A decorator of this package, as its Flyte tasks need it.

    Attributes:
        name: The decorator's name in messages.
        config: The user's arguments, if its links lead to runs; else None.
        links: The other links to add to a Flyte 2 task.
    """

    name: str
    config: TrackingConfig | None = None
    links: Sequence[Any] = ()


def workers_of(elastic: Any) -> NodeRequest:
    """Return the nodes that an `Elastic` configuration of either SDK requests."""
    min_nodes, _, max_nodes = str(elastic.nnodes).partition(":")
    nproc = str(elastic.nproc_per_node)
    return NodeRequest(int(min_nodes), int(max_nodes or min_nodes), int(nproc) if nproc.isdecimal() else 1)


def class_names(target: Any) -> set[str]:
    """Return the names of an object's classes: an SDK that is not loaded has made none of them."""
    return {f"{t.__module__}.{t.__qualname__}" for t in type(target).__mro__}
