"""Spawn a job of two ranks for each port given, one after the other, as a script does by hand. Each trains twice.

Arguments: the run mode; how the ranks know of each other; and the ports. They know by variables ("none"), by variables
and a process group ("group"), or by a process group alone ("tcp").
"""

import os
import sys

import torch.distributed as dist
import torch.multiprocessing as mp

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="tests", run_mode=sys.argv[1])
def train() -> None:
    run = get_run()
    if run is not None:
        run.log({"x": 1})


def worker(rank: int, port: str) -> None:
    know_each_other(rank, port)
    for _ in range(2):
        train()
    if dist.is_initialized():
        dist.barrier()  # rank 0 has the store, and the others read it


def know_each_other(rank: int, port: str) -> None:
    if sys.argv[2] == "tcp":
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        return
    shape = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in shape.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if sys.argv[2] == "group":
        dist.init_process_group("gloo")


if __name__ == "__main__":
    for port in sys.argv[3:]:
        mp.spawn(worker, args=(port,), nprocs=2)
