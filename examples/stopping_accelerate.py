"""Accelerate: all ranks leave the loop at the same step, and save a checkpoint.

torchrun --nproc-per-node=2 examples/stopping_accelerate.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import torch
from accelerate import Accelerator

from flyteplugins_tracking import should_stop, tracking_init


@tracking_init(project="examples", name="accelerate", stop_before_s=600)
def train(steps: int) -> None:
    """Next attempt: `accelerator.load_state("checkpoint")`."""
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(log_with="wandb", cpu=not has_gpu)
    accelerator.init_trackers("ignored")
    layer = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, sgd)
    for _ in range(steps):
        x = torch.rand(16, 1, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()})
        if should_stop():
            accelerator.save_state("checkpoint")  # on all ranks
            break
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    train(steps=100_000)
