"""Tools to test code that uses the decorator, without a launcher, a service or an account.

In the room: `simulation` calls a tracked function once per rank, `recorder` is the tracker that keeps runs in memory,
and `pytest_plugin` has the fixtures. The names in `__all__` are public. They are loaded on first use, because pytest
loads the plugin in every project that has this package.
May enter: test doubles that users need. Must not: tests of this package, or code that a training job needs.
It may import every other room. No other room may import this one.
"""

from typing import TYPE_CHECKING

from flyteplugins_tracking._util.modules import loaded_on_use

__all__ = [
    "MethodCall",
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
    from flyteplugins_tracking.testing.recorder import MethodCall, RecordedRun, RecordedRuns, RecordingTracker, Row
    from flyteplugins_tracking.testing.simulation import RankResult, Simulation, recording, simulate
else:  # without the `else`, a type checker would accept every misspelt name
    _MODULES = {
        "testing.recorder": ("MethodCall", "RecordedRun", "RecordedRuns", "RecordingTracker", "Row"),
        "testing.simulation": ("RankResult", "Simulation", "recording", "simulate"),
    }
    __getattr__, __dir__ = loaded_on_use(globals(), _MODULES)
