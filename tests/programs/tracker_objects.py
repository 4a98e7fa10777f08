"""Flyte 1 tasks whose tracker is an object, and two trackers on one function. For `test_trackers_jobs.py`."""

import os
import sys

from flytekit import task
from flytekitplugins.kfpytorch import Elastic
from jsonl_tracker import JsonlTracker

from flyteplugins_tracking import get_run, tracking_init

spawn = Elastic(nnodes=1, nproc_per_node=2, start_method="spawn", increase_shared_mem=False, monitor_interval=1)


class Mine(JsonlTracker):
    """Pickled by value, since no worker can import it."""

    name = "mine"


@tracking_init(tracker=Mine(), project="elastic", id="i", run_mode="shared")
@task(task_config=spawn)
def train(rows: int) -> int:
    for number in range(rows):
        get_run("mine").log({"rank" + os.environ["RANK"]: number})
    return rows


@tracking_init(tracker="jsonl", project="stacked", id="i")
@tracking_init(tracker="trackio", project="stacked", id="i", run_mode="new")
def stacked() -> None:
    import trackio

    assert get_run() is get_run("trackio") is not get_run("jsonl")
    assert (get_run("jsonl").id, get_run("trackio").id, get_run("wandb")) == ("i", "i", None)
    for number in range(500):
        get_run("jsonl").log({"a": number})
        trackio.log({"a": number})


if __name__ == "__main__":
    stacked()
    sys.exit(train(rows=20) != 20)
