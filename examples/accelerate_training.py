"""Accelerate inside the decorator: its W&B tracker logs to the open run.

pip install "flyteplugins-tracking[wandb]" accelerate
torchrun --nproc-per-node=2 examples/accelerate_training.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import torch
from accelerate import Accelerator

from flyteplugins_tracking import tracking_init


@tracking_init(project="examples", name="accelerate", config={"data": "y = 2x"})
def train(steps: int) -> None:
    """Project and name are the decorator's; `init_trackers` adds config."""
    # Without a GPU and without `cpu`, each process believes that it is the
    # only one, and opens a run of its own.
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(log_with="wandb", cpu=not has_gpu)
    accelerator.init_trackers("ignored", config={"lr": 0.1})
    layer = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, sgd)
    for step in range(steps):
        x = torch.rand(16, 1, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()}, step=step)
    # DDP's gloo threads may need the GIL to end:
    # https://github.com/pytorch/pytorch/issues/56297
    model, optimizer = accelerator.free_memory(model, optimizer)
    # Ends the process group, and not the run: a failure below is recorded.
    accelerator.end_training()


if __name__ == "__main__":
    train(steps=4)
