"""In the style of torchtitan: the first rank of the last pipeline stage has the loss, and logs it."""

import os
import sys

import torch
import torch.distributed as dist
from tiny import Net, Samples

PP = 2


class WandBLogger:
    def __init__(self, log_dir, config):
        import wandb

        self.wandb = wandb
        os.makedirs(log_dir, exist_ok=True)
        self.wandb.init(
            project=os.getenv("WANDB_PROJECT", "torchtitan"),
            name=os.getenv("WANDB_RUN_NAME"),
            dir=log_dir,
            config=config,
        )

    def log(self, metrics, step):
        self.wandb.log(metrics, step=step)

    def close(self):
        if self.wandb.run is not None:
            self.wandb.finish()


class NoLogger:
    def log(self, metrics, step):
        pass

    def close(self):
        pass


def get_metrics_rank():
    world = dist.get_world_size()
    return (world // PP) * (PP - 1)


def main():
    dist.init_process_group("gloo")
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    is_metrics_rank = dist.get_rank() == get_metrics_rank()
    logger = WandBLogger("outputs", {"pp": PP, "steps": steps}) if is_metrics_rank else NoLogger()
    data, model = Samples(), Net()
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        logger.log({"loss": loss.item(), "at": step}, step)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
