"""The private names of the vendors' clients, which a new version may change: all of them, with the real client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import jobs
from support.backends import BACKENDS
from support.vendors import CLIENTS, ROOT, requirement_of

from flyteplugins_tracking.trackers.mlflow import vendor as mlflow
from flyteplugins_tracking.trackers.pluto import vendor as pluto
from flyteplugins_tracking.trackers.trackio import vendor as trackio
from flyteplugins_tracking.trackers.vendor_parts import VendorParts
from flyteplugins_tracking.trackers.wandb import vendor as wandb

PARTS: dict[str, VendorParts] = {"mlflow": mlflow.PARTS, "pluto": pluto.PARTS, "trackio": trackio.PARTS}


@pytest.mark.parametrize(
    "tracker", ["trackio", *(pytest.param(name, marks=pytest.mark.full) for name in ("pluto", "mlflow"))]
)
def test_every_private_name_exists_or_its_absence_warns(tracker, tmp_path):
    with BACKENDS[tracker](tmp_path) as backend:
        command = [sys.executable, str(jobs.PROGRAMS / "vendor_contract.py"), tracker, CLIENTS[tracker]]
        done = jobs.run(command, tmp_path, backend.environment(), timeout_s=300)
    assert done.returncode == 0, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("CONTRACT ")]
    contract = json.loads(line.removeprefix("CONTRACT "))
    assert contract == {"version": contract["version"], "missing": [], "not refused": [], "not warned": []}


@pytest.mark.parametrize("tracker", [*PARTS, "wandb"])
def test_the_extra_has_a_minimum_and_no_maximum_and_allows_the_version_that_was_tested(tracker):
    requirement = {**PARTS, "wandb": wandb.PARTS}[tracker].requirement
    assert f"{requirement}\n" in (ROOT / "constraints.txt").read_text()
    (minimum,) = Requirement(requirement_of(tracker)).specifier
    assert minimum.operator == ">="
    assert requirement.partition("==")[2] in Requirement(requirement_of(tracker)).specifier


@pytest.mark.parametrize("tracker", PARTS)
def test_private_names_are_used_in_one_module_only(tracker):
    """The packages' private modules and attributes of modules are imported by `vendor.py`."""
    room = Path(pluto.__file__).parents[1] / tracker
    private = {part.path.partition(":")[0] for part in PARTS[tracker].parts.values() if part.is_static}
    for path in room.glob("*.py"):
        if path.name != "vendor.py":
            text = path.read_text()
            assert not [module for module in private if f"from {module} import" in text and "." in module], path
