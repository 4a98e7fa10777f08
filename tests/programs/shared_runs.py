"""Trainings with a shared run, for `test_shared.py`. Argument: a function's name."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

RANK = int(os.environ.get("RANK", 0))
PATIENCE_S = 120


def wait_for(name: str) -> None:
    """Wait until this file is there."""
    while not Path(name).exists():
        time.sleep(0.02)


def primary_last() -> None:
    """Rank 0 opens the run when rank 1 has logged to it."""

    @tracking_init(project="tests", run_mode="shared", id="late", kill_after_s=PATIENCE_S)
    def train() -> None:
        print("resumed", get_run().resumed, flush=True)
        get_run().log({"number": RANK})
        if RANK == 1:
            wait_for("go")

    if RANK == 0:
        wait_for("go")
    train()


def uncommitted() -> None:
    """Rows in several calls, some of which hold what W&B refuses."""

    @tracking_init(project="tests", run_mode="shared")
    def train() -> None:
        run = get_run()
        for step in range(3):
            run.log({"loss": step}, step=step, commit=False)
        run.log({"eval": 1}, step=3)
        run.log({"bad": object()}, commit=False)
        try:
            run.log({"good": 1})
        except TypeError:
            run.log({"told": 1})
        run.log({"bad": object()}, commit=False)

    train()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
