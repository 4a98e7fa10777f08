"""Tests of Flyte tasks as users write them with the test kit. `test_testing.py` runs them under a pytest of its own.

Two of them fail on purpose.
"""

import flyte
import pytest
from flytekit import task, workflow
from flytekitplugins.kfpytorch import Elastic
from flyteplugins.pytorch.task import Elastic as Elastic2

from flyteplugins_tracking import ConfigError, get_distributed_info, get_run, tracking_init
from flyteplugins_tracking.testing import simulate

env = flyte.TaskEnvironment(name="e")
elastic = flyte.TaskEnvironment(name="workers", plugin_config=Elastic2(nnodes="1:2", nproc_per_node=3))


@task(task_config=Elastic(nnodes=3, nproc_per_node=2))
@tracking_init(project="p", rank_scope="worker")
def below(x: int) -> int:
    return get_distributed_info().world_size


@tracking_init(project="p")
@task
def one_process(x: int) -> bool:
    return get_distributed_info() is None


@tracking_init(project="p", run_mode="shared")
@elastic.task
def workers(x: int) -> int:
    get_run().log({"x": x})
    return get_distributed_info().world_size


@tracking_init(project="p", run_mode="shared")
@env.task
def childless(x: int) -> None: ...


@task
def untracked(x: int) -> int:
    return x


@workflow
def pipeline(x: int) -> int:
    return below(x=x)


def test_tasks_have_their_workers(simulated_ranks, recorded_runs):
    assert simulated_ranks(below, args=(1,)).returned == (6,) * 6
    assert simulated_ranks(below, args=(1,), nproc_per_node=1).returned == (3,) * 3
    assert simulated_ranks(one_process, kwargs={"x": 1}).returned == (True,)
    assert simulated_ranks(one_process, kwargs={"x": 1}, num_workers=2).returned == (False,) * 2
    assert simulated_ranks(workers, args=(4,)).returned == (6,) * 6
    assert [len(run.ranks) for run in recorded_runs] == [1, 1, 1, 1, 1, 1, 1, 1, 6]
    assert recorded_runs[8].logged("x") == (4,) * 6


def test_what_is_refused_in_a_job_is_refused():
    assert "run_mode='shared' in a task without workers" in str(simulate(childless, args=(1,)).failed[0].error)
    for target, words in [
        (pipeline, "not a Python task"),
        (untracked, "put @tracking_init"),
        (env, "not a Python task"),
    ]:
        with pytest.raises(ConfigError, match=words):
            simulate(target, args=(1,))


def test_that_fails(simulated_ranks):
    assert len(simulated_ranks(below, args=(1,)).runs) == 4


def test_that_fails_for_a_rank(simulated_ranks):
    assert simulated_ranks(childless, args=(1,)).returned
