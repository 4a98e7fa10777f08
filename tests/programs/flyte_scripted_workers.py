"""The training of `scripted_training.py` as Flyte 1 tasks with workers."""

import scripted_training as training
from flytekit import task
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import tracking_init

LOCAL = {"nnodes": 1, "nproc_per_node": 2, "increase_shared_mem": False, "monitor_interval": 1}


@tracking_init(**{"project": training.PROJECT, **training.SETTINGS.get("tracking", {})})
@task(task_config=Elastic(start_method="spawn", **LOCAL))
def spawn(n: int) -> str:
    worker()
    return ""


@tracking_init(**{"project": training.PROJECT, **training.SETTINGS.get("tracking", {})})
@task(task_config=Elastic(start_method="fork", **LOCAL))
def fork(n: int) -> str:
    worker()
    return ""


def worker() -> None:
    if "collective" in training.SETTINGS["ends"].values():
        import torch.distributed as dist

        dist.init_process_group("gloo")
    try:
        training.body()
    finally:
        training.note("unwound")


if __name__ == "__main__":
    {"spawn": spawn, "fork": fork}[training.SETTINGS["task"]](n=1)
