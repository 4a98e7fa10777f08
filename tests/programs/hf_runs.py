"""`transformers.Trainer` in decorated functions, one after the other in the ranks of one job.

What a rank saw is written to TRAIN_DIR/seen-{rank}.json, by function.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hf_trainer
from transformers import Trainer, trainer
from transformers.trainer_utils import HPSearchBackend

from flyteplugins_tracking import get_run, tracking_init

RANK = int(os.environ["RANK"])
SEEN: dict[str, Any] = {}


@tracking_init(id="failing", project="failing", name="ours", config={"learning_rate": "ours", "mine": 1})
def failing() -> None:
    """Once Trainer is done."""
    import wandb

    hf_trainer.make_trainer(run_name="theirs").train()
    SEEN["failing"] = {"id": id_here(), "wandb": wandb.run is get_run()}
    raise ValueError("made to fail")


@tracking_init(id="shared", project="shared", run_mode="shared")
def shared() -> None:
    hf_trainer.make_trainer().train()
    get_run().log({"rank": RANK})
    SEEN["shared"] = {"id": id_here()}


class Trial(dict[str, float]):
    """The part of Optuna's trial that Trainer uses."""

    def __init__(self, number: int) -> None:
        super().__init__(learning_rate=0.1 * (number + 1))
        self.number, self.params = number, dict(self)


class Search:
    """Replaces Optuna's backend, without the package: Trainer trains once for each trial."""

    def ensure_available(self) -> None:
        pass

    def default_hp_space(self, trial: Any) -> Any:
        return trial

    def run(self, trainer: Trainer, n_trials: int, direction: str, **_: Any) -> int:
        for number in range(n_trials):
            trainer.objective = None
            trainer.train(resume_from_checkpoint=None, trial=Trial(number))
        return n_trials


@tracking_init(id="search", project="search")
def search() -> None:
    trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA] = Search
    trials = hf_trainer.make_trainer(save_strategy="no").hyperparameter_search(n_trials=2, backend="optuna")
    SEEN["search"] = {"id": id_here(), "trials": trials}


@tracking_init(tracker="mlflow", id="mlflow", project="mlflow", name="ours", run_mode="shared")
def mlflow() -> None:
    """Both ranks open the run in a store that does not exist yet."""
    hf_trainer.make_trainer("mlflow", run_name="theirs").train()
    SEEN["mlflow"] = {"id": id_here()}


def id_here() -> str | None:
    return getattr(get_run(), "id", None)


if __name__ == "__main__":
    hf_trainer.train()
    try:
        failing()
    except ValueError as error:
        SEEN["failing"]["raised"] = str(error)
    shared()
    search()
    mlflow()
    Path(os.environ["TRAIN_DIR"], f"seen-{RANK}.json").write_text(json.dumps(SEEN))
