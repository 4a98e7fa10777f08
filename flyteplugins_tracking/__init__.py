"""One decorator gives a training function its experiment-tracking run, on exactly the ranks that should have one.

Importing the package loads what a rank without a run needs. The other public names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flyteplugins_tracking.decorator import tracking_init
from flyteplugins_tracking.entries import get_run
from flyteplugins_tracking.errors import (
    ConfigError,
    IdentityError,
    TopologyError,
    TrackerNotInstalledError,
    TrackerUnavailableError,
    TrackingError,
)
from flyteplugins_tracking.policy import RankScope, RunMode, RunPlan, plan
from flyteplugins_tracking.topology import DistributedInfo, get_distributed_info, override_distributed_info

__all__ = [
    "ConfigError",
    "DistributedInfo",
    "IdentityError",
    "RankScope",
    "RunMode",
    "RunPlan",
    "TopologyError",
    "TrackerNotInstalledError",
    "TrackerUnavailableError",
    "TrackingError",
    "gather_metrics",
    "get_distributed_info",
    "get_run",
    "get_sweep_id",
    "get_sweep_parameters",
    "override_distributed_info",
    "plan",
    "prefix_metrics",
    "process_group",
    "sweep_agent",
    "tracking_config",
    "tracking_init",
    "tracking_sweep",
    "tracking_sweep_config",
]

# Those that are loaded on first use. With them, importing the package would take half as much time again.
if TYPE_CHECKING:
    from flyteplugins_tracking._process_group import process_group
    from flyteplugins_tracking.agents import get_sweep_parameters, sweep_agent
    from flyteplugins_tracking.context import tracking_config
    from flyteplugins_tracking.metrics import gather_metrics, prefix_metrics
    from flyteplugins_tracking.sweeps import get_sweep_id, tracking_sweep, tracking_sweep_config
else:  # without the `else`, a type checker would accept every misspelt name
    _MODULES = {
        "_process_group": ("process_group",),
        "agents": ("get_sweep_parameters", "sweep_agent"),
        "context": ("tracking_config",),
        "metrics": ("gather_metrics", "prefix_metrics"),
        "sweeps": ("get_sweep_id", "tracking_sweep", "tracking_sweep_config"),
    }

    def __getattr__(name: str) -> object:
        """See https://peps.python.org/pep-0562."""
        if name in _MODULES:  # to a type checker, they are loaded
            return import_module(f"{__name__}.{name}")
        for module, names in _MODULES.items():
            if name in names:
                globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
