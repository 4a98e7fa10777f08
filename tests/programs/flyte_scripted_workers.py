"""The training of `scripted_training.py` as a Flyte 1 task with workers."""

import scripted_training as training
from flytekit import task
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import tracking_init

LOCAL = {"nnodes": 1, "nproc_per_node": 2, "increase_shared_mem": False, "monitor_interval": 1}


@tracking_init(**{"project": training.PROJECT, **training.SETTINGS.get("tracking", {})})
@task(task_config=Elastic(start_method="spawn", **LOCAL))
def workers(n: int) -> str:
    if "collective" in training.SETTINGS["ends"].values():
        import torch.distributed as dist

        dist.init_process_group("gloo")
    try:
        training.body()
    finally:
        training.note("unwound")
    return ""


if __name__ == "__main__":
    workers(n=1)
