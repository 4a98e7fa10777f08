"""One decorator gives a training function its experiment-tracking run, on exactly the ranks that should have one.

A name is loaded when it is first asked for: what each rank pays for is the decorator and its way to "no run here".
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flyteplugins_tracking._process_group import process_group
    from flyteplugins_tracking.agents import get_sweep_parameters, sweep_agent
    from flyteplugins_tracking.context import tracking_config
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
    from flyteplugins_tracking.metrics import gather_metrics, prefix_metrics
    from flyteplugins_tracking.modes import RankScope, RunMode
    from flyteplugins_tracking.policy import RunPlan, plan
    from flyteplugins_tracking.sweeps import get_sweep_id, tracking_sweep, tracking_sweep_config
    from flyteplugins_tracking.topology import DistributedInfo, get_distributed_info, override_distributed_info

_MODULES = {
    "ConfigError": "errors",
    "DistributedInfo": "topology",
    "IdentityError": "errors",
    "RankScope": "modes",
    "RunMode": "modes",
    "RunPlan": "policy",
    "TopologyError": "errors",
    "TrackerNotInstalledError": "errors",
    "TrackerUnavailableError": "errors",
    "TrackingError": "errors",
    "gather_metrics": "metrics",
    "get_distributed_info": "topology",
    "get_run": "entries",
    "get_sweep_id": "sweeps",
    "get_sweep_parameters": "agents",
    "override_distributed_info": "topology",
    "plan": "policy",
    "prefix_metrics": "metrics",
    "process_group": "_process_group",
    "sweep_agent": "agents",
    "tracking_config": "context",
    "tracking_init": "decorator",
    "tracking_sweep": "sweeps",
    "tracking_sweep_config": "sweeps",
}

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


if not TYPE_CHECKING:  # a checker would take every misspelt name for one that `__getattr__` gives

    def __getattr__(name: str) -> object:
        """See https://peps.python.org/pep-0562."""
        from importlib import import_module

        if name in _MODULES:
            globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            return value
        if name in _MODULES.values():  # to a checker, they are loaded
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
