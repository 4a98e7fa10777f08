"""Trials inside a decorated function, outside of Flyte. Writes a JSON line for each check to the file `seen`."""

import json
import os
import sys
import threading

import wandb
from wandb.agents.pyagent import Agent

from flyteplugins_tracking import (
    get_run,
    get_sweep_id,
    get_sweep_parameters,
    tracking_config,
    tracking_init,
    tracking_sweep,
    tracking_sweep_config,
)

Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
LEFT = ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID", "WANDB_SWEEP_ID", "FLYTE_TRACKING_SWEEP_ID")


def tell(**seen: object) -> None:
    with open("seen", "a") as file:
        file.write(json.dumps(seen) + "\n")


@tracking_init(id="ignored", project="ignored", config={"own": True, "x": 0})
def objective() -> None:
    run, x = get_run(), get_sweep_parameters()["x"]
    run.log({"x": x})
    if x == 2:
        raise RuntimeError("made to fail")
    if x == 3:
        sys.exit(3)
    if x == 4:
        enclosing.log({"outer": "during the trial"})
    run.log({"x": run.config.x})
    tell(id=run.id, is_global=wandb.run is run is get_run(), sweep=get_sweep_id())


@tracking_init(id="outer")
@tracking_sweep(method="grid")
def search() -> None:
    global enclosing
    enclosing = run = get_run()
    run.log({"outer": "before"})
    in_thread: list[str | None] = []
    thread = threading.Thread(target=lambda: in_thread.append(get_sweep_id()))
    thread.start()
    thread.join()
    for _ in range(2):
        wandb.agent(get_sweep_id(), function=objective, count=2)
    tell(sweep=get_sweep_id(), in_thread=in_thread[0], is_global=wandb.run is run)
    run.summary["best"] = 1
    run.config.update({"late": True})
    wandb.log({"outer": "after"})


@tracking_sweep(method="grid", parameters={"x": {"values": [5]}}, project="p2")
@tracking_init(id="fails")
def fails() -> None:
    """Nothing is logged after the agent: what the teardown has made of the run's end is not true."""
    get_run().log({"outer": "before"})
    wandb.agent(get_sweep_id(), function=objective, count=1)
    sys.exit(7)


with (
    tracking_config(project="p", entity="e"),
    tracking_sweep_config(name="n", parameters={"x": {"values": [1, 2, 3, 4]}}),
):
    search()
settings = wandb.setup().settings
tell(
    left={name: os.environ.get(name) for name in LEFT}, session=[settings.project, settings.entity], end=get_sweep_id()
)
with tracking_config(entity="e"):
    fails()
