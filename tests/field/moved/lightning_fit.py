"""A LightningModule and WandbLogger."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger
from tiny import Net, Samples

from flyteplugins_tracking import tracking_init


class Module(pl.LightningModule):
    def __init__(self, lr=0.01, hidden=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


@tracking_init(project="lightning-fit", name="baseline", tags=["mnist"])
def main(max_steps):
    logger = WandbLogger(project="lightning-fit", name="baseline", tags=["mnist"])
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=4))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
