"""The fault matrix, each fault as a real job against the recording server."""

from __future__ import annotations

import pytest

from faults.matrix import CASES

PARAMETERS = [pytest.param(case, id=case.fault, marks=[pytest.mark.full] if case.is_full else []) for case in CASES]


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_run_tells_the_truth_and_loses_nothing(case, tmp_path):
    found = case.run(tmp_path)
    assert case.wrong(found) == [], found.output
