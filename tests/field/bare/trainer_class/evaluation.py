import torch
import torch.distributed as dist
import wandb


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    error = (model(data.x) - data.x.sum(1, True)).abs().mean()
    model.train()
    dist.all_reduce(error)
    error = error.item() / dist.get_world_size()
    if dist.get_rank() == 0:
        wandb.log({"eval/error": error})
    return error
