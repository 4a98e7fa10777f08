"""Flyte 2 tasks with sweeps."""

import json

import flyte
import wandb
from wandb.agents.pyagent import Agent

from flyteplugins_tracking import (
    get_run,
    get_sweep_id,
    get_sweep_parameters,
    tracking_init,
    tracking_sweep,
)

Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
env = flyte.TaskEnvironment(name="sweeps")
swept = tracking_sweep(method="grid", parameters={"x": {"values": [1, 2, 3, 4]}}, project="p", entity="e")


@tracking_init(project="p", entity="e", config={"own": True})
def objective() -> None:
    get_run().log({"x": get_run().config["x"] * get_sweep_parameters()["x"]})


def search(tag: str) -> str:
    run, own = get_run(), get_sweep_id()
    run.log({tag: "before"})
    wandb.agent(get_sweep_id(), function=objective, count=1)
    child = json.loads(trials(1))
    run.log({tag: "after"})
    return json.dumps({"own": own, "child": child, "outer": run.id})


@env.task
def trials(n: int) -> str:
    """A task that only has what its caller carries."""
    wandb.agent(get_sweep_id(), function=objective, entity="e", project="p", count=n)
    return json.dumps(get_sweep_id())


@swept
@tracking_init(project="p", entity="e")
@env.task
def sweep_above(n: int) -> str:
    return search("sweep_above")


@tracking_init(project="p", entity="e")
@swept
@env.task
def sweep_below(n: int) -> str:
    return search("sweep_below")
