"""One run for the whole job, on rank 0: data-parallel training.

torchrun --nproc-per-node=2 examples/single_logger.py

Without a W&B account: `export WANDB_MODE=offline` first. On one process it is
one run too: `python single_logger.py`.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import (
    get_distributed_info,
    get_run,
    process_group,
    tracking_init,
)


@tracking_init(
    project="examples",
    run_mode="auto",
    config={"lr": 0.1, "batch_size": 16},
)
def train(steps: int) -> None:
    """Fit y = 3x - 1, each rank on batches of its own."""
    run, info = (
        get_run(),
        get_distributed_info(),
    )  # W&B's own run on rank 0, None on all others
    torch.manual_seed(info.rank if info else 0)
    with process_group() as device:  # NCCL on GPUs, else gloo
        model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            x = torch.rand(16, 1, device=device)
            loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
            if run is not None:
                run.log({"loss": loss.item()})


if __name__ == "__main__":
    train(steps=20)
