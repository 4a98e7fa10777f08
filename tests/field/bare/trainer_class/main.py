"""A trainer class, and rows that are logged in three files."""

import sys
from dataclasses import asdict, dataclass

import torch.distributed as dist
import wandb
from evaluation import evaluate
from tiny import Net, Samples
from trainer import Trainer


@dataclass
class TrainerConfig:
    max_steps: int = int(sys.argv[1] if len(sys.argv) > 1 else 8)
    eval_every: int = 2
    learning_rate: float = 0.01


def main():
    dist.init_process_group("gloo")
    config = TrainerConfig()
    if dist.get_rank() == 0:
        wandb.init(project="trainer-class", config={"data": {"samples": 64}, "trainer": asdict(config)})
        wandb.define_metric("eval/*", step_metric="iteration")
    trainer = Trainer(config, Net(), Samples())
    trainer.train()
    error = evaluate(trainer.model, trainer.data)
    if dist.get_rank() == 0:
        wandb.log({"final/error": error})
        wandb.run.summary["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
