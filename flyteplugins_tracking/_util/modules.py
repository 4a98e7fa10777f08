"""Modules: whether one is imported already, which version is installed, and whether a file is of this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # without `pathlib`, which a rank without a run does not load


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


class _OnImport:
    """A finder that calls a function when another finder's module is loaded."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self._name:
            return None
        self.remove()
        from importlib.util import find_spec  # slow, and few ranks need it

        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self._action()

            loader.exec_module = load_and_call
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_loaded(name: str, action: Callable[[], object]) -> Callable[[], object]:
    """Call `action` when a module that is not in a package is loaded: now, if it is. Returns what takes that back."""
    if loaded(name) is not None:
        action()
        return lambda: None
    finder = _OnImport(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


def replace_function(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function in all modules that have it: `from package import function` has bound it before."""
    for module in list(sys.modules.values()):
        with suppress(AttributeError, TypeError):  # it need not be a module
            names = object.__getattribute__(module, "__dict__")  # not the module's own: it may load on use
            for name in [name for name, value in list(names.items()) if value is original]:
                names[name] = replacement


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
