"""Modules that are imported already, for code that must not import them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
