"""In the style of MLflow's examples: parameters, metrics and a text, in `with mlflow.start_run()`."""

import argparse
import os

import mlflow
import torch
import torch.distributed as dist
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel


def train(args, rank):
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = Samples()
    for step in range(args.steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            mlflow.log_metric("loss", loss.item(), step=step)


def main(args):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if rank == 0:
        mlflow.set_experiment("mlflow-example")
        with mlflow.start_run(run_name="digits"):
            mlflow.log_params(vars(args))
            train(args, rank)
            mlflow.set_tag("done", "yes")
    else:
        train(args, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--distributed", action="store_true")
    main(parser.parse_args())
