r"""A training that survives the loss of a rank.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # for gloo: see docs/restarts.md
torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
    examples/elastic_checkpoint.py checkpoint.pt

Kill one of its processes. torchrun starts both ranks again, and the training
continues at the last checkpoint. Its rows come behind the earlier ones in the
same run. Without a W&B account: `export WANDB_MODE=offline` first.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import (
    get_distributed_info,
    get_run,
    process_group,
    tracking_init,
)

STEPS, STEPS_A_CHECKPOINT = 20, 5


@tracking_init(project="examples", config={"lr": 0.05})
def train(checkpoint: Path, device: torch.device) -> None:
    """Train from the checkpoint on, if there is one."""
    run, info = get_run(), get_distributed_info()
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = load(checkpoint, model, optimizer)
    if run is not None:
        # A column and not `step=`, since W&B drops a row whose step was there:
        # the steps between the checkpoint and the failure come twice.
        run.define_metric("*", step_metric="train_step")
    for step in range(first, STEPS):
        x = torch.rand(16, 1, device=device)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.1)  # stands for a step of a large model
        if run is not None:
            run.log(
                {
                    "loss": loss.item(),
                    "train_step": step,
                    "restarts": info.restart_count if info else 0,
                }
            )
            if (step + 1) % STEPS_A_CHECKPOINT == 0:
                save(
                    checkpoint,
                    {
                        "step": step + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                )


def load(
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Return the step to continue with. All nodes must see the file."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write beside it and move, so that a kill leaves a whole file."""
    part = checkpoint.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, checkpoint)


if __name__ == "__main__":
    with process_group() as device:  # NCCL on GPUs, else gloo
        path = sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt"
        train(Path(path), device)
