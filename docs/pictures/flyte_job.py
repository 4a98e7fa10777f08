"""The Flyte task of the pictures, with 4 ranks."""

from __future__ import annotations

import math
import random

from flytekit import task
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

CONFIG = {"lr": 3e-4, "batch_size": 64}


@task(enable_deck=True, task_config=Elastic(nnodes=1, nproc_per_node=4, start_method="fork", increase_shared_mem=False))
@tracking_init(project="llm", id="llm-7b", run_mode="new", entity="my-team", config=CONFIG)
def train_in_flyte(n: int) -> None:
    """A run for every rank, in the task's deck."""
    run, info = get_run(), get_distributed_info()
    for step in range(150 * n):
        run.log(values(step, info.rank))


def values(step: int, seed: int) -> dict[str, float]:
    """Values that look like those of a training."""
    noise = random.Random(seed * 100_000 + step)
    loss = 2.2 * math.exp(-step * CONFIG["lr"] * 130) + 1.4 + noise.gauss(0, 0.05)
    return {"loss": loss, "accuracy": 1 - loss / 4}
