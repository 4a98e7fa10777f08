"""Lightning: all ranks stop after the same batch, and save a checkpoint.

torchrun --nproc-per-node=2 examples/stopping_lightning.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning_ddp import Line
from torch.utils.data import DataLoader

from flyteplugins_tracking import should_stop, tracking_init


class StopTogether(Callback):
    """Lightning asks after each batch, on every rank."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save a checkpoint, and stop."""
        if should_stop() and not trainer.should_stop:
            trainer.save_checkpoint("last.ckpt")  # on all ranks
            trainer.should_stop = True


@tracking_init(project="examples", name="lightning", stop_before_s=600)
def train() -> None:
    """Next attempt: `trainer.fit(..., ckpt_path="last.ckpt")`."""
    trainer = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        logger=WandbLogger(),
        max_steps=100_000,
        max_epochs=-1,
        enable_checkpointing=False,
        callbacks=[StopTogether()],
    )
    trainer.fit(Line(), DataLoader([torch.tensor([i / 4]) for i in range(4)]))


if __name__ == "__main__":
    train()
