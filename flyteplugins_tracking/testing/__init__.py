"""Tools to test code that uses the decorator, without a launcher, a service or an account.

In the room: `simulation` calls a tracked function once per rank, `pool` once per task on long-lived workers, `recorder`
is the tracker that keeps runs in memory, and `pytest_plugin` has the fixtures. The names in `__all__` are public. They
are loaded on first use, because pytest loads the plugin in every project that has this package.
May enter: test doubles that users need. Must not: tests of this package, or code that a training needs.
It may import every other room. No other room may import this one.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "Call",
    "PoolSimulation",
    "RankResult",
    "RecordedRun",
    "RecordedRuns",
    "RecordingTracker",
    "Row",
    "Simulation",
    "TaskResult",
    "recording",
    "simulate",
    "simulate_pool",
]
_OF_POOL = ("PoolSimulation", "TaskResult", "simulate_pool")

if TYPE_CHECKING:
    from flyteplugins_tracking.testing.pool import PoolSimulation, TaskResult, simulate_pool
    from flyteplugins_tracking.testing.recorder import Call, RecordedRun, RecordedRuns, RecordingTracker, Row
    from flyteplugins_tracking.testing.simulation import RankResult, Simulation, recording, simulate
else:  # without the `else`, a type checker would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "pool" if name in _OF_POOL else "simulation"
        globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
