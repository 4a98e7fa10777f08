"""A training whose arguments differ in each attempt, and have the names of values that a library might add.

Its arguments: the tracker's name, the project, and the run mode; or "twice" for two calls in one process. What the run
of the primary rank allows is written to `told-{attempt}`.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

TRACKER, PROJECT, MODE = sys.argv[1:4]
DIRECTORY = Path(os.environ["TRAIN_DIR"])
RANK = int(os.environ.get("RANK", 0))
NAMES = (
    *("distributed", "flyte", "restart_count", "attempt_number", "tracking_roles", "world_size", "launcher"),
    *("status", "exit_code", "tags", "notes", "roles", "name", "group", "id"),
)


def arguments(attempt: int) -> argparse.Namespace:
    differ = {"lr": 0.1 * (attempt + 1), "output_dir": f"out-{attempt}", "api_key": f"key-of-attempt-{attempt}"}
    return argparse.Namespace(**{name: f"own {name}" for name in NAMES}, **differ, epochs=3, late=attempt)


def given(attempt: int) -> dict[str, object]:
    return {"seed": attempt, "optimizer": {"name": "adam", "beta": 0.9 + attempt / 100}}


def set_all(run: object, values: dict[str, object]) -> None:
    """As scripts do with the object of each tracker."""
    late = {"late": values.pop("late")}
    if TRACKER == "wandb":
        run.config.update(argparse.Namespace(**values))
        run.config.update({"epochs": 3}, True)
        run.config.late = late["late"]
        run.config["item"] = late["late"]
        run.config.setdefaults({"epochs": 4, "unset": 1})
    elif TRACKER == "mlflow":
        import mlflow

        mlflow.log_params(values)
        mlflow.log_param("epochs", 3)
        mlflow.log_param("late", late["late"])
        run.log_params({"item": late["late"]})
    elif TRACKER == "trackio":
        run.config.update({**values, **late})
        run.config["item"] = late["late"]
    else:
        run.update_config({**values, **late, "item": late["late"]})


def change_again(run: object, attempt: int) -> str:
    """What an attempt may not change is what it has set itself: the class of the client's error."""
    try:
        if TRACKER == "wandb":
            run.config.update({"lr": 7.0})
        elif TRACKER == "mlflow":
            import mlflow

            mlflow.log_param(f"of_attempt_{attempt}", 1)
            mlflow.log_param(f"of_attempt_{attempt}", 2)
    except Exception as error:
        return type(error).__name__
    return ""


def body(attempt: int) -> None:
    run = get_run()
    if RANK == 0:
        set_all(run, vars(arguments(attempt)))
        run.log({"x": attempt})
        told = {"refused": change_again(run, attempt)}
        if TRACKER == "wandb":
            told["config"] = {key: value for key, value in dict(run.config).items() if not key.startswith("_")}
        (DIRECTORY / f"told-{attempt}").write_text(json.dumps(told))
    elif attempt == 0:
        while not (DIRECTORY / "told-0").exists():
            time.sleep(0.05)
        raise ValueError("made to fail")


def train(attempt: int, **more: object) -> None:
    tracking_init(tracker=TRACKER, project=PROJECT, id="changed", config=given(attempt), **more)(body)(attempt)


if MODE == "twice":
    train(0)
    train(1)
else:
    train(get_distributed_info().restart_count, run_mode=MODE)
