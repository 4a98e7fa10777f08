"""The Flyte task of the pictures, with 4 ranks."""

from __future__ import annotations

from flytekit import task
from flytekitplugins.kfpytorch import Elastic
from job import CONFIG, values

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


@task(enable_deck=True, task_config=Elastic(nnodes=1, nproc_per_node=4, start_method="fork", increase_shared_mem=False))
@tracking_init(project="llm", id="llm-7b", run_mode="new", entity="my-team", config=CONFIG)
def train_in_flyte(n: int) -> None:
    """A run for every rank, in the task's deck."""
    run, info = get_run(), get_distributed_info()
    for step in range(150 * n):
        run.log(values(step, info.rank))
