"""Modules: whether one is imported already, for code that must not import it, and whether a file is of this package."""

from __future__ import annotations

import os
import sys
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # without `pathlib`, which a rank without a run does not load


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def is_own(file: str) -> bool:
    """Whether a source file is this package's."""
    return file.startswith(_PACKAGE)
