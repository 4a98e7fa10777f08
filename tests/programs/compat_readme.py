"""Run the blocks of a README: `compat_readme.py BLOCKS`, a JSON list of programs for flyteplugins-wandb.

Each is run by itself, with the names that it leaves undefined, and then the tasks that it has defined.
"""

import ast
import asyncio
import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import flyte
import torch.distributed
import wandb
from flyte._task import TaskTemplate
from flyteplugins.pytorch import Elastic
from wandb.agents.pyagent import Agent

from flyteplugins_tracking.compat import wandb as compat

Agent.HEARTBEAT_SLEEP_SECONDS = 0.1  # between two trials; 5 unless set


class Loss(float):
    """A number, as a tensor gives it."""

    def item(self) -> float:
        return float(self)


def given() -> dict[str, Any]:
    """The names that the blocks use and do not define."""
    env = flyte.TaskEnvironment(name="readme")
    nodes = flyte.TaskEnvironment(name="readme-nodes", plugin_config=Elastic(nnodes=2, nproc_per_node=4))

    def any_task() -> None: ...

    async def child_task() -> None: ...

    return {
        **{name: getattr(compat, name) for name in compat.__all__},
        **dict.fromkeys(("loss", "accuracy", "value"), Loss(0.5)),
        "__name__": "__main__",
        "flyte": flyte,
        "wandb": wandb,
        "env": env,
        "multi_node_env": nodes,
        "dist": SimpleNamespace(get_rank=lambda: 0),
        "dist_info": {"worker_index": 0},
        "train": lambda lr, batch_size: None,
        "my_task": env.task(any_task),
        "run_sweep": env.task(any_task),
        "child_task": env.task(child_task),
    }


def context_of(block: str) -> dict[str, str]:
    if "wandb_sweep\n" not in block:
        return {}
    parameters = {"lr": {"min": 1e-5, "max": 1e-2}, "batch_size": {"values": [16, 32]}}
    metric = {"name": "loss", "goal": "minimize"}
    return dict(compat.wandb_sweep_config(method="random", metric=metric, parameters=parameters))


def run_block(block: str) -> list[str]:
    """Run it and its tasks, whose names are returned."""
    before = given()
    names = dict(before)
    awaited = eval(compile(block, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(awaited):
        asyncio.run(awaited)
    own = {name: value for name, value in names.items() if value is not before.get(name)}
    tasks = {name: value for name, value in own.items() if isinstance(value, TaskTemplate)}
    for task in tasks.values():
        flyte.with_runcontext(mode="local", custom_context=context_of(block)).run(task)
    return list(tasks)


def main(blocks: list[str]) -> None:
    # There is one process, and no GPU.
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *_: None
    flyte.init()
    print("TASKS", json.dumps([run_block(block) for block in blocks]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
