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

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # without `pathlib`, which a rank without a run does not load


def loaded(name: str) -> Any:
    """Return the module if it is imported completely; None if it is not, or if a thread is about to import it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


class _OnImport:
    """A finder that calls a function when another finder's module is loaded: not when somebody only looks for it."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        finders = sys.meta_path[:]
        if name != self._name or self not in finders:
            return None
        later = (getattr(finder, "find_spec", None) for finder in finders[finders.index(self) + 1 :])
        specs = (find(name, path, target) for find in later if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self._action)
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Calling:
    """A loader that calls a function when it has run its module. The module gets the loader that this one stands for.

    That one is not changed: all modules of a zip file have one loader.
    """

    def __init__(self, loader: Any, action: Callable[[], object]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()


def when_loaded(name: str, action: Callable[[], object]) -> Callable[[], object]:
    """Call `action` each time that a module is loaded, and now if it is. Returns what takes that back."""
    finder = _OnImport(name, action)
    sys.meta_path.insert(0, finder)
    if loaded(name) is not None:
        action()
    return finder.remove


def replace_function(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function in all modules that have it: `from package import function` has bound it before."""
    for module in list(sys.modules.values()):
        with suppress(AttributeError, TypeError):  # it need not be a module
            names = object.__getattribute__(module, "__dict__")  # not the module's own: it may load on use
            for name in [name for name, value in list(names.items()) if value is original]:
                names[name] = replacement


def loaded_on_use(
    package: dict[str, Any], modules: Mapping[str, Sequence[str]], removed: Mapping[str, str] = {}
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads its public names on first use: PEP 562.

    Args:
        package: The `globals()` of the package.
        modules: The names, by the modules of this library that have them.
        removed: What to use instead of names that the package had in an earlier release.
    """

    def load(name: str) -> object:
        for module, names in modules.items():
            if name in names:
                package[name] = value = getattr(import_module(f"flyteplugins_tracking.{module}"), name)
                return value
        if name in removed:  # no AttributeError: `from package import name` would replace its message
            raise ImportError(f"{package['__name__']}.{name} has been removed: {removed[name]}")
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
