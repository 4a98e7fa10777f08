"""Flyte 2 tasks that run until their pod gets SIGTERM. Each process writes its id to a file when it has logged."""

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


@tracked
@env.task
def sleeps(n: int) -> None:
    get_run().log({"row": 0})
    ready()
    time.sleep(120)
