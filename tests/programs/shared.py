"""What a shared run's object can do, tried by every rank. TRAIN_SETTINGS holds the decorator's arguments, in JSON."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from flyteplugins_tracking import ConfigError, get_distributed_info, get_run, tracking_init

DIRECTORY = Path(os.environ["TRAIN_DIR"])
SETTINGS = json.loads(os.environ["TRAIN_SETTINGS"])


def change_config(run: Any, rank: int) -> list[str]:
    """Each way to change it; what is refused."""
    refused = []
    changes = {
        "item": lambda: run.config.__setitem__(f"item_{rank}", rank),
        "attribute": lambda: setattr(run.config, f"attribute_{rank}", rank),
        "update": lambda: run.config.update({f"update_{rank}": rank}),
        "setdefaults": lambda: run.config.setdefaults({f"defaults_{rank}": rank}),
        "wandb.config": lambda: wandb.config.update({f"global_{rank}": rank}),
        "update_locked": lambda: run.config.update_locked({f"locked_{rank}": rank}, "user"),
    }
    for name, change in changes.items():
        try:
            change()
        except ConfigError as error:
            refused.append(name if f"rank {rank}" in str(error) else str(error))
    return refused


@tracking_init(project="tests", **SETTINGS)
def train() -> Any:
    run, info = get_run(), get_distributed_info()
    rank = info.rank
    refused = change_config(run, rank)
    seen = dict(run.config)
    run.log({"loss": rank + 0.5}, step=10 * rank)
    run.log({"kept": 1}, commit=False)
    run.log({"beside": 2})
    wandb.log({"by_wandb": rank}, step=3)
    run.log({"late": rank}, commit=False)
    run.define_metric(f"accuracy_{rank}", summary="max")
    for value in (1, 3, 2):
        run.log({f"accuracy_{rank}": value})
    run.summary[f"best_{rank}"] = rank
    run.log({f"image_{rank}": wandb.Image(np.full((4, 4), 20 * rank, dtype=np.uint8))})
    run.log({f"table_{rank}": wandb.Table(columns=["a"], data=[[rank]])})
    artifact = wandb.Artifact(f"weights-{rank}", type="model")
    with artifact.new_file("weights.txt") as file:
        file.write(str(rank))
    run.log_artifact(artifact)
    run.log_code(str(DIRECTORY), include_fn=lambda path: path.endswith("code.py"))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(log_in_a_child, (rank,))
    own = wandb.init(project="tests", id=f"own-{rank}", reinit="create_new")
    own.log({"inside": rank})
    log_gradients(run, rank)
    wandb.finish()
    run.finish()
    run.log({"after_finish": rank})
    report = {
        "rank": rank,
        "id": run.id,
        "url": run.url,
        "resumed": run.resumed,
        "directory": run.dir,
        "step": run.step,
        "refused": refused,
        "config": {key: value for key, value in seen.items() if isinstance(value, (int, float, str))},
        "is_run": isinstance(run, wandb.Run),
        "is_global": wandb.run is run,
    }
    Path(DIRECTORY, f"report-{rank}.json").write_text(json.dumps(report))
    return own


def log_gradients(run: Any, rank: int) -> None:
    import torch  # which costs each rank 2 s of CPU

    model = torch.nn.Linear(2, 1)
    run.watch(model, log_freq=1)
    model(torch.ones(1, 2)).sum().backward()
    run.log({f"watched_{rank}": 1})
    run.unwatch(model)


def log_in_a_child(rank: int) -> None:
    wandb.run.log({"from_child": rank})


own = train()
rank = int(os.environ["RANK"])
outside = {"global": wandb.run is None, "run": get_run() is None}
while rank > 0 and not Path(DIRECTORY, f"after-{rank - 1}.json").exists():  # the one who wrote the run goes first
    time.sleep(0.05)
own.log({"outside": rank})
own.finish()
with wandb.init(project="tests", id=f"later-{rank}") as later:
    later.log({"later": rank})
Path(DIRECTORY, f"after-{rank}.json").write_text(json.dumps(outside))
