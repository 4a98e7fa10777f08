"""In the style of Megatron-LM: the last rank has a writer of W&B, and one of TensorBoard beside it."""

import argparse

import torch
import torch.distributed as dist
from tiny import Net, Samples
from torch.utils.tensorboard import SummaryWriter

_GLOBAL_WANDB_WRITER = None
_GLOBAL_TENSORBOARD_WRITER = None


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def set_global_writers(args):
    global _GLOBAL_WANDB_WRITER, _GLOBAL_TENSORBOARD_WRITER
    if not is_last_rank():
        return
    _GLOBAL_TENSORBOARD_WRITER = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=1)
    if args.wandb_project:
        import wandb

        wandb.init(dir=args.save, name=args.wandb_exp_name, project=args.wandb_project, config=vars(args))
        _GLOBAL_WANDB_WRITER = wandb


def training_log(losses, iteration):
    if _GLOBAL_TENSORBOARD_WRITER is not None:
        _GLOBAL_TENSORBOARD_WRITER.add_scalar("lm loss", losses["lm loss"], iteration)
    if _GLOBAL_WANDB_WRITER is not None:
        _GLOBAL_WANDB_WRITER.log({**losses, "iteration": iteration}, iteration)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=8)
    parser.add_argument("--save", default=".")
    parser.add_argument("--tensorboard-dir", default="tensorboard")
    parser.add_argument("--wandb-project", default="megatron")
    parser.add_argument("--wandb-exp-name", default="gpt3-126m")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    set_global_writers(args)
    data, model = Samples(), Net()
    for iteration in range(args.train_iters):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        training_log({"lm loss": loss.item()}, iteration)
    if _GLOBAL_TENSORBOARD_WRITER is not None:
        _GLOBAL_TENSORBOARD_WRITER.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
