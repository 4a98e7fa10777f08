# torchrun --standalone --nproc-per-node=2 move.py --lr 0.1
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import get_run, process_group, tracking_init


@tracking_init(project="llm")  # was: wandb.init(project="llm") on rank 0
def main(args: argparse.Namespace) -> None:
    run = get_run()
    if run is not None:
        run.config.update(vars(args))  # the arguments are the run's config
    with process_group() as device:  # was: dist.init_process_group(...)
        model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        for step in range(args.steps):
            loss = model(torch.rand(16, 8, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run is not None:  # was: if dist.get_rank() == 0: wandb.log(...)
                run.log({"loss": loss.item()}, step=step)
        if dist.get_rank() == 0:  # stays: it does not log to the run
            torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args())
