"""Flyte 2 programs with workers, as they are written for flyteplugins-wandb: see `compat_tasks.py`."""

import flyte
from compat_tasks import seen
from flyte2_elastic import Elastic

from flyteplugins_tracking.compat.wandb import get_distributed_info, get_wandb_run, wandb_init

workers = flyte.TaskEnvironment(
    name="compat-workers", plugin_config=Elastic(nnodes=1, nproc_per_node=2, max_restarts=0, monitor_interval=1)
)


def log_the_rank(tag: str) -> None:
    run = get_wandb_run()
    info = get_distributed_info()
    if run:
        run.log({"rank": info["rank"]})
    seen(tag, info=info, kind=type(info).__name__, run=run.id if run else None)


@wandb_init
@workers.task
def auto_global(n: int) -> None:
    log_the_rank("auto_global")


@wandb_init(rank_scope="worker")
@workers.task
def auto_worker(n: int) -> None:
    log_the_rank("auto_worker")


@wandb_init(run_mode="shared")
@workers.task
def shared_global(n: int) -> None:
    log_the_rank("shared_global")


@wandb_init(run_mode="shared", rank_scope="worker")
@workers.task
def shared_worker(n: int) -> None:
    log_the_rank("shared_worker")


@wandb_init(run_mode="new")
@workers.task
def new_global(n: int) -> None:
    log_the_rank("new_global")


@wandb_init(run_mode="new", rank_scope="worker")
@workers.task
def new_worker(n: int) -> None:
    log_the_rank("new_worker")
