"""Trials on the long-lived workers of a pool: `pool_trials.py POOL TRIALS`. Each trial logs 5 rows, and has a config.

The pool is "dask" (2 worker processes), "ray-tasks", "joblib", "futures", "spark" or "mpi" (mpi4py.futures: start it
with `mpirun -n 3 python -m mpi4py.futures`). What each trial has found is printed as JSON.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


def trial(number: int) -> dict[str, Any]:
    @tracking_init(project="tests", config={"trial": number})
    def train() -> dict[str, Any]:
        run, info = get_run(), get_distributed_info()
        for row in range(5):
            run.log({"trial": number, "row": row})
        return {"trial": number, "run": run.id, "pid": os.getpid(), "info": None if info is None else dict(info)}

    return train()


def dask(numbers: Iterable[int]) -> list[Any]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        return client.gather(client.map(trial, numbers, pure=False))


def ray_tasks(numbers: Iterable[int]) -> list[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    run = ray.remote(trial)
    return ray.get([run.remote(number) for number in numbers])


def joblib(numbers: Iterable[int]) -> list[Any]:
    from joblib import Parallel, delayed

    return list(Parallel(n_jobs=2)(delayed(trial)(number) for number in numbers))


def futures(numbers: Iterable[int]) -> list[Any]:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(trial, numbers))


def mpi(numbers: Iterable[int]) -> list[Any]:
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as pool:
        return list(pool.map(trial, numbers))


def spark(numbers: Iterable[int]) -> list[Any]:
    from pyspark import SparkContext

    with SparkContext("local[2]", "trials") as context:
        return context.parallelize(list(numbers), 4).map(trial).collect()


POOLS: dict[str, Callable[[Iterable[int]], list[Any]]] = {
    "dask": dask,
    "ray-tasks": ray_tasks,
    "joblib": joblib,
    "futures": futures,
    "mpi": mpi,
    "spark": spark,
}

if __name__ == "__main__":
    for found in POOLS[sys.argv[1]](range(int(sys.argv[2]))):
        print(json.dumps(found))
