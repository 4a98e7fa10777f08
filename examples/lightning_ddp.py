# torchrun --nproc-per-node=2 lightning_ddp.py
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger, WandbLogger

from flyteplugins_tracking import should_stop, tracking_init


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss


class StopTogether(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if should_stop() and not trainer.should_stop:  # after the same batch
            trainer.save_checkpoint("last.ckpt")  # on all ranks
            trainer.should_stop = True


def fit(logger: Logger) -> None:
    options: Any = {"max_steps": 2, "limit_val_batches": 0}
    options["accelerator"] = "auto" if torch.cuda.device_count() > 1 else "cpu"
    options |= {"log_every_n_steps": 1, "callbacks": [StopTogether()]}
    trainer = Trainer(strategy="ddp", devices=2, logger=logger, **options)
    trainer.fit(Model())  # after a stop: fit(..., ckpt_path="last.ckpt")


@tracking_init(project="examples", name="lightning", config={"data": "noise"})
def train() -> None:
    fit(WandbLogger())  # it uses the run that is open


if __name__ == "__main__":
    train()
