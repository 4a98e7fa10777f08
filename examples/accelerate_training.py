"""Accelerate inside the decorator: its W&B tracker logs to the run that is open, on rank 0, and opens none.

pip install "flyteplugins-tracking[wandb]" accelerate
torchrun --nproc-per-node=2 examples/accelerate_training.py    # or: accelerate launch --multi_gpu

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import torch
from accelerate import Accelerator

from flyteplugins_tracking import tracking_init


@tracking_init(project="examples", name="accelerate", config={"data": "y = 2x"})
def train(steps: int) -> None:
    """Project and name are the decorator's, whatever `init_trackers` says; its config is added."""
    # Without `cpu`, where there is no GPU, each process takes itself for the only one, and opens a run of its own.
    accelerator = Accelerator(log_with="wandb", cpu=not torch.cuda.is_available())
    accelerator.init_trackers("ignored", config={"lr": 0.1})
    layer = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in range(steps):
        x = torch.rand(16, 1, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()}, step=step)
    # DDP's gloo threads may need the GIL to end: https://github.com/pytorch/pytorch/issues/56297
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()  # ends the process group, and not the run: a failure below is still recorded


if __name__ == "__main__":
    train(steps=4)
