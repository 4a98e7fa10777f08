"""Hugging Face's Trainer: all ranks stop after the same step, and save.

torchrun --nproc-per-node=2 examples/stopping_hf_trainer.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

from typing import Any

from hf_trainer import make_trainer
from transformers import TrainerCallback, TrainerControl

from flyteplugins_tracking import should_stop, tracking_init


class StopTogether(TrainerCallback):
    """Trainer asks after each step, on every rank."""

    def on_step_end(
        self,
        args: Any,  # noqa: ARG002
        state: Any,  # noqa: ARG002
        control: TrainerControl,
        **_: Any,
    ) -> TrainerControl:
        """Save a checkpoint, and stop."""
        if should_stop():
            control.should_save = control.should_training_stop = True
        return control


@tracking_init(project="examples", name="trainer", stop_before_s=600)
def train() -> None:
    """Next attempt: `trainer.train(resume_from_checkpoint=True)`."""
    trainer = make_trainer(num_train_epochs=100_000)
    trainer.args.max_steps = 100_000
    trainer.add_callback(StopTogether())
    trainer.train()


if __name__ == "__main__":
    train()
