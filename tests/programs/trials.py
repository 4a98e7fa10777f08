"""A rank that runs one trial after another, each in a process of its own: the trials do not overlap.

Arguments: how a trial is started ("fork", "spawn", "forkserver", "subprocess", or "rank": by torch's `mp.spawn`, with
the variables of a rank set in the child), and whether the rank has called a decorated function before ("tracked" or
"plain"). A trial by itself: "trial" and its number.
"""

import multiprocessing
import os
import subprocess
import sys

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

ROWS = 20


def trial(number: int) -> None:
    @tracking_init(project="tests", config={"trial": number})
    def train() -> None:
        run = get_run()
        for row in range(ROWS if run is not None else 0):
            run.log({"trial": number, "row": row})

    train()


@tracking_init(project="tests", config={"trial": "parent"})
def parent() -> None:
    info = get_distributed_info()
    print("parent", info and info.rank)


def rank(index: int, number: int) -> None:
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    trial(number)


def start(how: str, number: int) -> None:
    if how == "subprocess":
        subprocess.run([sys.executable, __file__, "trial", str(number)], check=True)
    elif how == "rank":
        import torch.multiprocessing as mp

        mp.spawn(rank, args=(number,), nprocs=2)
    else:
        process = multiprocessing.get_context(how).Process(target=trial, args=(number,))
        process.start()
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    if sys.argv[1] == "trial":
        trial(int(sys.argv[2]))
    else:
        if sys.argv[2] == "tracked":
            parent()
        for number in range(3):
            start(sys.argv[1], number)
