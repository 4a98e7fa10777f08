"""In the style of nanoGPT: no function; the globals are the config, and the command line changes them."""

import ast
import os
import sys

import torch
import torch.distributed as dist
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel

wandb_log = True
wandb_project = "module-level"
wandb_run_name = "gpt2-124M"
max_iters = 8
batch_size = 4
learning_rate = 1e-2
decay_lr = True
backend = "gloo"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = ast.literal_eval(value)
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
else:
    rank, world_size = 0, 1
master_process = rank == 0

data = Samples()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {"val": torch.nn.functional.mse_loss((model.module if ddp else model)(data.x), data.x.sum(1, True)).item()}
    model.train()
    return losses


if wandb_log and master_process:
    import wandb

    wandb.init(project=wandb_project, name=wandb_run_name, config=config)

iter_num = 0
lr = learning_rate
while True:
    lr = learning_rate * (1 - iter_num / max_iters) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group["lr"] = lr
    chosen = torch.randint(len(data), (batch_size,))
    loss = torch.nn.functional.mse_loss(model(data.x[chosen]), data.x[chosen].sum(1, True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        losses = estimate_loss()
        print(f"iter {iter_num}: loss {loss.item():.4f}, val {losses['val']:.4f}")
        if wandb_log:
            wandb.log({"iter": iter_num, "train/loss": loss.item(), "val/loss": losses["val"], "lr": lr})
    iter_num += 1
    if iter_num >= max_iters:
        break

if ddp:
    dist.destroy_process_group()
