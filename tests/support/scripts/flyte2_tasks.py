"""Flyte 2 tasks of every kind, without a tracker: what a pod gives to each."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import flyte
import flyte.report
from flyte.io import Dir
from flyteplugins.pytorch import Elastic

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
env = flyte.TaskEnvironment(name="plain")
reported = flyte.TaskEnvironment(name="reported")
elastic = flyte.TaskEnvironment(name="elastic", plugin_config=Elastic(nnodes=1, nproc_per_node=2, max_restarts=0))
two_nodes = flyte.TaskEnvironment(
    name="two-nodes",
    plugin_config=Elastic(nnodes=2, nproc_per_node=2, max_restarts=0, rdzv_configs={"timeout": 60, "join_timeout": 60}),
)


def seen(tag: str, **more: Any) -> dict[str, Any]:
    """What this process is told about itself; also left in a file, for workers that return nothing."""
    context = flyte.ctx()
    report = {
        "tag": tag,
        "pid": os.getpid(),
        "thread": threading.current_thread() is threading.main_thread(),
        "rank": os.environ.get("RANK"),
        "group_rank": os.environ.get("GROUP_RANK"),
        "hostname": os.environ.get("HOSTNAME"),
        "action": context.action.name,
        "run": context.action.run_name,
        "attempt": context.attempt_number,
        "mode": context.mode,
        "context": dict(context.custom_context),
        **more,
    }
    Path(DIRECTORY, f"{tag}-{os.getpid()}.json").write_text(json.dumps(report))
    return report


@env.task
def sync(n: int) -> int:
    seen("sync")
    return n + 1


@env.task
async def coroutine(n: int) -> int:
    seen("coroutine")
    return n + 1


@env.task
def context(n: int) -> str:
    return json.dumps(seen("context"), sort_keys=True)


@env.task
def fails(n: int) -> int:
    raise ValueError(f"no {n}")


@env.task(retries=1)
def second_attempt(n: int) -> int:
    if seen("second_attempt")["attempt"] == 0:
        raise ValueError("the first attempt fails")
    return n


@reported.task(report=True)
def reports(n: int) -> int:
    flyte.report.log(f"<p>main {n}</p>")
    flyte.report.get_tab("Tab").log(f"<p>tab {n}</p>")
    return n


@elastic.task
def workers(n: int) -> int:
    return n + int(seen("workers")["rank"])


@elastic.task(report=True)
def workers_report(n: int) -> int:
    if os.environ["RANK"] == "0":
        flyte.report.get_tab("Tab").log(f"<p>tab {n}</p>")
        flyte.report.flush()
    return n


@two_nodes.task
def nodes(n: int) -> None:
    seen("nodes")


@env.task
def parent(n: int) -> str:
    """A child in the context given to the run, and one in a context of its own."""
    seen("parent")
    given = json.loads(context(n))
    with flyte.custom_context(more="yes"):
        changed = json.loads(context(n))
    return json.dumps([given, changed])


@env.task
async def async_parent(n: int) -> int:
    """Children of both kinds, at the same time."""
    return sum(await asyncio.gather(coroutine(n), sync.aio(n), workers.aio(n)))


@env.task
def retrying_parent(n: int) -> int:
    return second_attempt(n)


@env.task
def parent_of_nodes(n: int) -> None:
    nodes(n)


@env.task
def failing_parent(n: int) -> int:
    return fails(n)


@flyte.trace
def traced(name: str) -> Dir:
    return directory_of(name)


@flyte.trace
async def traced_async(name: str) -> Dir:
    return directory_of(name)


def directory_of(name: str) -> Dir:
    """Two files, uploaded nowhere yet."""
    path = Path(DIRECTORY, f"{name}-{os.getpid()}")
    path.mkdir(exist_ok=True)
    Path(path, "a.txt").write_text("a")
    return Dir.from_local_sync(str(path))


@env.task
def traces(n: int) -> str:
    return traced("sync").path


@env.task
async def traces_async(n: int) -> str:
    return (await traced_async("async")).path
