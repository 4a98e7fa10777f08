"""The public types, for mypy to check. Never run."""

from __future__ import annotations

from typing import Any

import wandb
from flytekit import Secret
from typing_extensions import assert_type

from flyteplugins_tracking import (
    DistributedInfo,
    RunPlan,
    get_distributed_info,
    plan,
    prefix_metrics,
    process_group,
    request_stop,
    should_stop,
    tracking_init,
)
from flyteplugins_tracking import get_rum as get_rum  # type: ignore[attr-defined]
from flyteplugins_tracking.compat.wandb import wandb_init
from flyteplugins_tracking.testing import RecordedRun, RecordingTracker, Simulation, simulate
from flyteplugins_tracking.trackers.base import Featrue as Featrue  # type: ignore[attr-defined]
from flyteplugins_tracking.trackers.base import Feature


@tracking_init
def bare(x: int, *, y: str = "") -> float:
    return float(x)


@tracking_init(
    project="p", run_mode="new", rank_scope="worker", entity="e", config={"a": 1}, hang_timeout_s=600, pulse_s=15
)
def with_arguments(x: int) -> list[int]:
    return [x]


@tracking_init(project="p", secret=Secret(group="g", key="k"), settings=wandb.Settings())
async def coroutine(x: int) -> str:
    return str(x)


class Trainer:
    @tracking_init
    def fit(self, x: int) -> bytes:
        return bytes(x)


@wandb_init(project="p", entity="e", secret=Secret(group="g", key="k"), api_host="https://wandb.example.com")
def moved(x: int) -> bytes:
    return bytes(x)


assert_type(moved(1), bytes)
assert_type(bare(1, y="a"), float)
assert_type(with_arguments(1), list[int])
assert_type(Trainer().fit(1), bytes)


assert_type(simulate(bare, args=(1,), nproc_per_node=[1, 2]), Simulation)
assert_type(simulate(bare, kwargs={"x": 1}).runs["an-id"], RecordedRun)
tracking_init(tracker=RecordingTracker())


async def use() -> None:
    assert_type(await coroutine(1), str)


bare("1")  # type: ignore[arg-type]
with_arguments()  # type: ignore[call-arg]
tracking_init(run_mode="atuo")  # type: ignore[call-overload]
tracking_init(rank_scope="node")  # type: ignore[call-overload]
tracking_init(primary_rank=-1)
tracking_init(primary_rank=lambda info: info.world_size - 1)
tracking_init(primary_rank="last")  # type: ignore[call-overload]

info = get_distributed_info()
if info is not None:
    assert_type(info, DistributedInfo)
    assert_type(info.rank, int)
    assert_type(info.worker_index, int | None)
assert_type(plan(info, "auto", "global", "base"), RunPlan)
assert_type(plan(info, "auto", "global", "base", primary_rank=-1), RunPlan)

assert_type(prefix_metrics({"loss": 0.5}), dict[str, Any])
with process_group("gloo", timeout_s=60):
    pass
assert_type(should_stop(), bool)
request_stop("a reason")
request_stop(3)  # type: ignore[arg-type]
process_group(timeout_s="60")  # type: ignore[arg-type]
unsupported: dict[Feature, str] = {"sweeps": "it has none"}
unsupported["sweep"] = "it has none"  # type: ignore[index]
