"""Lightning in decorated functions, one after the other in the ranks of one job, or under Lightning's own launcher.

Arguments: the functions to call. What a process saw is written to TRAIN_DIR/seen-{function}-{rank}.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning_ddp
from lightning.pytorch.loggers import WandbLogger

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(id="wandb", project="wandb", name="ours", config={"mine": 1})
def wandb() -> None:
    logger = WandbLogger(project="theirs", name="theirs", save_dir="theirs")
    run = get_run()
    if run is not None:  # as docs/guides/frameworks.md shows
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    lightning_ddp.fit(logger)
    see("wandb", same=run is not None and logger.experiment is run)
    if run is not None:
        run.log({"after": 1})


@tracking_init(id="own", project="own")
def own() -> None:
    """Started without a launcher: Lightning starts the script again for the second rank."""
    see("own", environment={name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")})
    lightning_ddp.fit(WandbLogger(project="theirs"))
    if get_run() is not None:  # a child that fails before the parent has ended has Lightning kill the parent
        raise ValueError("made to fail")


@tracking_init(id="other", project="own")
def other() -> None:
    """As `own`. The second rank fails, which cuts off the first one's collective."""

    def fail(*_: Any) -> None:
        raise ValueError("made to fail")

    if os.environ.get("LOCAL_RANK") == "1":
        lightning_ddp.Model.training_step = fail
    lightning_ddp.fit(WandbLogger(project="theirs"))


def see(function: str, **values: Any) -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    seen = {"id": getattr(get_run(), "id", None), **values}
    Path(os.environ["TRAIN_DIR"], f"seen-{function}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    functions = {"wandb": wandb, "own": own, "other": other, "example": lightning_ddp.train}
    for name in sys.argv[1:]:
        functions[name]()
