"""A training that is started again: its one argument is a JSON object, or the variable RESTARTED is one.

Keys: `tracker`, `project`; `tracking`: the other arguments of the decorator. `first`, `rows`: the number of the first
row, and how many. `end`: how it ends: "return", "kill" of all ranks or "raise" of the rank `raises`, both `before_s`
after all ranks have logged, or "stop" by `should_stop()`. torchelastic's later attempts return. `marks`: the directory
in which each rank says that it has logged; by default its own. `spawns`: how many ranks the process starts itself.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, request_stop, should_stop, tracking_init

SETTINGS = json.loads(os.environ.get("RESTARTED") or sys.argv[-1])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@tracking_init(tracker=SETTINGS["tracker"], project=SETTINGS["project"], **SETTINGS.get("tracking", {}))
def train() -> None:
    run, info = get_run(), get_distributed_info()
    rank, count = (0 if info is None else info.rank), SETTINGS["rows"]
    first = SETTINGS.get("first", 0) + ATTEMPT * count
    print("starts at", first)
    for number in range(first, first + count):
        if run is not None:
            run.log({f"rank{rank}": number})
    marks = [
        Path(SETTINGS.get("marks", ""), f"logged.{first}.{one}")
        for one in range(1 if info is None else info.world_size)
    ]
    marks[rank].touch()
    how = "return" if ATTEMPT else SETTINGS.get("end", "return")
    if how in ("kill", "raise"):
        # A rank without a run is here while another one still opens its run.
        while not all(mark.exists() for mark in marks):
            time.sleep(0.01)
    end(how, rank)


def end(how: str, rank: int) -> None:
    if how == "raise" and rank == SETTINGS.get("raises", 0):
        time.sleep(SETTINGS.get("before_s", 0))
        raise ValueError("made to fail")
    if how == "kill":
        time.sleep(SETTINGS.get("before_s", 0))
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        request_stop("the test")
        while not should_stop():
            time.sleep(0.01)
    if how == "raise":  # the launcher ends it
        time.sleep(60)


def train_as(rank: int) -> None:
    size = str(SETTINGS["spawns"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    train()


if __name__ == "__main__":
    if "spawns" in SETTINGS:
        import torch.multiprocessing

        torch.multiprocessing.spawn(train_as, nprocs=SETTINGS["spawns"])
    else:
        train()
