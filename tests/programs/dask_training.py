"""A training on Dask's workers, which have served different numbers of trials before: `dask_training.py RUN_MODE`.

What makes the process group sets RANK and WORLD_SIZE in the workers, and unsets them. Prints as JSON the ids and places
of both trainings on each rank, and those of the trials before and after.
"""

import json
import os
import socket
import sys
from typing import Any

import torch.distributed as dist
from distributed import Client, LocalCluster

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


def _found() -> dict[str, Any]:
    run, info = get_run(), get_distributed_info()
    return {"run": None if run is None else run.id, "info": None if info is None else dict(info)}


def trial() -> dict[str, Any]:
    return tracking_init(project="tests")(_found)()


def ranks(rank: int, port: int, run_mode: str) -> list[dict[str, Any]]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    try:
        found = []
        for _ in range(2):
            found.append(tracking_init(project="tests", run_mode=run_mode)(_found)())
            dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(run_mode: str) -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        workers = list(client.scheduler_info()["workers"])
        options = {"pure": False, "allow_other_workers": False}
        before = [client.submit(trial, workers=[workers[n > 0]], **options).result() for n in range(3)]
        port = _free_port()
        jobs = [client.submit(ranks, n, port, run_mode, workers=[workers[n]], **options) for n in range(2)]
        trained = client.gather(jobs)
        after = [client.submit(trial, workers=[workers[n]], **options).result() for n in range(2)]
        print(json.dumps({"before": before, "trained": trained, "after": after}))


if __name__ == "__main__":
    main(sys.argv[1])
