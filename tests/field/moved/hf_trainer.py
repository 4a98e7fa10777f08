"""A Trainer of transformers, with its own switch for W&B."""

import sys

import torch
from tiny import Net, Samples
from transformers import Trainer, TrainingArguments

from flyteplugins_tracking import tracking_init


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


class Data(torch.utils.data.Dataset):
    samples = Samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return {"x": x, "labels": y}


@tracking_init(project="hf-trainer")
def main(max_steps):
    arguments = TrainingArguments(
        "output",
        run_name="bert",
        report_to="wandb",
        logging_steps=1,
        max_steps=max_steps,
        per_device_train_batch_size=4,
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(model=Model(), args=arguments, train_dataset=Data()).train()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
