"""The fault matrix, each fault as a real job against the recording server."""

from __future__ import annotations

import pytest

from faults.matrix import CASES

# If a signal comes as torch's agent enters the wrapper that measures its calls, before the wrapper notes the time, the
# agent itself fails and sends SIGTERM instead of the signal: another fault than the one that is tested.
AGENT_FAILED = "cannot access local variable 'start' where it is not associated with a value"
PARAMETERS = [pytest.param(case, id=case.fault, marks=[pytest.mark.full] if case.is_full else []) for case in CASES]


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_run_tells_the_truth_and_loses_nothing(case, tmp_path):
    found = case.run(tmp_path / "first")
    if AGENT_FAILED in found.output:
        found = case.run(tmp_path / "again")
    assert case.wrong(found) == [], found.output
