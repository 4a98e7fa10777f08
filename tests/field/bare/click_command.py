"""A command of click."""

import os

import click
import torch
import torch.distributed as dist
import wandb
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel


@click.command()
@click.option("--steps", default=8)
@click.option("--lr", default=0.01)
@click.option("--notes", default="")
@click.option("--resume", default=None, type=click.Path())
@click.option("--target", default=None, type=float, help="the loss that the training has to reach")
def main(steps, lr, notes, resume, target):
    rank = int(os.environ["RANK"])
    if rank == 0:
        wandb.init(project="click-command", notes=notes, config={"lr": lr, "steps": steps, "resume": resume})
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = Samples()
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            wandb.log({"loss": loss.item()}, step=step)
    if rank == 0:
        wandb.run.summary["last"] = loss.item()
    dist.destroy_process_group()
    if target is not None and loss.item() > target:
        click.echo(f"the loss is {loss.item():.3f}")
        raise click.exceptions.Exit(3)


if __name__ == "__main__":
    main()
