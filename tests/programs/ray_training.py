"""Ray Train and Ray Tune: `ray_training.py KIND WORKERS [RUN_MODE [RANK_SCOPE]]`. Each rank reports its truth.

RAY_NODES is the number of Ray's nodes on this machine, 1 by default.

Kinds: "train" (one fit), "loop" (a fit that trains twice), "retry" (the first attempt fails in the middle),
"tune" (WORKERS trials at once), "tune-retry" (each trial fails once).
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import train as ray_train
from ray import tune
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

HERE = Path(os.environ["TRAIN_DIR"])
MODE = sys.argv[3] if len(sys.argv) > 3 else "auto"
SCOPE = sys.argv[4] if len(sys.argv) > 4 else "global"
ROWS = 5


@tracking_init(project="tests", run_mode=MODE, rank_scope=SCOPE)
def fit(first: int = 0, fails_at: int | None = None) -> dict[str, Any]:
    run, info = get_run(), get_distributed_info()
    for row in range(first, first + ROWS):
        if row == fails_at:
            raise RuntimeError("the first attempt fails")
        if run is not None:
            run.log({"row": row})
    return {"run": None if run is None else run.id, "info": None if info is None else dict(info)}


def report(found: dict[str, Any], name: str) -> None:
    (HERE / "reports").mkdir(exist_ok=True)
    (HERE / "reports" / f"{name}-{os.getpid()}.json").write_text(json.dumps(found))


def worker(config: dict[str, Any]) -> None:
    context = ray_train.get_context()
    truth = {"rank": context.get_world_rank(), "world_size": context.get_world_size(), "restart_count": 0}
    truth |= {"local_rank": context.get_local_rank(), "node": context.get_node_rank()}
    mark = HERE / f"failed-{truth['rank']}"
    if config["kind"] == "retry" and not mark.exists():
        mark.touch()
        fit(fails_at=3 if truth["rank"] == 0 else None)
        return
    calls = [fit() for _ in range(2 if config["kind"] == "loop" else 1)]
    report({**truth, "calls": calls}, str(truth["rank"]))


def trial(config: dict[str, Any]) -> None:
    name = tune.get_context().get_trial_name()
    mark = HERE / f"failed-{name}"
    if config["kind"] == "tune-retry" and not mark.exists():
        mark.touch()
        fit(fails_at=3)
    report({"rank": 0, "restart_count": 0, "trial": name, "calls": [fit()]}, name)
    tune.report({"loss": config["lr"]})


def fit_all(kind: str, workers: int) -> None:
    storage = str(HERE / "ray")
    failures = FailureConfig(max_failures=int("retry" in kind))
    if kind.startswith("tune"):
        space = {"lr": tune.grid_search([0.1 * (n + 1) for n in range(workers)]), "kind": kind}
        config = tune.RunConfig(
            name="tuned", storage_path=storage, failure_config=tune.FailureConfig(max_failures=int("retry" in kind))
        )
        tune.Tuner(tune.with_resources(trial, {"cpu": 1}), param_space=space, run_config=config).fit()
        return
    run_config = RunConfig(name=f"fitted-{os.getpid()}", storage_path=storage, failure_config=failures)
    scaling = ScalingConfig(num_workers=workers, placement_strategy="SPREAD")
    TorchTrainer(worker, train_loop_config={"kind": kind}, scaling_config=scaling, run_config=run_config).fit()


@contextmanager
def connected(nodes: int) -> Iterator[None]:
    """Use a Ray of so many nodes, each with the CPUs of two workers. Ray tells nodes by their addresses."""
    if nodes == 1:
        ray.init(logging_level="error", num_cpus=4, include_dashboard=False)
        yield
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    for node in range(1, nodes):
        cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{node + 1}")
    ray.init(address=cluster.address, logging_level="error")
    yield
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    with connected(int(os.environ.get("RAY_NODES", "1"))):
        fit_all(sys.argv[1], int(sys.argv[2]))
