"""Flyte 2 tasks with workers, and one that calls children of every kind."""

import json
import os

import flyte
from flyte2_elastic import Elastic
from flyte2_tracked import env, new, plain, shared, tracked, training, untracked

from flyteplugins_tracking import get_run, tracking_init

QUICK = {
    "max_restarts": 0,
    "monitor_interval": 1,
    "rdzv_configs": {"timeout": 60, "join_timeout": 60, "last_call_timeout": 2},
}
elastic = flyte.TaskEnvironment(name="elastic", plugin_config=Elastic(nnodes=1, nproc_per_node=2, **QUICK))
two_nodes = flyte.TaskEnvironment(name="two", plugin_config=Elastic(nnodes=2, nproc_per_node=2, **QUICK))
resizable = flyte.TaskEnvironment(name="resizable", plugin_config=Elastic(nnodes="1:4", nproc_per_node=1, **QUICK))
restarting = flyte.TaskEnvironment(
    name="restarting", plugin_config=Elastic(nnodes=1, nproc_per_node=2, **{**QUICK, "max_restarts": 1})
)


@tracked
@elastic.task
def workers(n: int) -> str:
    return training("workers")


@tracking_init(project="tests", rank_scope="worker")
@two_nodes.task
def per_node(n: int) -> None:
    training("per_node")


@tracking_init(project="tests", run_mode="new")
@two_nodes.task
def new_on_nodes(n: int) -> None:
    training("new_on_nodes")


@tracking_init(project="tests", entity="team", rank_scope="worker")
@resizable.task
def resized(n: int) -> None:
    training("resized")


@tracked
@env.task
def parent(n: int) -> str:
    """Children of every kind, while its own run is open."""
    get_run().log({"parent": 0})
    ids = {"parent": get_run().id, "plain": plain(n), "new": new(n), "shared": shared(n), "through": untracked(n)}
    ids["workers"] = workers(n)
    get_run().log({"parent": 1})
    return json.dumps(ids)


@tracked
@restarting.task
def restarted_workers(n: int) -> str:
    run_id = training("restarted_workers")
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0 and run_id:
        raise ValueError("the first attempt fails")
    return run_id


@tracking_init(project="tests", download_logs=True)
@elastic.task
def downloaded_workers(n: int) -> str:
    return training("downloaded_workers")
