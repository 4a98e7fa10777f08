"""A record is what a frozen dataclass is, and the functions of `dataclasses` take it."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest
from support.jobs import PACKAGE

from flyteplugins_tracking import DistributedInfo, RunPlan
from flyteplugins_tracking._util.record import replace


def test_a_record_has_its_values_its_defaults_and_nothing_else():
    plan = RunPlan(True, group="g")
    assert (plan.opens, plan.run_id, plan.group, plan.writers) == (True, None, "g", 0)
    assert plan == RunPlan(opens=True, group="g")
    assert hash(plan) == hash(RunPlan(opens=True, group="g"))
    assert plan != RunPlan(opens=True)
    assert repr(RunPlan(False)).startswith("RunPlan(opens=False, run_id=None, ")
    with pytest.raises(AttributeError, match=r"RunPlan\.group cannot be changed"):
        plan.group = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"RunPlan\.group cannot be removed"):
        del plan.group


def test_the_functions_of_dataclasses_and_pickle_take_a_record():
    info = DistributedInfo(1, 2, launcher="slurm")
    assert dataclasses.is_dataclass(info)
    assert [field.name for field in dataclasses.fields(info)] == list(info.keys())
    assert dataclasses.asdict(info) == dict(info)
    assert dataclasses.replace(info, rank=0) == replace(info, rank=0) == DistributedInfo(0, 2, launcher="slurm")
    assert pickle.loads(pickle.dumps(info)) == info


def test_importing_the_package_imports_neither_dataclasses_nor_inspect():
    program = "import sys, flyteplugins_tracking; print({'dataclasses', 'inspect'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-S", "-c", program], text=True, cwd=PACKAGE.parent) == "set()\n"
