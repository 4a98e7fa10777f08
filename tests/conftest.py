"""Fixtures and the search path of the support modules."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import hypothesis
import pytest
from support.jobs import environment
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A busy machine is no finding.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process's environment without any launcher's variables."""
    for name in set(os.environ) - set(environment(Path())):
        monkeypatch.delenv(name)
    return monkeypatch


class _Scheduler(LoadScopeScheduling):
    """Each test goes where a worker is free; those of a module that share its fixtures stay in one, in their order.

    By file alone, a worker would be left with the longest one. (xdist's own groups do nothing under pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _shares_fixtures(path) else nodeid


@functools.cache
def _shares_fixtures(path: str) -> bool:
    return 'scope="module"' in (Path(__file__).parents[1] / path).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Scheduler(config, log)
