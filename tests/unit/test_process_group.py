"""A process group of one process, and the arguments and variables that `process_group` refuses."""

from __future__ import annotations

import sys

import pytest

from flyteplugins_tracking import ConfigError, DistributedInfo, TopologyError, override_distributed_info, process_group


@pytest.fixture(autouse=True)
def dist(monkeypatch):
    """torch.distributed, with which a test fails if this process waits for another one: the errors come before that."""
    import torch.distributed as dist

    def wait(*_: object, **__: object) -> None:
        raise AssertionError("waits for rank 0")

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", wait)
    return dist


@pytest.fixture
def place(bare_environment, dist):
    """Make this process a rank of a job that no other rank joins."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            bare_environment.setenv(name, value)

    set_variables(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    set_variables(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    yield set_variables
    assert not dist.is_initialized()


@pytest.fixture
def gpus(monkeypatch):
    """Have torch see this number of GPUs: the machine may have none."""
    import torch

    def set_count(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    set_count(0)
    return set_count


def refusal(error: type[Exception], *arguments, **keywords) -> str:
    with pytest.raises(error) as refused, process_group(*arguments, **keywords):
        pytest.fail("not refused")
    return str(refused.value)


def test_one_process_has_a_group_of_one(bare_environment, dist, gpus):
    with process_group() as device:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert str(device) == "cpu"
    assert not dist.is_initialized()


def test_a_local_rank_without_a_gpu_and_a_timeout_that_cannot_work_are_refused(place, gpus):
    gpus(1)
    for backend in (None, "nccl", "cpu:gloo,cuda:nccl"):
        assert refusal(TopologyError, backend).startswith("this is local rank 1, but torch sees 1 GPUs")
    for timeout_s in (0, "60"):
        told = f"timeout_s must be a positive number of seconds, got {timeout_s!r}"
        assert refusal(ConfigError, timeout_s=timeout_s).startswith(told)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict each other"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 and WORLD_SIZE=1 contradict each other"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be set to where rank 0 listens, which env does not do"),
        ({"MASTER_PORT": ""}, "MASTER_PORT must be set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT must be set .*export MASTER_ADDR=HOST"),
    ],
)
def test_ranks_that_cannot_meet_are_refused(place, gpus, variables, message):
    place(**variables)
    with pytest.raises(TopologyError, match=message), process_group():
        pytest.fail("not refused")


@pytest.mark.parametrize(("num_workers", "has_old_addresses"), [(1, False), (2, True)])
def test_after_a_restart_of_one_node_no_rank_finds_the_old_addresses(
    monkeypatch, bare_environment, dist, num_workers, has_old_addresses
):
    store = dist.HashStore()  # torchrun's, which outlives its workers
    monkeypatch.setattr(
        sys.modules["torch.distributed.rendezvous"], "rendezvous", lambda *_, **__: iter([(store, 0, 2)])
    )
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")

    stores = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: stores.append(store))

    def store_after(restart_count):
        monkeypatch.setattr("flyteplugins_tracking._job.process_group._stores", {})  # a process of its own
        info = DistributedInfo(rank=0, world_size=2, num_workers=num_workers, restart_count=restart_count)
        with override_distributed_info(info), process_group("gloo"):
            return stores[-1]

    store_after(0).set("address", "of a process that has ended")
    # With several nodes the keys stay the same: nodes that count different restarts must meet.
    assert store_after(1).check(["address"]) == has_old_addresses
