# torchrun --nproc-per-node=2 hf_trainer.py
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from flyteplugins_tracking import should_stop, tracking_init


class Line(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = torch.nn.functional.mse_loss(super().forward(x), labels)
        return {"loss": loss}


class StopTogether(TrainerCallback):
    def on_step_end(self, _: Any, __: Any, control: Any, **more: Any) -> None:
        if should_stop():  # True on all ranks after the same step
            control.should_save = control.should_training_stop = True


def make_trainer(report_to: str = "wandb", **more: Any) -> Trainer:
    x = torch.arange(16).unsqueeze(1) / 16
    data = [{"x": x[i], "labels": 2 * x[i]} for i in range(16)]
    cpu = not torch.cuda.is_available()  # else each process is a world of 1
    options = {"logging_steps": 1, "max_steps": 4, "use_cpu": cpu, **more}
    arguments = TrainingArguments("output", report_to=report_to, **options)
    model: Any = {"model_init": lambda: Line(1, 1)}
    trainer = Trainer(args=arguments, train_dataset=data, **model)
    trainer.add_callback(StopTogether())
    return trainer


@tracking_init(project="examples", name="trainer", config={"data": "y = 2x"})
def train() -> None:
    make_trainer().train()  # after a stop: train(resume_from_checkpoint=True)


if __name__ == "__main__":
    train()
