"""Ray Train and Ray Tune on one machine.

One run for a training with two workers, then one for each of three trials.

pip install "flyteplugins-tracking[wandb,torch]" "ray[train,tune]"
python examples/ray_training.py

Without a W&B account: `export WANDB_MODE=offline` first.
"""

import tempfile
from typing import Any

import ray
import torch
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="examples")
def train(lr: float, is_distributed: bool) -> None:
    """Fit y = 2x. Rank 0 of Ray Train has a run, and so has a trial of Tune."""
    layer = torch.nn.Linear(1, 1)
    model = prepare_model(layer) if is_distributed else layer
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(10):
        x = torch.rand(16, 1)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run = get_run()
        if run is not None:
            run.log({"loss": loss.item()})


def worker(config: dict[str, Any]) -> None:
    """Run on each worker of Ray Train."""
    train(config["lr"], is_distributed=True)


def trial(config: dict[str, Any]) -> None:
    """Run in one trial of Ray Tune, whose config and name the run has."""
    train(config["lr"], is_distributed=False)
    tune.report({"lr": config["lr"]})


if __name__ == "__main__":
    storage = tempfile.mkdtemp()
    ray.init(num_cpus=4, include_dashboard=False)
    TorchTrainer(
        worker,
        train_loop_config={"lr": 0.1},
        scaling_config=ScalingConfig(num_workers=2),
        # If a worker fails, Ray starts new ones: they continue the run.
        run_config=RunConfig(
            name="two-workers",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"lr": tune.grid_search([0.01, 0.1, 0.3])},
        run_config=tune.RunConfig(name="three-trials", storage_path=storage),
    ).fit()
