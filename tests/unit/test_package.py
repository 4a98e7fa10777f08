"""The package's public names, and which of its modules may import which."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.jobs import PACKAGE

import flyteplugins_tracking

# What a room may import: itself, and what stands before it. Those in one line do not import each other.
ROOMS = [
    {"errors", "_util"},
    {"_rank"},
    {"_job"},
    {"trackers"},
    {"_runs"},
    {"_flyte"},
    {"decorator"},
    {"_sweeps"},
    {"_commands", "compat", "testing"},
    {"__init__", "__main__"},
]
MODULES = sorted(PACKAGE.rglob("*.py"))
SERVICES = ("wandb", "pluto", "mlflow", "trackio")


@pytest.mark.parametrize("name", flyteplugins_tracking._REMOVED)
def test_a_removed_name_is_an_error_that_says_what_to_use(name):
    expected = f"flyteplugins_tracking.{name} has been removed: {flyteplugins_tracking._REMOVED[name]}"
    with pytest.raises(ImportError, match=f"^{re.escape(expected)}$"):
        getattr(flyteplugins_tracking, name)
    with pytest.raises(ImportError, match=f"^{re.escape(expected)}$"):
        exec(f"from flyteplugins_tracking import {name}")


def test_every_module_can_be_loaded():
    """None needs at run time what it imports for type checkers only."""
    for module in pkgutil.walk_packages(flyteplugins_tracking.__path__, "flyteplugins_tracking."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


# The modules whose names users import.
PUBLIC = ["", ".errors", ".testing", ".compat.wandb", ".trackers", ".trackers.base", ".trackers.client"]
# Other packages' types: whoever asks for the hints has imported these packages.
THIRD_PARTY = {"torch": SimpleNamespace(device=object), "Dir": object}


def public_names(module: ModuleType) -> list[str]:
    """The names in its `__all__`; without one, those that are defined in it."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def with_hints(value: Any) -> Iterator[Any]:
    """A function and its overloads; a class, its bases in the package, and the methods and properties of them all."""
    if inspect.isfunction(value):
        yield value
        yield from typing.get_overloads(value) if sys.version_info >= (3, 11) else ()
    for cls in value.__mro__ if isinstance(value, type) else ():
        if cls.__module__.startswith("flyteplugins_tracking"):
            yield cls
            # `collections` generates a named tuple's `__new__`, in a namespace without builtins.
            for member in (member for name, member in vars(cls).items() if name != "__new__"):
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                yield from with_hints(function) if inspect.isfunction(function) else ()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_and_classes_have_type_hints_that_resolve(name):
    module = importlib.import_module(f"flyteplugins_tracking{name}")
    found = [one for public in public_names(module) for one in with_hints(getattr(module, public))]
    assert found
    for one in found:
        typing.get_type_hints(one, localns=THIRD_PARTY)


def test_the_type_hints_of_a_run_request_resolve():
    hints = typing.get_type_hints(flyteplugins_tracking.trackers.base.Tracker.open)
    assert typing.get_type_hints(hints["request"])["plan"] is flyteplugins_tracking.RunPlan


def imports_of(path: Path) -> set[str]:
    """The modules of this package that `path` imports, at any depth; leaving out what is for type checkers only."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(n) for block in typing_only for statement in block.body for n in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) not in skipped and isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif id(node) not in skipped and isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("flyteplugins_tracking.") for name in found if name.startswith("flyteplugins_tracking.")}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed_in(room: str) -> set[str]:
    position = next(number for number, rooms in enumerate(ROOMS) if room in rooms)
    return {room, *ROOMS[0]}.union(*ROOMS[:position])


def test_every_entry_of_the_packages_root_is_a_room():
    entries = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert entries == set().union(*ROOMS)
    assert len(entries - {"__init__", "__main__"}) <= 12


def test_a_room_imports_only_the_rooms_below_it():
    wrong = {
        path: {module.partition(".")[0] for module in imports_of(path)} - allowed_in(room_of(path)) for path in MODULES
    }
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_the_modules_of_a_call_do_not_import_each_other_in_a_circle():
    """Also inside of functions: there is an order in which they can be read."""
    paths = (PACKAGE / "_runs").glob("*.py")
    imports = {path.stem: {name.split(".")[1] for name in imports_of(path) if "_runs." in name} for path in paths}
    order = list(TopologicalSorter(imports).static_order())  # raises a CycleError that names the circle
    assert order[-2:] == ["opening", "call"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_tracker_does_not_know_the_others(service):
    for path in (PACKAGE / "trackers" / service).glob("*.py"):
        others = tuple(f"trackers.{other}" for other in SERVICES if other != service)
        assert not [module for module in imports_of(path) if module.startswith(others)], path


def test_vendors_are_imported_inside_functions_only():
    vendors = {"wandb", "pluto", "mlflow", "trackio", "torch", "flytekit", "flytekitplugins", "flyte"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert vendors.isdisjoint(name.partition(".")[0] for name in names), path
