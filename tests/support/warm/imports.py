"""Modules that are imported once and shown to a forked process only when its program imports them.

Our library asks `sys.modules` which SDKs are loaded, and so do tests. So what the server has imported is hidden: a
program's `import torch` finds it again, with all that a real `import torch` would have loaded.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# What one SDK's import changes for others, as flytekit's does fsspec: each process imports it anew.
_CHANGED = ("fsspec",)
# What its modules register with C++ stays in a forked process: they cannot be imported there a second time.
_REGISTERED = ("torch",)
# SDKs whose modules hold state of the process that has used them: a process that such a one forks imports them anew.
_STATEFUL = ("flytekit", "flytekitplugins", "flyte", "flyteplugins")


class HiddenModules(MetaPathFinder):
    """The modules that were imported before, and which module imports which."""

    def __init__(self) -> None:
        self._shown = set(sys.modules)
        self._modules: dict[str, ModuleType] = {}
        self._imports: dict[str, set[str]] = defaultdict(set)

    def load(self, names: Iterable[str]) -> None:
        """Import these modules, and hide what they have loaded."""
        original, import_module = builtins.__import__, importlib.import_module
        builtins.__import__ = self._recording(original)
        importlib.import_module = self._recording_module(import_module)
        try:
            for name in names:
                if importlib.util.find_spec(name.partition(".")[0]) is not None:
                    importlib.import_module(name)
        finally:
            builtins.__import__, importlib.import_module = original, import_module
        self._modules = {name: module for name, module in sys.modules.items() if name not in self._shown}
        for name in self._modules:
            parent = name.rpartition(".")[0]
            if parent in self._modules and not hasattr(self._modules[parent], "__path__"):
                self._imports[parent].add(name)  # an extension module makes such submodules itself
        self._forget(_CHANGED)
        self.hide()
        sys.meta_path.insert(0, self)

    def hide(self, forget_stateful: bool = False) -> None:
        """Have `sys.modules` as in a new interpreter."""
        if forget_stateful:
            self._forget(_STATEFUL)
            # W&B's client would attach a child to the run that its parent has open, and wait for that 10 s.
            if (current := self._modules.get("wandb.sdk.lib.module")) is not None:
                current.unset_globals()
            loaded = {name: module for name, module in sys.modules.items() if name not in self._shown}
            self._modules |= {name: one for name, one in loaded.items() if name.partition(".")[0] in _REGISTERED}
        for name in set(sys.modules) - self._shown:
            del sys.modules[name]
        sys.excepthook = sys.__excepthook__  # some install their own when they are imported

    def _forget(self, packages: tuple[str, ...]) -> None:
        self._modules = {name: one for name, one in self._modules.items() if name.partition(".")[0] not in packages}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        spec = getattr(module, "__spec__", None)
        if module is None or spec is None or not self._is_the_same(fullname, path, spec):
            return None
        found = ModuleSpec(fullname, _Shown(self, module, spec), origin=spec.origin)
        found.submodule_search_locations = spec.submodule_search_locations
        return found

    def show(self, name: str) -> None:
        """Put into `sys.modules` what importing `name` loads."""
        pending, seen = [name], set[str]()
        while pending:
            current = pending.pop()
            if current in seen or (current in sys.modules and current != name):
                continue
            seen.add(current)
            if current in self._modules:
                sys.modules[current] = self._modules[current]
                pending += [*self._imports[current], current.rpartition(".")[0]]

    @staticmethod
    def _is_the_same(fullname: str, path: Sequence[str] | None, spec: ModuleSpec) -> bool:
        """Whether the program would import the module from the same file: its own directory comes first."""
        if path is not None or spec.origin in (None, "built-in", "frozen"):
            return True
        own = PathFinder.find_spec(fullname)
        return own is None or own.origin == spec.origin

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(
            name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
        ) -> Any:
            module = original(name, globals, locals, fromlist, level)
            importer = (globals or {}).get("__name__", "")
            found = module.__name__ if fromlist or level else name
            self._imports[importer].add(found)
            self._imports[importer] |= {f"{found}.{one}" for one in fromlist or () if f"{found}.{one}" in sys.modules}
            return module

        return recorded

    def _recording_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(name: str, package: str | None = None) -> Any:
            module = original(name, package)
            self._imports[sys._getframe(1).f_globals.get("__name__", "")].add(module.__name__)
            return module

        return recorded


class _Shown(Loader):
    """Gives an `import` statement the module that is there."""

    def __init__(self, hidden: HiddenModules, module: ModuleType, spec: ModuleSpec) -> None:
        self._hidden, self._module, self._spec = hidden, module, spec

    def __getattr__(self, name: str) -> Any:
        """What else a loader can do, such as `get_code` for `python -m`."""
        return getattr(self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._hidden.show(self._spec.name)
