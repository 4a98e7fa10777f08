"""Metrics under keys that name the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking.errors import ConfigError


def prefix_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values under keys that name this rank: `rank_{rank}/{key}`.

    The rank is that of `get_distributed_info()`; outside a distributed job it is 0, so that a script's charts have the
    same names on one process. `rank_prefix=True` does the same to the keys of a shared run: use one of the two.

    Raises:
        ConfigError: `metrics` is not a mapping with strings as keys.
        TopologyError: A launcher's values are malformed or contradict each other.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ConfigError(f"metrics must be a mapping of text to values, got {metrics!r:.100}")
    info = get_distributed_info()
    return {f"rank_{info.rank if info else 0}/{key}": value for key, value in metrics.items()}
