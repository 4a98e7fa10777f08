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

from flyteplugins_tracking.compat import wandb as compat


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
        "my_task": env.task(any_task),
        "child_task": env.task(child_task),
    }


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
        flyte.with_runcontext(mode="local").run(task)
    return list(tasks)


def main(blocks: list[str]) -> None:
    # There is one process, and no GPU.
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *_: None
    flyte.init()
    print("TASKS", json.dumps([run_block(block) for block in blocks]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
