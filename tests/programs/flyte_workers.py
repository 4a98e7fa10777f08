"""Flyte 1 tasks with workers: as those of `flyte_tasks.py`."""

from flyte_tasks import training
from flytekit import task, workflow
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import tracking_init

LOCAL = {"nproc_per_node": 2, "increase_shared_mem": False, "monitor_interval": 1}
spawn = Elastic(nnodes=1, start_method="spawn", **LOCAL)
fork = Elastic(nnodes=1, start_method="fork", **LOCAL)
two_nodes = Elastic(nnodes=2, start_method="spawn", **LOCAL)


@task(task_config=spawn)
@tracking_init(project="tests", entity="team", run_mode="new")
def spawn_below(n: int) -> str:
    return training("spawn_below")


@tracking_init(project="tests", entity="team")
@task(task_config=spawn)
def spawn_above(n: int) -> str:
    return training("spawn_above")


@task(task_config=fork)
@tracking_init(project="tests")
def fork_below(n: int) -> str:
    return training("fork_below")


@tracking_init(project="tests", run_mode="new")
@task(task_config=fork)
def fork_above(n: int) -> str:
    return training("fork_above")


@tracking_init(project="tests", rank_scope="worker")
@task(task_config=two_nodes)
def on_two_nodes(n: int) -> str:
    return training("on_two_nodes")


@tracking_init(project="tests", entity="team", rank_scope="worker")
@task(task_config=two_nodes)
def links_per_worker(n: int) -> str:
    return training("links_per_worker")


@tracking_init(project="tests", entity="team", run_mode="new")
@task(task_config=two_nodes)
def link_to_group(n: int) -> str:
    return training("link_to_group")


@tracking_init(project="tests", entity="team", rank_scope="worker")
@task(task_config=Elastic(nnodes="1:4", **LOCAL))
def links_of_a_range(n: int) -> str:
    return training("links_of_a_range")


@tracking_init(run_mode="new")
@task(task_config=fork)
def run_per_rank(n: int) -> str:
    return training("run_per_rank")


@workflow
def elastic(n: int) -> str:
    spawn_below(n=n)
    spawn_above(n=n)
    fork_below(n=n)
    return fork_above(n=n)


@workflow
def elastic_again(n: int) -> str:
    return fork_below(n=n)


if __name__ == "__main__":
    elastic(n=1)
    elastic_again(n=1)
