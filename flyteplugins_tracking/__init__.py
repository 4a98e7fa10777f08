"""One decorator gives a training function its experiment-tracking run, on exactly the ranks that should have one."""

from flyteplugins_tracking._process_group import process_group
from flyteplugins_tracking.agents import get_sweep_parameters, sweep_agent
from flyteplugins_tracking.context import tracking_config
from flyteplugins_tracking.decorator import tracking_init
from flyteplugins_tracking.errors import (
    ConfigError,
    IdentityError,
    TopologyError,
    TrackerNotInstalledError,
    TrackerUnavailableError,
    TrackingError,
)
from flyteplugins_tracking.lifecycle import get_run
from flyteplugins_tracking.metrics import gather_metrics, prefix_metrics
from flyteplugins_tracking.policy import RankScope, RunMode, RunPlan, plan
from flyteplugins_tracking.sweeps import get_sweep_id, tracking_sweep, tracking_sweep_config
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
