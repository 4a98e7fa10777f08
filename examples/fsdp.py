"""FSDP: each rank holds a part of the model, and rank 0 has the run.

torchrun --nproc-per-node=2 examples/fsdp.py

Needs torch 2.6. Without a W&B account: `export WANDB_MODE=offline` first.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flyteplugins_tracking import (
    gather_metrics,
    get_run,
    process_group,
    tracking_init,
)


@tracking_init(project="examples", name="fsdp", config={"lr": 1e-2})
def train(steps: int) -> None:
    """Learn the sum of 16 numbers."""
    run = get_run()  # W&B's run on rank 0, None on the other ranks
    with process_group() as device:  # NCCL on GPUs, else gloo
        world_size = torch.distributed.get_world_size()
        mesh = init_device_mesh(device.type, (world_size,))
        first, last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)
        model = torch.nn.Sequential(first, torch.nn.ReLU(), last).to(device)
        for layer in (first, last, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            x = torch.randn(32, 16, device=device)
            target = x.sum(dim=1, keepdim=True)
            loss = torch.nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # On every rank: the mean over the ranks, and each rank's own value.
            row = gather_metrics({"loss": loss, "norm": norm.full_tensor()})
            if run is not None:
                run.log(row)


if __name__ == "__main__":
    train(steps=20)
