"""Fixtures and the search path of the support modules."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from support.jobs import environment

# A busy machine is no finding.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process's environment without any launcher's variables."""
    for name in set(os.environ) - set(environment(Path())):
        monkeypatch.delenv(name)
    return monkeypatch
