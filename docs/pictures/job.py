"""The trainings of the pictures: `job.py wandb`, under torchrun, and `job.py trackio`."""

from __future__ import annotations

import math
import random
import sys

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

CONFIG = {"lr": 3e-4, "batch_size": 64}


def values(step: int, seed: int, lr: float = 3e-4) -> dict[str, float]:
    """Values that look like those of a training."""
    noise = random.Random(seed * 100_000 + step)
    loss = 2.2 * math.exp(-step * lr * 130) + 1.4 + noise.gauss(0, 0.05)
    return {"loss": loss, "accuracy": 1 - loss / 4}


@tracking_init(project="llm", id="llm-7b", run_mode="shared", rank_prefix=True, config=CONFIG)
def train_on_all_ranks(steps: int) -> None:
    """One run, which all ranks of all nodes log to."""
    run, info = get_run(), get_distributed_info()
    for step in range(steps):
        run.log(values(step, info.rank), step=step)


def train_in_trackio(steps: int) -> None:
    """Two runs in one project."""
    for run_id, lr in (("llm-7b-lr-1e-4", 1e-4), ("llm-7b", 3e-4)):

        @tracking_init(tracker="trackio", project="llm", id=run_id, config={**CONFIG, "lr": lr})
        def train(lr: float) -> None:
            run = get_run()
            for step in range(steps):
                run.log({**values(step, 0, lr), "lr": lr * (1 - step / steps)})

        train(lr)


if __name__ == "__main__":
    {"wandb": train_on_all_ranks, "trackio": train_in_trackio}[sys.argv[1]](steps=150)
