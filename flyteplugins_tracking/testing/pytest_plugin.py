"""The fixtures of the test kit. Every pytest session of a user loads this module, so it imports the kit on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flyteplugins_tracking.testing import RecordedRuns, Simulation


@pytest.fixture
def recorded_runs() -> Iterator[RecordedRuns]:
    """Record the runs of the decorated functions that this process calls, instead of sending them."""
    from flyteplugins_tracking.testing import recording

    with recording() as runs:
        yield runs


@pytest.fixture
def simulated_ranks(recorded_runs: RecordedRuns) -> Callable[..., Simulation]:  # noqa: ARG001 nothing is sent
    """Provide `flyteplugins_tracking.testing.simulate`. Its runs are in `recorded_runs` too."""
    from flyteplugins_tracking.testing import simulate

    return simulate
