"""A command of click."""

import click
import torch
import torch.distributed as dist
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import get_run, tracking_init


@click.command()
@click.option("--steps", default=8)
@click.option("--lr", default=0.01)
@click.option("--notes", default="")
@click.option("--resume", default=None, type=click.Path())
@click.option("--target", default=None, type=float, help="the loss that the training has to reach")
@tracking_init(project="click-command")
def main(steps, lr, notes, resume, target):
    run = get_run()
    if run is not None:
        run.notes = notes
        run.config.update({"lr": lr, "steps": steps, "resume": resume})
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = Samples()
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.log({"loss": loss.item()}, step=step)
    if run is not None:
        run.summary["last"] = loss.item()
    dist.destroy_process_group()
    if target is not None and loss.item() > target:
        click.echo(f"the loss is {loss.item():.3f}")
        raise click.exceptions.Exit(3)


if __name__ == "__main__":
    main()
