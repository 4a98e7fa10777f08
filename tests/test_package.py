"""What the package exports, what importing it costs, and which module may import which."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import flyteplugins_tracking
from flyteplugins_tracking import RankScope, RunMode
from flyteplugins_tracking.policy import RANK_SCOPES, RUN_MODES

PACKAGE = Path(flyteplugins_tracking.__file__).parent
# Each may import itself and what stands before it.
LAYERS = [
    "errors",
    "_util",
    "values",
    "callables",
    "modes",
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
    "_runs",
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


def test_the_import_loads_the_standard_library_only():
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules); "
        "import flyteplugins_tracking; new = sorted({name.partition('.')[0] for name in set(sys.modules) - before}); "
        "import json; print(json.dumps(new))"
    )
    # Isolated and without `site`: nothing but this package and the standard library can be imported.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout)) - {"flyteplugins_tracking"}
    assert loaded <= sys.stdlib_module_names
    assert loaded.isdisjoint({"asyncio", "multiprocessing", "socket", "http", "pathlib", "hashlib"})


def test_every_module_can_be_loaded():
    """None needs at run time what it imports for type checkers only."""
    for module in pkgutil.walk_packages(flyteplugins_tracking.__path__, "flyteplugins_tracking."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_the_modes_are_those_that_the_types_say():
    assert get_args(RunMode) == RUN_MODES
    assert get_args(RankScope) == RANK_SCOPES


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


def test_a_module_with_public_names_is_there_without_an_import_of_its_own():
    asked = "import flyteplugins_tracking as t; t.errors.ConfigError; t.topology.detect; assert 'plan' in dir(t)"
    subprocess.run([sys.executable, "-W", "error", "-c", asked], check=True, timeout=60)
