"""The fixtures of the test kit. Every pytest session of its users loads this, so it imports the kit on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flyteplugins_tracking.testing import RecordedRuns, Simulation


@pytest.fixture
def recorded_runs() -> Iterator[RecordedRuns]:
    """The runs of the functions under `@tracking_init` that this process calls, which are recorded and not sent."""
    from flyteplugins_tracking.testing import recording

    with recording() as runs:
        yield runs


@pytest.fixture
def simulated_ranks(recorded_runs: RecordedRuns) -> Callable[..., Simulation]:  # noqa: ARG001 nothing is sent
    """`flyteplugins_tracking.testing.simulate`, whose runs are in `recorded_runs` too."""
    from flyteplugins_tracking.testing import simulate

    return simulate
