"""One training, logged by different clients: `compared.py CLIENT CASE`, under torchrun.

Its first steps log a row each. Then it waits for what the case does to it, or for the file `go`, and returns.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROWS, LAST = 50, 1
Log = Callable[[dict[str, float]], object]


def bare(case: str) -> None:
    import wandb

    dist.init_process_group("gloo")
    run = wandb.init(project="compared") if is_writer(case) else None
    train(case, run.log if run else print)
    dist.destroy_process_group()


def ours(case: str) -> None:
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="compared", primary_rank=LAST if case == "a pipeline's last rank" else 0)
    def tracked() -> None:
        run = get_run()
        dist.init_process_group("gloo")
        train(case, run.log if run is not None else print)
        dist.destroy_process_group()

    tracked()


def accelerate(case: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(log_with="wandb", cpu=True)
    accelerator.init_trackers("compared")
    train(case, accelerator.log)
    accelerator.end_training()


def lightning(case: str) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import WandbLogger

    class Model(BoringModel):
        def training_step(self, batch: Any, index: int) -> Any:
            if not step(case, self.global_step, self.log_dict):
                self.trainer.should_stop = True
            return super().training_step(batch, index)

    options: Any = {"max_epochs": -1, "limit_val_batches": 0, "log_every_n_steps": 1, "enable_checkpointing": False}
    logger = WandbLogger(project="compared")
    Trainer(strategy="ddp", devices=2, accelerator="cpu", logger=logger, **options).fit(Model())


def is_writer(case: str) -> bool:
    """Whether this rank has what is logged."""
    return int(os.environ["RANK"]) == (LAST if case == "a pipeline's last rank" else 0)


def train(case: str, log: Log) -> None:
    number = 0
    while step(case, number, log):
        number += 1


def step(case: str, number: int, log: Log) -> bool:
    """Do a step, and return whether the training goes on."""
    rank = int(os.environ["RANK"])
    if number < ROWS:
        if is_writer(case):
            is_second = Path("go").exists()
            log({"loss": 1 / (number + 1), "row": number + is_second * ROWS})
        return True
    Path(f"ready-{rank}").touch()
    if case == "SIGTERM in a collective":
        time.sleep(60) if rank else dist.barrier()
    if case == "another rank raises" and rank:
        wait_for("ready-0")
        raise ValueError("made to fail")
    time.sleep(1)
    return not Path("go").exists()


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.05)


if __name__ == "__main__":
    {"bare": bare, "ours": ours, "accelerate": accelerate, "lightning": lightning}[sys.argv[1]](sys.argv[2])
