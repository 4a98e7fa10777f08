"""Pools of long-lived workers: how they are known, and what of the variables around them counts in their workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_topology import OPENMPI, SLURM, TORCHRUN

from flyteplugins_tracking import DistributedInfo, get_distributed_info
from flyteplugins_tracking._rank import children, pools
from flyteplugins_tracking._rank.pools import POOLS, innermost_pool
from flyteplugins_tracking._rank.topology import detect, examine
from flyteplugins_tracking.errors import TopologyError


def called_by(file: str, function: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls another, as if it were one of a pool's."""
    names: dict[str, Any] = {}
    name = function or "main"
    exec(compile(f"def {name}(task): return task()", f"/venv/{file}", "exec"), names)
    caller: Callable[[Callable[[], Any]], Any] = names[name]
    return caller


ON_STACK = [(name, *function) for name, known in POOLS.items() for function in known.functions]


@pytest.fixture(params=ON_STACK, ids=lambda row: f"{row[0]} {row[1]}")
def in_pool(request: pytest.FixtureRequest) -> tuple[str, Callable[[Callable[[], Any]], Any]]:
    name, file, function = request.param
    return name, called_by(file, function)


@pytest.mark.parametrize("around", [SLURM, OPENMPI], ids=["slurm", "openmpi"])
def test_what_is_around_a_pool_makes_no_rank_of_its_worker_and_what_the_worker_sets_does(
    in_pool, around, bare_environment, monkeypatch
):
    name, call = in_pool
    monkeypatch.setattr(children, "variables_at_birth", lambda: around)
    assert detect(around) is not None
    assert call(lambda: detect(around)) is None
    pool = call(lambda: examine(around)).pool
    assert pool is not None
    assert (pool.name, "has called this function" in pool.reason) == (name, True)
    info = call(lambda: detect({**around, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}))
    assert (info.rank, info.world_size, info.launcher) == (1, 2, name)
    # As Spark's TorchDistributor starts it: its own store names the run.
    assert call(lambda: detect({**around, **TORCHRUN})).launcher == "torchelastic"
    # RANK and WORLD_SIZE alone are those of a pod; a worker of a pool is no pod's only process.
    assert call(lambda: detect({"RANK": "1", "WORLD_SIZE": "2"})) is None
    assert call(lambda: detect({"RANK": "1"})) is None


def test_the_variables_of_a_group_that_has_ended_or_is_another_one_are_refused(bare_environment, monkeypatch):
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    group: dict[str, Any] = {"is_available": lambda: True, "is_initialized": lambda: True}
    dist = SimpleNamespace(**group, get_rank=lambda: 1, get_world_size=lambda: 2)
    call = called_by("distributed/worker.py", "apply_function")
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    c10d = SimpleNamespace(_default_pg_init_method="env://")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    assert call(lambda: detect(env)).rank == 1
    dist.get_world_size = lambda: 3
    with pytest.raises(TopologyError, match="RANK=1 and WORLD_SIZE=2 were set in this process"):
        call(lambda: detect(env))
    dist.is_initialized = lambda: False
    with pytest.raises(TopologyError, match="Unset them, or use override_distributed_info"):
        call(lambda: detect(env))
    assert call(lambda: detect({})) is None


def test_a_pool_is_known_by_its_command_line(monkeypatch):
    known = {
        "ray": ("ray::IDLE", "ray::train()", "/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x"),
        "dask": ("python /venv/bin/dask worker tcp://a:1", "python -m distributed.cli.dask_worker tcp://a:1"),
        "spark": ("python -m pyspark.daemon",),
        "mpi4py.futures": ("python -m mpi4py.futures train.py",),
        None: ("python train.py dask worker", "python train_with_ray.py", "dask scheduler", ""),
    }
    for name, command in ((name, command) for name, commands in known.items() for command in commands):
        monkeypatch.setattr(pools.proc, "command_line", lambda _, command=command: command.split(" "))
        # Another process: what is found is kept for each.
        monkeypatch.setattr(os, "getpid", lambda command=command: hash(command))
        found = innermost_pool()
        assert (found and found.name) == name, command


def test_a_ray_driver_is_no_worker(bare_environment, monkeypatch):
    worker = ModuleType("ray._private.worker")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    for mode, pool in ((0, None), (1, "ray")):
        worker.global_worker = SimpleNamespace(mode=mode, actors={})  # type: ignore[attr-defined]
        found = innermost_pool()
        assert (found and found.name) == pool


def test_the_only_worker_of_ray_train_keeps_the_fits_name(bare_environment, monkeypatch):
    """So that its retry goes on with the run."""
    context = SimpleNamespace(
        **{f"get_{name}": lambda: 0 for name in ("world_rank", "local_rank", "node_rank")},
        get_world_size=lambda: 1,
        get_local_world_size=lambda: 1,
        get_experiment_name=lambda: "fitted",
        train_run_context=SimpleNamespace(run_id="0123456789"),
    )
    module = SimpleNamespace(_train_context=context)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.context", module)
    assert detect({}) == DistributedInfo(0, 1, 0, 1, 0, 1, launcher="ray", job_id="fitted-01234567")
    assert get_distributed_info() is None
