"""Lightning inside the decorator: its WandbLogger logs to the open run.

pip install "flyteplugins-tracking[wandb]" lightning
torchrun --nproc-per-node=2 examples/lightning_ddp.py
python examples/lightning_ddp.py    # Lightning starts the second process itself

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from torch.utils.data import DataLoader

from flyteplugins_tracking import get_run, tracking_init


class Line(LightningModule):
    """Learns y = 2x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        loss = torch.nn.functional.mse_loss(self.layer(batch), 2 * batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(logger: Logger) -> None:
    """Two processes, two steps each."""
    trainer = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        logger=logger,
        max_epochs=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(Line(), DataLoader([torch.tensor([i / 4]) for i in range(4)]))


@tracking_init(project="examples", name="lightning", config={"data": "y = 2x"})
def train() -> None:
    """Project and name are the decorator's.

    For MLflow: `MLFlowLogger(run_id=get_run("mlflow").run_id)` on rank 0.
    """
    fit(WandbLogger())
    run = get_run()
    if run is not None:
        run.summary["done"] = True


if __name__ == "__main__":
    train()
