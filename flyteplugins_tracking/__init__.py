"""One decorator opens a W&B, Pluto, MLflow or Trackio run on the right ranks, and closes it with the true exit code.

Importing the package loads only the modules that a rank without a run needs. The other public names are loaded on first
use.
"""

from typing import TYPE_CHECKING

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RankScope, RunMode, RunPlan, plan
from flyteplugins_tracking._rank.topology import get_distributed_info, override_distributed_info
from flyteplugins_tracking._runs.calls import get_run
from flyteplugins_tracking._util.modules import loaded_on_use
from flyteplugins_tracking.decorator import tracking_init, tracking_run
from flyteplugins_tracking.errors import (
    ConfigError,
    IdentityError,
    TopologyError,
    TrackerNotInstalledError,
    TrackerUnavailableError,
    TrackingError,
)

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
    "get_distributed_info",
    "get_run",
    "get_sweep_id",
    "get_sweep_parameters",
    "heartbeat",
    "override_distributed_info",
    "plan",
    "prefix_metrics",
    "process_group",
    "request_stop",
    "should_stop",
    "tracking_config",
    "tracking_init",
    "tracking_run",
    "tracking_sweep",
    "tracking_sweep_config",
]

# These are loaded on first use: with them, importing the package would take 1.5 times as long.
if TYPE_CHECKING:
    from flyteplugins_tracking._flyte.tracking_config import tracking_config
    from flyteplugins_tracking._job.metrics import prefix_metrics
    from flyteplugins_tracking._job.process_group import process_group
    from flyteplugins_tracking._job.progress import heartbeat
    from flyteplugins_tracking._runs.stopping import request_stop, should_stop
    from flyteplugins_tracking._sweeps.sweep import (
        get_sweep_id,
        get_sweep_parameters,
        tracking_sweep,
        tracking_sweep_config,
    )
else:  # without the `else`, a type checker would accept every misspelt name
    _MODULES = {
        "_flyte.tracking_config": ("tracking_config",),
        "_job.metrics": ("prefix_metrics",),
        "_job.process_group": ("process_group",),
        "_job.progress": ("heartbeat",),
        "_runs.stopping": ("request_stop", "should_stop"),
        "_sweeps.sweep": (
            "get_sweep_id",
            "get_sweep_parameters",
            "tracking_sweep",
            "tracking_sweep_config",
        ),
    }
    # What to use instead of a name that has been removed. An entry stays for one release.
    _REMOVED = {
        "gather_metrics": 'use torch.distributed.gather_object(), as docs/guides/ranks.md shows: "Values of all ranks"',
        "sweep_agent": "use wandb.agent(get_sweep_id(), function=objective), or the command `wandb agent` for trials "
        "that are distributed jobs",
    }
    __getattr__, __dir__ = loaded_on_use(globals(), _MODULES, _REMOVED)
