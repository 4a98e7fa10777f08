"""A training for nodes that may be taken away: it saves, ends, and continues.

torchrun --standalone --nproc-per-node=2 examples/preemptible.py checkpoint.pt

Send SIGTERM to torchrun, and start it again with the same WANDB_RUN_ID: the run
and the training continue. Without a W&B account: `export WANDB_MODE=offline`.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import (
    get_run,
    process_group,
    should_stop,
    tracking_init,
)

STEPS = 100


@tracking_init(
    project="examples",
    config={"lr": 0.05},
    if_unavailable="degrade",  # without the service, log to files
)
def train(checkpoint: Path) -> None:
    """Train from the checkpoint on, if there is one."""
    run = get_run()
    with process_group() as device:
        model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first = load(checkpoint, model, device)
        for step in range(first, STEPS):
            x = torch.rand(16, 1, device=device)
            loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.05)  # stands for a step of a large model
            if run is not None:
                run.log({"loss": loss.item(), "train_step": step})
            if should_stop(step):  # True on all ranks at the same step
                if run is not None:
                    save(checkpoint, model, step + 1)
                break


def load(checkpoint: Path, model: torch.nn.Module, device: torch.device) -> int:
    """Return the step to continue with. All nodes must see the file."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, weights_only=True, map_location=device)
    model.load_state_dict(state["model"])
    return int(state["step"])


def save(checkpoint: Path, model: torch.nn.Module, step: int) -> None:
    """Write beside it and move, so that a kill leaves a whole file."""
    part = checkpoint.with_suffix(".part")
    torch.save({"step": step, "model": model.state_dict()}, part)
    os.replace(part, checkpoint)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
