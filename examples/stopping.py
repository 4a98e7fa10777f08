"""All ranks leave their loop at the same step, and save a checkpoint.

torchrun --nproc-per-node=2 examples/stopping.py

Send SIGTERM to one of its processes, or to torchrun: both ranks stop at the
same step. Without a W&B account: `export WANDB_MODE=offline` first.
"""

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import (
    get_run,
    process_group,
    should_stop,
    tracking_init,
)

CHECKPOINT = Path("checkpoint.pt")


@tracking_init(
    project="examples",
    stop_before_s=600,  # ten minutes before Slurm's time limit
)
def train(steps: int) -> None:
    """Train from the checkpoint on, if there is one."""
    run = get_run()
    with process_group("gloo") as device:
        model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = {"step": 0}
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(state.get("model", model.state_dict()))
        for step in range(state["step"], steps):
            x = torch.rand(16, 1, device=device)
            loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run is not None:
                run.log({"loss": loss.item()})
            if should_stop():
                if run is not None:
                    torch.save(
                        {"step": step + 1, "model": model.state_dict()},
                        CHECKPOINT,
                    )
                break


if __name__ == "__main__":
    train(steps=100_000)
