"""Tools to test code that uses the decorator, without a launcher, a service or an account.

In the room: `simulation` calls a tracked function once per rank, `recorder` is the tracker that keeps runs in memory,
and `pytest_plugin` has the fixtures. The names in `__all__` are public. They are loaded on first use, because pytest
loads the plugin in every project that has this package.
May enter: test doubles that users need. Must not: tests of this package, or code that a training job needs.
It may import every other room. No other room may import this one.
"""

from typing import TYPE_CHECKING

__all__ = [
    "Call",
    "RankResult",
    "RecordedRun",
    "RecordedRuns",
    "RecordingTracker",
    "Row",
    "Simulation",
    "recording",
    "simulate",
]

if TYPE_CHECKING:
    from flyteplugins_tracking.testing.recorder import Call, RecordedRun, RecordedRuns, RecordingTracker, Row
    from flyteplugins_tracking.testing.simulation import RankResult, Simulation, recording, simulate
else:  # without the `else`, a type checker would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from flyteplugins_tracking.testing import recorder, simulation

        globals()[name] = value = getattr(simulation if hasattr(simulation, name) else recorder, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
