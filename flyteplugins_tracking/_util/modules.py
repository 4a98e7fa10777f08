"""Modules: whether one is imported already, which version is installed, and whether a file is of this package."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # without `pathlib`, which a rank without a run does not load


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def initialised_distributed() -> Any:
    """Return `torch.distributed` if the user's code has initialised its process group of all ranks; else None."""
    module = loaded("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def is_own(file: str) -> bool:
    """Whether a source file is this package's."""
    return file.startswith(_PACKAGE)


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and few ranks need it

    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None
