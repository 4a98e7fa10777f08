# torchrun --nproc-per-node=2 evaluation.py    # one run of 33 rows
# python evaluation.py evaluate    # alone: evaluate has a run of its own
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flyteplugins_tracking as tracking


@tracking.tracking_init(project="llm", name="trained")
def train(model: torch.nn.Module) -> None:
    run = tracking.get_run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(10):
            loss = model(torch.rand(16, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run is not None:
                run.log({"train/loss": loss.item(), "epoch": epoch})
        evaluate(model)  # on every rank, because it has a collective


@tracking.tracking_init(project="llm", name="evaluated")
def evaluate(model: torch.nn.Module) -> None:
    run = tracking.get_run()  # inside train: the run of train
    error = model(torch.rand(64, 8)).abs().mean().detach()
    dist.all_reduce(error)  # the sum over all ranks
    if run is not None:
        run.log({"test/error": error.item() / dist.get_world_size()})


if __name__ == "__main__":
    with tracking.process_group("gloo"):
        function = evaluate if sys.argv[1:] == ["evaluate"] else train
        function(DistributedDataParallel(torch.nn.Linear(8, 1)))
