"""Flyte 2 on this machine: a task trains, and its child tasks evaluate into the same run; W&B offline, no backend.

python examples/flyte2_children.py [directory]
"""

import os
import sys
from pathlib import Path

import flyte
from wandb_files import read_runs

from flyteplugins_tracking import get_run, tracking_config, tracking_init

env = flyte.TaskEnvironment(name="children")


@tracking_init
@env.task
def evaluate(epoch: int) -> float:
    """Goes on in the run of the task that calls it."""
    accuracy = 1 - 0.5 ** (epoch + 1)
    get_run().log({"accuracy": accuracy, "epoch": epoch})
    return accuracy


@tracking_init(run_mode="new")
@env.task
def baseline(epoch: int) -> float:
    """Has a run of its own."""
    get_run().log({"accuracy": 0.5, "epoch": epoch})
    return 0.5


@tracking_init(config={"lr": 3e-4})
@env.task
def train(epochs: int) -> float:
    """One run, with the rows of the evaluations among its own."""
    best: float = baseline(0)
    for epoch in range(epochs):
        get_run().log({"loss": 0.5**epoch, "epoch": epoch})
        best = max(best, evaluate(epoch))
    return best


def main(directory: Path) -> None:
    """Run the tasks, and show what W&B stored."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(directory))
    run = flyte.with_runcontext(mode="local", custom_context=tracking_config(project="children", tags=["example"]))
    print("best accuracy:", run.run(train, epochs=3).outputs()[0])
    for stored in read_runs(directory / "wandb"):
        keys = sorted({key for row in stored.rows for key in row if not key.startswith("_")})
        print(f"{stored.id}: {len(stored.rows)} rows of {', '.join(keys)}, exit code {stored.exit_code}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "flyte2-output"))
