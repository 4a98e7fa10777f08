"""In the style of timm and open_clip: many arguments, checkpoints to resume from, DataLoader workers, rows by step."""

import argparse
import glob
import logging
import os
from datetime import datetime

import torch
import torch.distributed as dist
import wandb
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from flyteplugins_tracking import get_run, tracking_config, tracking_init

parser = argparse.ArgumentParser()
group = parser.add_argument_group("dataset")
group.add_argument("--std", type=float, nargs="+", default=[0.2, 0.2, 0.2])
group.add_argument("-b", "--batch-size", type=int, default=4)
group.add_argument("--workers", type=int, default=2)
group = parser.add_argument_group("model")
group.add_argument("--model", default="net")
group.add_argument("--resume", default="", help='a checkpoint, or "latest"')
group.add_argument("--torchcompile", nargs="?", const="inductor", default=None)
group = parser.add_argument_group("optimizer")
group.add_argument("--momentum", type=float, default=0.9)
group.add_argument("--lr", type=float, default=None)
group.add_argument("--lr-base", type=float, default=0.1)
group.add_argument("--epochs", type=int, default=2)
group.add_argument("--steps-per-epoch", type=int, default=4)
group.add_argument("--start-epoch", type=int, default=None)
group = parser.add_argument_group("distributed")
group.add_argument("--distributed", action="store_true")
group.add_argument("--local_rank", type=int, default=0)
group.add_argument("--dist-backend", default="gloo")
group = parser.add_argument_group("output")
group.add_argument("--log-interval", type=int, default=1)
group.add_argument("--output_dir", default="output")
group.add_argument("--experiment", default="")
group.add_argument("--log-wandb", action="store_true")
group.add_argument("--wandb-project", default="many-arguments")
group.add_argument("--wandb-tags", nargs="+", default=[])
group.add_argument("--wandb-notes", default="")

logger = logging.getLogger("train")


def init_distributed(args):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.device = torch.device("cpu")
    args.lr = args.lr or args.lr_base * args.batch_size * args.world_size / 256
    if args.distributed:
        dist.init_process_group(args.dist_backend)


def main():
    args = parser.parse_args()
    init_distributed(args)
    latest = sorted(glob.glob(os.path.join(args.output_dir, "*", "last.pt")))
    if args.resume == "latest":
        args.resume = latest[-1] if latest else ""
    args.output_dir = os.path.join(args.output_dir, datetime.now().strftime("%Y%m%d-%H%M%S.%f"))
    if args.rank == 0:
        os.makedirs(args.output_dir)
        with open(os.path.join(args.output_dir, "params.txt"), "w") as file:
            file.writelines(f"{name}: {value}\n" for name, value in sorted(vars(args).items()))
    options = {"project": args.wandb_project, "name": args.experiment, "notes": args.wandb_notes}
    with tracking_config(**options, tags=args.wandb_tags, mode=None if args.log_wandb else "disabled"):
        train(args)
    if args.distributed:
        dist.destroy_process_group()


@tracking_init
def train(args):
    if args.rank == 0 and args.log_wandb:
        get_run().config.update(vars(args))
        wandb.save(os.path.join(args.output_dir, "params.txt"), base_path=args.output_dir, policy="now")
    data = Samples(args.steps_per_epoch * args.batch_size * args.world_size)
    sampler = DistributedSampler(data, args.world_size, args.rank)
    # A worker that starts just when its rank is killed does not notice it, in torch 2.13, and lives on.
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=args.workers, persistent_workers=True)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    first = args.start_epoch or 0
    if args.resume:
        saved = torch.load(args.resume)
        model.module.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    if args.rank == 0 and args.log_wandb:
        wandb.watch(model, log=None)
    for epoch in range(first, args.epochs):
        loss = train_one_epoch(epoch, model, loader, optimizer, args)
        if args.rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(args.output_dir, "last.pt"))
            update_summary(epoch, {"train_loss": loss}, args.log_wandb)


def train_one_epoch(epoch, model, loader, optimizer, args):
    model.train()
    for i, (x, y) in enumerate(loader):
        step = epoch * len(loader) + i
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.rank == 0 and i % args.log_interval == 0:
            logger.info("epoch %d, step %d: %.3f", epoch, step, loss.item())
            if args.log_wandb:
                wandb.log({"train/loss": loss.item(), "train/lr": args.lr, "step": step}, step=step)
    return loss.item()


def update_summary(epoch, metrics, log_wandb=False):
    row = {"epoch": epoch, **metrics}
    print(row)
    if log_wandb:
        wandb.log(row)


if __name__ == "__main__":
    main()
