"""The results of `gather_metrics` and `process_group` on 4 gloo ranks. Each rank writes what it saw to `{rank}.json`.

At the end rank 2 raises inside `process_group` while the others are in a collective.
"""

import json
import math
import os
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import gather_metrics, get_run, prefix_metrics, process_group, tracking_init

RANK = int(os.environ["RANK"])
BAD_RANK = 2
STATS = ("mean", "min", "max", "sum", "std")


class Raises(dict):
    def items(self):
        raise OSError("cannot be read")


# Metrics and statistics that cannot work.
BAD = {
    "text": ({"loss": "abc"}, ("mean",)),
    "none": ({"loss": None}, ("mean",)),
    "two elements": ({"fine": 1.0, "loss": torch.zeros(2)}, ("mean",)),
    "array": ({"loss": np.zeros(2)}, ("mean",)),
    "no mapping": (0.5, ("mean",)),
    "key": ({7: 0.5}, ("mean",)),
    "raises": (Raises(loss=1.0), ("mean",)),
    "stat": ({"loss": 1.0}, ("mean", "maen")),
    "stats": ({"loss": 1.0}, "mean"),
}


def outcome(*arguments):
    """The call's value, or its error as text."""
    try:
        return gather_metrics(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def values() -> dict:
    common = {
        "float": RANK + 0.5,
        "int": 100 + RANK,
        "bool": RANK == 0,
        "numpy": np.float32(RANK),
        "numpy bool": np.bool_(RANK > 1),
        "array": np.array([RANK]),
        "bfloat16": torch.tensor(RANK + 0.5, dtype=torch.bfloat16, requires_grad=True),
        "float32": torch.tensor([[float(RANK)]]),
        "int64": torch.tensor(2**53 + 1),
        "parameter": torch.nn.Parameter(torch.tensor(float(RANK))),
        "nan": math.nan if RANK == 1 else float(RANK),
        "inf": {0: -math.inf, 3: math.inf}.get(RANK, 0.0),
    }
    return common | ({"odd": RANK} if RANK % 2 else {}) | ({"first": 1.0} if RANK == 0 else {})


def gathering() -> dict:
    calls = []
    plain = dist.gather_object
    dist.gather_object = lambda *args, **kwargs: (calls.append("gather"), plain(*args, **kwargs))[1]
    seen = {"all": gather_metrics(values(), STATS), "calls": len(calls)}
    seen["default"] = gather_metrics({"loss": float(RANK)})
    seen["empty"] = gather_metrics({"loss": 1.0} if RANK == 3 else {}, ["mean"])
    seen["none"] = gather_metrics({"loss": RANK}, ())
    seen["different stats"] = gather_metrics({"loss": RANK}, ("sum",) if RANK == 0 else ("max", "min"))
    seen["to the last"] = gather_metrics({"loss": RANK}, ("sum",), primary_rank=-1)
    for name, (metrics, stats) in BAD.items():
        seen[f"bad {name}"] = outcome(metrics, stats) if RANK == BAD_RANK else outcome({"loss": 1.0}, ("mean",))
    seen["bad primary"] = outcome({"loss": "abc"}) if RANK == 0 else outcome({"loss": 1.0})
    seen["bad all"] = outcome({"loss": "abc"})
    seen["same key"] = outcome({"loss/mean": 1.0, "rank_3/loss": 2.0}, ["mean"])
    seen["after"] = gather_metrics({"loss": 1.0}, ("sum",))
    dist.gather_object = plain
    return seen


def groups() -> dict:
    with process_group(timeout_s=120) as device:
        made = dist.group.WORLD
        seen = {"device": str(device), "backend": dist.get_backend(), "place": [dist.get_rank(), dist.get_world_size()]}
        seen |= gathering()
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
            gathered = gather_metrics({"number": number}, ("sum",))
            sums.append(gathered and gathered["number/sum"])
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
            gathered = gather_metrics({"loss": torch.tensor(float(RANK + step))})
            assert (run is None) == (gathered is None)
            if run is not None:
                run.log({**gathered, **prefix_metrics({"step": step})})


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
