"""A job for submitit, in the style of MAE's: an object that is pickled, called on each task, and makes checkpoints.

Moved: `tracking_init` on the method that trains.
"""

import json
import os
from pathlib import Path

import torch
from tiny import Net, Samples

from flyteplugins_tracking import get_run, tracking_init


class Training:
    def __init__(self, steps: int, first: int = 0) -> None:
        self.steps, self.first = steps, first

    def __call__(self) -> int:
        return self.train()

    @tracking_init(project="mae")
    def train(self) -> int:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]  # as such jobs do for torch
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        run, data, model = get_run(), Samples(), Net()
        for step in range(self.first, self.steps):
            loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
            loss.backward()
            if run is not None:
                run.log({"loss": loss.item(), "at": step})
            Path(f"step-{os.environ['SLURM_PROCID']}").write_text(json.dumps(step + 1))
        return self.steps

    def checkpoint(self) -> "Training":
        return Training(self.steps, json.loads(Path("step-0").read_text()))
