"""The training of `compared.py` as a Flyte 2 task with flyteplugins-wandb. The variable COMPARED has the case."""

import os

import compared
import flyte
import torch.distributed as dist
from flyte2_elastic import Elastic
from flyteplugins.wandb import get_wandb_run, wandb_init

QUICK = {"max_restarts": 0, "monitor_interval": 1, "rdzv_configs": {"timeout": 60, "join_timeout": 60}}
elastic = flyte.TaskEnvironment(name="compared", plugin_config=Elastic(nnodes=1, nproc_per_node=2, **QUICK))


@wandb_init(project="compared")
@elastic.task
def workers(n: int) -> None:
    run = get_wandb_run()
    dist.init_process_group("gloo")
    compared.train(os.environ["COMPARED"], run.log if run is not None else print)
    dist.destroy_process_group()
