"""The types of the choices that a user has, and of what a tracker says."""

from __future__ import annotations

from typing import Literal

RunMode = Literal["auto", "shared", "new"]
"""Which ranks of the scope have a run: the first one, all of them one run, or each its own."""
RankScope = Literal["global", "worker"]
"""What a run is for: the whole job, or each worker (= node)."""
IfUnavailable = Literal["raise", "degrade"]
"""What happens where the service cannot be used when a run is opened."""
Feature = Literal[
    "shared", "resume", "offline", "media", "system metrics", "sweeps", "config file", "allow_config", "download_logs"
]
"""What a service may be without. See docs/trackers.md."""
