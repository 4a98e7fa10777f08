"""A Flyte 2 task with workers that runs until its pod gets SIGTERM: see `flyte2_sigterm.py`."""

import time

import flyte
from flyte2_elastic import Elastic
from flyte2_sigterm import ready, tracked

from flyteplugins_tracking import get_run

QUICK = {"max_restarts": 0, "monitor_interval": 1, "rdzv_configs": {"timeout": 60, "join_timeout": 60}}
elastic = flyte.TaskEnvironment(name="sigterm_workers", plugin_config=Elastic(nnodes=1, nproc_per_node=2, **QUICK))


@tracked
@elastic.task
def workers(n: int) -> None:
    if get_run() is not None:
        get_run().log({"row": 0})
    ready()
    time.sleep(120)
