"""The fault matrix, each fault as a real job against the recording server."""

from __future__ import annotations

import pytest

from faults.matrix import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_the_run_tells_the_truth_and_loses_nothing(case, tmp_path):
    found = case.run(tmp_path)
    assert case.wrong(found) == [], found.output
