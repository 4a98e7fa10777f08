"""What the package exports, what importing it costs, and which module may import which."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.jobs import PACKAGE

import flyteplugins_tracking

# Each may import itself and what stands before it.
LAYERS = [
    "errors",
    "topology",
    "policy",
    "processes",
    "identity",
    "claims",
    "handover",
    "attendance",
    "config",
    "metrics",
    "_process_group",
    "propagation",
    "signals",
    "loop_watch",
    "report",
    "entries",
    "ending",
    "opening",
    "lifecycle",
    "findings",
    "trackers",
    "integrations",
    "context",
    "decorator",
    "sweeps",
    "agents",
    "__init__",
    "send",
    "compat",
    "doctor",
    "__main__",
    "testing",
    "pytest_plugin",
]


def test_the_public_names_change_on_purpose_only():
    assert flyteplugins_tracking.__all__ == [
        "ConfigError",
        "DistributedInfo",
        "IdentityError",
        "RankScope",
        "RunMode",
        "RunPlan",
        "TopologyError",
        "TrackerNotInstalledError",
        "TrackerUnavailableError",
        "TrackingError",
        "gather_metrics",
        "get_distributed_info",
        "get_run",
        "get_sweep_id",
        "get_sweep_parameters",
        "override_distributed_info",
        "plan",
        "prefix_metrics",
        "process_group",
        "sweep_agent",
        "tracking_config",
        "tracking_init",
        "tracking_sweep",
        "tracking_sweep_config",
    ]
    assert all(hasattr(flyteplugins_tracking, name) for name in flyteplugins_tracking.__all__)


def test_every_module_can_be_loaded():
    """None needs at run time what it imports for type checkers only."""
    for module in pkgutil.walk_packages(flyteplugins_tracking.__path__, "flyteplugins_tracking."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


# The modules whose names users import.
PUBLIC = ["", ".errors", ".testing", ".compat.wandb", ".trackers.base", ".trackers.client"]
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
            for member in vars(cls).values():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                yield from with_hints(function) if inspect.isfunction(function) else ()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_and_classes_have_type_hints_that_resolve(name):
    module = importlib.import_module(f"flyteplugins_tracking{name}")
    found = [one for public in public_names(module) for one in with_hints(getattr(module, public))]
    assert found
    for one in found:
        typing.get_type_hints(one, localns=THIRD_PARTY)


def test_what_a_tracker_is_opened_with_has_type_hints_that_resolve():
    hints = typing.get_type_hints(flyteplugins_tracking.trackers.base.Tracker.open)
    assert typing.get_type_hints(hints["request"])["plan"] is flyteplugins_tracking.RunPlan


def runtime_imports(path: Path) -> set[str]:
    """The modules of this package that `path` imports, leaving out what is for type checkers only."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(n) for block in typing_only for n in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module == "flyteplugins_tracking":
            names = [f"flyteplugins_tracking.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""]
        found |= {name.split(".")[1] for name in names if name.startswith("flyteplugins_tracking.")}
    return found


def test_imports_point_down():
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        below = LAYERS[: LAYERS.index(layer) + 1]
        assert runtime_imports(path) <= set(below), path


def test_trackers_do_not_know_integrations_nor_each_other():
    for path in (PACKAGE / "trackers").glob("*.py"):
        text = path.read_text()
        assert "integrations" not in text
        common = {"base", "client", "local"}
        others = {p.stem for p in (PACKAGE / "trackers").glob("[a-z]*.py")} - {path.stem, *common}
        assert all(f"trackers.{other}" not in text for other in others) or path.stem == "base"


def test_vendors_are_imported_inside_functions_only():
    vendors = {"wandb", "pluto", "mlflow", "trackio", "torch", "flytekit", "flytekitplugins", "flyte"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert vendors.isdisjoint(name.partition(".")[0] for name in names), path
