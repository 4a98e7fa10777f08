"""flytekit tasks with sweeps, in this process. Writes the sweeps' ids and the tasks' configs to the file `seen`."""

import json

import wandb
from flytekit import task, workflow
from wandb.agents.pyagent import Agent

from flyteplugins_tracking import get_run, get_sweep_id, tracking_init, tracking_sweep

Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
swept = tracking_sweep(method="grid", parameters={"x": {"values": [1, 2, 3, 4]}}, project="p", entity="e")


@tracking_init(project="p", entity="e")
def objective() -> None:
    get_run().log({"x": get_run().config["x"]})


def search(tag: str) -> str:
    get_run().log({tag: "before"})
    wandb.agent(get_sweep_id(), function=objective, count=1)
    get_run().log({tag: "after"})
    return str(get_sweep_id())


@swept
@tracking_init(project="p", entity="e", id="above")
@task
def above(n: int) -> str:
    return search("above")


@task
@swept
@tracking_init(project="p", entity="e", id="below")
def below(n: int) -> str:
    return search("below")


@tracking_init(project="p", entity="e", id="around")
@task
@swept
def around(n: int) -> str:
    return search("around")


@workflow
def pipeline(n: int) -> tuple[str, str, str]:
    return above(n=n), below(n=n), around(n=n)


def main() -> None:
    from flyte_tasks import serialized

    configs = {each.name.rpartition(".")[2]: serialized(each) for each in (above, below, around)}
    with open("seen", "w") as file:
        file.writelines(json.dumps(value) + "\n" for value in (list(pipeline(n=1)), configs))
