"""An evaluation function that logs to the run of the training that calls it.

torchrun --nproc-per-node=2 examples/evaluation.py
python examples/evaluation.py evaluate    # alone: it has a run of its own

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import (
    gather_metrics,
    get_run,
    process_group,
    tracking_init,
)

EPOCHS, STEPS = 3, 10


@tracking_init(project="examples", name="trained", config={"lr": 0.1})
def train(device: torch.device) -> None:
    """Fit y = 3x - 1, and evaluate after each epoch."""
    run = get_run()
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            x = torch.rand(16, 1, device=device)
            loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run is not None:
                run.log({"train/loss": loss.item(), "epoch": epoch})
        evaluate(model, device)


@tracking_init(project="examples", name="evaluated")
def evaluate(model: torch.nn.Module, device: torch.device) -> None:
    """Log the error on each rank's share of the test data."""
    run = get_run()  # inside train: the run of train
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    x = torch.linspace(0, 1, 64, device=device)[rank::ranks].unsqueeze(1)
    with torch.no_grad():
        error = (model(x) - (3 * x - 1)).abs().mean()
    row = gather_metrics({"test/error": error}, stats=("mean", "max"))
    if run is not None:
        run.log(row)


if __name__ == "__main__":
    with process_group() as device:
        if sys.argv[1:] == ["evaluate"]:
            evaluate(torch.nn.Linear(1, 1).to(device), device)
        else:
            train(device)
