"""The package's public names, and which of its modules may import which."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

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
