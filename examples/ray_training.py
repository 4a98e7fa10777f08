# python ray_training.py    # pip install "ray[train,tune]"
from typing import Any

import ray
import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="examples")
def train(is_distributed: bool) -> None:
    run = get_run()  # on rank 0 of Ray Train, and in each trial of Ray Tune
    layer = torch.nn.Linear(1, 1)
    model = prepare_model(layer) if is_distributed else layer
    for _ in range(10):
        loss = model(torch.rand(16, 1)).square().mean()
        if run is not None:
            run.log({"loss": loss.item()})


def worker() -> None:
    train(is_distributed=True)


def trial(config: dict[str, Any]) -> None:  # config is the run's config too
    train(is_distributed=False)
    tune.report({"lr": config["lr"]})


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    scaling, run_config = ScalingConfig(num_workers=2), RunConfig(name="llm-7b")
    TorchTrainer(worker, scaling_config=scaling, run_config=run_config).fit()
    grid = tune.grid_search([0.01, 0.1, 0.3])
    tune.Tuner(trial, param_space={"lr": grid}).fit()
