"""Tears W&B's client down inside a run, and logs in a thread that has the id of the thread that was torn down."""

import threading

import wandb

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(id="outer")
def train() -> None:
    run = get_run()
    run.log({"x": 0})
    wandb.teardown()
    run._interface._asyncer._thread._ident = threading.get_ident()
    run.log({"x": 1})


train()
