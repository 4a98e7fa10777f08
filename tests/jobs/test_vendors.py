"""The private names of the vendors' clients, which a new version may change: all of them, with the real client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import jobs, vendors
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


def test_the_matrix_has_the_oldest_version_those_before_a_feature_the_last_minors_and_a_pre_release(monkeypatch):
    final = ["2.9.2", "2.10.0", "2.10.2", "2.17.1", "3.0.0", "3.1.0", "3.1.4", "3.2.0", "3.3.0", "3.3.1", "3.4.0"]
    index = {"mlflow": [*final, "3.5.0"], "mlflow-skinny": final}  # 3.5.0 cannot be installed yet
    newer = {name: [*published, "3.2.0rc1", "3.6.0rc1", "3.6.0rc2"] for name, published in index.items()}
    monkeypatch.setattr(vendors, "_of_index", lambda name, options: set((newer if options else index)[name]))
    monkeypatch.setattr(vendors, "later_abilities", lambda _: {"a feature": "2.11", "another": "2.18"})
    chosen = ["2.10.0", "2.10.2", "2.17.1", "3.1.4", "3.2.0", "3.3.1", "3.4.0", "3.6.0rc2"]
    assert vendors.versions_of("mlflow") == chosen


def test_the_table_has_one_row_for_each_version_that_is_tested(monkeypatch, tmp_path):
    monkeypatch.setattr(vendors, "TABLE", tmp_path / "versions.csv")
    rows = [("wandb", "0.9"), ("mlflow", "2.9.2"), ("mlflow", "2.17.1"), ("mlflow", "3.3.0")]
    vendors.TABLE.write_text("client,version,works,lost\n" + "".join(f"{c},{v},everything,nothing\n" for c, v in rows))
    vendors.write(vendors.Outcome("mlflow", "2.17.1", "everything else", "a, b"), ["2.9.2", "2.17.1"])
    assert vendors.TABLE.read_text().splitlines() == [
        "client,version,works,lost",
        *("wandb,0.9,everything,nothing", "mlflow,2.9.2,everything,nothing", 'mlflow,2.17.1,everything else,"a, b"'),
    ]
