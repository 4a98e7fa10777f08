"""The types of the choices that a user has."""

from __future__ import annotations

from typing import Literal

RunMode = Literal["auto", "shared", "new"]
"""Which ranks of the scope have a run: the first one, all of them one run, or each its own."""
RankScope = Literal["global", "worker"]
"""What a run is for: the whole job, or each worker (= node)."""
IfUnavailable = Literal["raise", "degrade"]
"""What happens where the service cannot be used when a run is opened."""
