"""Modules: whether one is imported already, for code that must not import it, and whether a file is of this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent.parent)


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def is_own(file: str) -> bool:
    """Whether a source file is this package's."""
    return file.startswith(_PACKAGE)
