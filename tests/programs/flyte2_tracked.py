"""Flyte 2 tasks of every kind that the decorator meets, of one process. Each logs its rows and returns its run's id.

Those with workers are in `flyte2_workers.py`: their plugin takes a pod two seconds to import.
"""

import asyncio
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import flyte

from flyteplugins_tracking import get_distributed_info, get_run, should_stop, tracking_config, tracking_init

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
env = flyte.TaskEnvironment(name="plain")
tracked = tracking_init(project="tests", entity="team")


def training(tag: str) -> str:
    """Three rows, and what this process was told, in a file."""
    run, info = get_run(), get_distributed_info()
    if run is not None:
        for row in range(3):
            run.log({tag: row})
    seen = {"tag": tag, "rank": info.rank if info else None, "run_id": run.id if run else None, "pid": os.getpid()}
    seen["wandb"] = "wandb" in sys.modules
    Path(DIRECTORY, f"{tag}-{os.getpid()}-{time.monotonic_ns()}.json").write_text(json.dumps(seen))
    return run.id if run is not None else ""


@tracked
@env.task
def plain(n: int) -> str:
    return training("plain")


@tracking_init(project="tests", entity="team", stop_before_s=3599)
@env.task(timeout=flyte.Timeout(max_runtime=timedelta(hours=1), max_queued_time=60))
def limited(n: int) -> str:
    """Stops a second after the pod's start."""
    while not should_stop():
        time.sleep(0.05)
    return training("limited")


@tracked
@env.task
async def coroutine(n: int) -> str:
    await asyncio.sleep(0)
    return training("coroutine")


@env.task
@tracked
def below(n: int) -> str:
    return training("below")


@tracking_init(project="tests", run_mode="new")
@env.task
def new(n: int) -> str:
    return training("new")


@tracking_init(project="tests", run_mode="shared")
@env.task
def shared(n: int) -> str:
    return training("shared")


@env.task
def untracked(n: int) -> str:
    return plain(n)


@tracked
def function(tag: str) -> str:
    return training(tag)


@env.task
def calls_functions(n: int) -> list[str]:
    """Two trainings in a task that has no run itself."""
    return [function("first"), function("second")]


@tracked
@env.task
def calls_a_function(n: int) -> list[str]:
    return [get_run().id, function("inner")]


@tracked
@env.task
async def async_parent(n: int) -> str:
    get_run().log({"parent": 0})
    with tracking_config(tags=["block"], config={"block": True}):
        new_id, (first, second) = await new.aio(n), await asyncio.gather(coroutine(n), coroutine(n + 1))
    get_run().log({"parent": 1})
    return json.dumps({"parent": get_run().id, "new": new_id, "first": first, "second": second})


@tracked
@env.task
def fails(n: int) -> str:
    training("fails")
    raise ValueError("made to fail")


@tracked
@env.task
def exits(n: int) -> str:
    training("exits")
    sys.exit(3)


@tracked
@env.task(retries=1)
def second_attempt(n: int) -> str:
    run_id = training("second_attempt")
    marker = Path(DIRECTORY, "was-here")
    if not marker.exists():
        marker.touch()
        raise ValueError("the first attempt fails")
    return run_id


@tracked
@env.task
def changer(n: int) -> str:
    get_run().config.update({"child": n})
    return get_run().id


@tracking_init(group="child", job_type="child", name="child", tags=["child"], notes="child", config={"of": "child"})
@env.task
def reader(n: int) -> str:
    return json.dumps(dict(get_run().config), default=str)


@tracking_init(project="tests", config={"of": "parent", "lr": 3}, group="parent", name="parent", tags=["parent"])
@env.task
def parent_of_a_changer(n: int) -> str:
    changer(n)
    return reader(n)


@tracking_init(project="tests", role="rollout-0", config={"temperature": 1})
@env.task
def rollout(n: int) -> str:
    for x in range(n):
        get_run().log({"x": x})
    return get_run().id


@tracking_init(project="tests", roles=["rollout-0"], config={"lr": 3})
@env.task
def owner(n: int) -> str:
    get_run().log({"loss": n})
    return rollout(3)


@tracking_init(project="tests", mode="offline")
@env.task
def offline_parent(n: int) -> str:
    return plain(n)


def one_process() -> None:
    """Actions of a container that is reused: three children of one parent at once, and two tasks beside them."""
    from flyte._context import internal_ctx
    from flyte.models import ActionID, RawDataPath, TaskContext
    from flyte.report import Report

    from flyteplugins_tracking._runs.propagation import RUNS

    parent = {"wandb": {"id": "r1-elsewhere", "project": "tests", "entity": "team"}}

    async def action(task: Any, name: str, **context: str) -> Any:
        tctx = TaskContext(
            action=ActionID(name=name, run_name="r1", project="p", domain="d", org="o"),
            version="v",
            raw_data_path=RawDataPath(path=str(DIRECTORY / "raw")),
            output_path=str(DIRECTORY),
            run_base_dir=str(DIRECTORY),
            report=Report(name=name),
            mode="remote",
            custom_context=context,
        )
        with internal_ctx().replace_task_context(tctx):
            return await task.execute(n=1)

    async def actions() -> list[Any]:
        children = [action(plain, f"child-{i}", **{RUNS: json.dumps(parent)}) for i in range(3)]
        configured = action(bare, "configured", **tracking_config(project="configured", tags=["configured"]))
        return await asyncio.gather(*children, configured, action(bare, "beside"))

    print("RAN", json.dumps(asyncio.run(actions())))


@tracking_init(project="tests", download_logs=True)
@env.task
def downloaded(n: int) -> str:
    return training("downloaded")


@tracking_init
@env.task
def bare(n: int) -> str:
    return training("bare")


def links(task: Any, context: dict[str, str] | None = None, action: str = "{{.actionName}}") -> dict[str, str]:
    """A task's links by their names, as the SDK asks for them when it hands the task to the backend."""
    arguments = {"run_name": "r1", "project": "p", "domain": "d", "context": context or {}, "parent_action_name": "a0"}
    return {link.name: link.get_link(**arguments, action_name=action, pod_name="{{.podName}}") for link in task.links}


if __name__ == "__main__":
    one_process()
