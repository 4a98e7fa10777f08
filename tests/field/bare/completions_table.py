"""In the style of TRL's GRPO: a Trainer whose callback logs rows, and which logs a table of completions itself.

It goes on from its last checkpoint. With FIELD_FAULT=kill, the first attempt is killed behind step FIELD_AT.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from tiny import Net, Samples


class WandbCallback:
    def __init__(self):
        import wandb

        self._wandb = wandb

    def setup(self, args):
        self._wandb.init(project=os.getenv("WANDB_PROJECT", "huggingface"), name=args.run_name)
        self._wandb.config.update(vars(args), allow_val_change=True)
        self._wandb.define_metric("train/global_step")
        self._wandb.define_metric("*", step_metric="train/global_step", step_sync=True)

    def on_log(self, logs, step):
        self._wandb.log({**{f"train/{key}": value for key, value in logs.items()}, "train/global_step": step})


class Trainer:
    def __init__(self, args):
        self.args, self.callback, self.model = args, WandbCallback(), Net()

    def log_completions(self, step):
        import wandb

        table = {"step": [step] * 2, "completion": [f"to {step}", f"be {step}"], "reward": [0.1 * step, 1.0]}
        if wandb.run is not None:
            rows = [list(row) for row in zip(*table.values(), strict=True)]
            wandb.log({"completions": wandb.Table(columns=list(table), data=rows)})

    def train(self):
        state = Path(self.args.output_dir, "trainer_state.json")
        first = json.loads(state.read_text())["global_step"] if state.exists() else 0
        self.callback.setup(self.args)
        data = Samples()
        for step in range(first + 1, self.args.max_steps + 1):
            loss = torch.nn.functional.mse_loss(self.model(data.x), data.x.sum(1, True))
            loss.backward()
            self.callback.on_log({"loss": loss.item(), "reward": 0.1 * step}, step)
            if step % 2 == 0:
                self.log_completions(step)
                state.write_text(json.dumps({"global_step": step}))
            if os.environ.get("FIELD_FAULT") == "kill" and first == 0 and step == int(os.environ["FIELD_AT"]):
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-name", dest="run_name", default="grpo-tiny")
    parser.add_argument("--output-dir", dest="output_dir", default=".")
    parser.add_argument("--max-steps", dest="max_steps", type=int, default=8)
    Trainer(parser.parse_args()).train()
