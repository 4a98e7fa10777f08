"""Flyte 2 tasks that run until their pod gets SIGTERM. Each process writes its id to a file when it has logged."""

import asyncio
import os
import time
from pathlib import Path

import flyte

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
env = flyte.TaskEnvironment(name="sigterm")
tracked = tracking_init(project="tests", entity="team")


def ready() -> None:
    info = get_distributed_info()
    Path(DIRECTORY, f"ready-{info.rank if info else 0}").write_text(str(os.getpid()))


def logs(seconds: float = 120) -> None:
    """Log in a loop without pauses."""
    until, row = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        get_run().log({"row": row})
        row += 1
        if row == 50:
            ready()


@tracked
@env.task
def sleeps(n: int) -> None:
    get_run().log({"row": 0})
    ready()
    time.sleep(120)


@tracked
@env.task
async def sleeps_async(n: int) -> None:
    get_run().log({"row": 0})
    ready()
    await asyncio.sleep(120)


@tracked
@env.task
def loops(n: int) -> None:
    logs()


@tracked
@env.task
def returns(n: int) -> None:
    """Returns when the file `go` exists."""
    get_run().log({"row": 0})
    ready()
    while not Path(DIRECTORY, "go").exists():
        time.sleep(0.01)
