"""The results of `process_group` on 4 gloo ranks. Each rank writes what it saw to `{rank}.json`.

At the end rank 2 raises inside `process_group` while the others are in a collective.
"""

import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import get_run, prefix_metrics, process_group, tracking_init

RANK = int(os.environ["RANK"])
BAD_RANK = 2


def ranks_sum(number: float) -> float:
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    return total.item()


def groups() -> dict:
    with process_group(timeout_s=120) as device:
        made = dist.group.WORLD
        seen = {"device": str(device), "backend": dist.get_backend(), "place": [dist.get_rank(), dist.get_world_size()]}
        with process_group("gloo") as joined:
            seen["joined"] = [str(joined), dist.group.WORLD is made]
        seen["left alone"] = dist.group.WORLD is made
    seen["destroyed"] = not dist.is_initialized()
    seen["again"] = again()
    seen["models that outlive their group"] = models_that_outlive_their_group()
    seen["destroyed by the user"] = destroyed_by_the_user()
    seen["after an exception"] = after_an_exception()
    seen["openmpi"] = openmpi()
    return seen


def again() -> list:
    """Several groups, one after the other. The ranks join each at different times."""
    sums = []
    for number in range(4):
        time.sleep(0.05 * ((RANK + number) % 4))
        with process_group(timeout_s=120):
            sums.append(ranks_sum(number))
    return sums


def models_that_outlive_their_group() -> bool:
    """Short trainings in groups of their own. Without the package's part, torch hangs after some five of them."""
    for _ in range(20):
        with process_group(timeout_s=120):
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            for _ in range(3):
                model(torch.ones(8, 64)).sum().backward()
        del model
    return True


def destroyed_by_the_user() -> bool:
    with process_group(timeout_s=120):
        dist.destroy_process_group()
    return not dist.is_initialized()


def after_an_exception() -> list:
    try:
        with process_group(timeout_s=120):
            dist.barrier()
            raise KeyError("mine")
    except KeyError as error:
        return [str(error), dist.is_initialized()]


def openmpi() -> list:
    """The same processes as mpirun would start them: rank 0 listens, and no RANK is set."""
    with process_group(timeout_s=120):
        port = [free_port() if RANK == 0 else None]
        dist.broadcast_object_list(port)
    before = dict(os.environ)
    for name in before:
        if name.startswith(("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(RANK), "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(RANK), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    os.environ["MASTER_PORT"] = str(port[0])
    sums = again()
    os.environ.clear()
    os.environ.update(before)
    return sums


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@tracking_init(project="tests")
def train() -> None:
    run = get_run()
    with process_group(timeout_s=120):
        for step in range(3):
            loss = ranks_sum(RANK + step) / dist.get_world_size()
            if run is not None:
                run.log({"loss": loss, **prefix_metrics({"step": step})})


@tracking_init(project="tests")
def fail() -> None:
    with process_group(timeout_s=600):  # longer than the test waits for the job
        dist.barrier()
        if RANK == BAD_RANK:
            dist.all_reduce(torch.zeros(1), async_op=True)  # the others never join it: torch's destructor would wait
            raise ValueError("made to fail")
        dist.barrier()


if __name__ == "__main__":
    report = groups()
    train()
    Path(f"{RANK}.json").write_text(json.dumps(report))
    fail()
