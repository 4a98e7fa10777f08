"""Modules: whether one is imported already, which version is installed, and whether a file is of this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # without `pathlib`, which a rank without a run does not load


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def loaded_on_use(
    package: dict[str, Any], modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads its public names on first use: PEP 562.

    Args:
        package: The `globals()` of the package.
        modules: The names, by the modules of this library that have them.
    """

    def load(name: str) -> object:
        for module, names in modules.items():
            if name in names:
                package[name] = value = getattr(import_module(f"flyteplugins_tracking.{module}"), name)
                return value
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")

    return load, lambda: sorted({*package, *package["__all__"]})


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
