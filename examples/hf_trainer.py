"""Hugging Face's Trainer inside the decorator: it logs to the open run.

pip install "flyteplugins-tracking[wandb]" transformers accelerate
torchrun --nproc-per-node=2 examples/hf_trainer.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from flyteplugins_tracking import get_run, tracking_init


class Line(torch.nn.Module):
    """A model as Trainer wants one: it gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The loss of one batch."""
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def make_trainer(report_to: str = "wandb", **more: Any) -> Trainer:
    """Return a Trainer on y = 2x. It finds the run by `report_to`."""
    x = torch.arange(16).unsqueeze(1) / 16
    data = [{"x": x[i], "labels": 2 * x[i]} for i in range(16)]
    arguments = TrainingArguments(
        output_dir="output",
        report_to=report_to,
        logging_steps=1,
        max_steps=4,
        save_strategy="no",
        disable_tqdm=True,
        # Without a GPU and without this, each process believes that it is
        # the only one, and opens a run of its own.
        use_cpu=not torch.cuda.is_available(),
        **more,
    )
    return Trainer(args=arguments, train_dataset=data, model_init=Line)


@tracking_init(project="examples", name="trainer", config={"data": "y = 2x"})
def train() -> None:
    """Project and name are the decorator's; Trainer adds its config."""
    make_trainer().train()
    run = get_run()
    if run is not None:
        run.summary["done"] = True


if __name__ == "__main__":
    train()
