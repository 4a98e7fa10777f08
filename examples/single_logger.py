"""One run for the whole job, written by rank 0: data-parallel training with PyTorch.

torchrun --nproc-per-node=2 examples/single_logger.py

Without a W&B account: `export WANDB_MODE=offline` first. On one process it is one run too: `python single_logger.py`.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


@tracking_init(project="examples", run_mode="auto", config={"lr": 0.1, "batch_size": 16})
def train(steps: int) -> float:
    """Fit y = 3x - 1, each rank on batches of its own; the last loss."""
    run = get_run()  # W&B's own run on rank 0, None on all others
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    if dist.is_initialized():
        model = DistributedDataParallel(model)  # averages the gradients of all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.rand(16, 1)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.log({"loss": loss.item()})
    return loss.item()


def main() -> None:
    """Train, in a process group where there are several ranks."""
    info = get_distributed_info()
    torch.manual_seed(info.rank if info else 0)
    if info is not None:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        print(f"last loss: {train(steps=20):.4f}")
    finally:
        if info is not None:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
