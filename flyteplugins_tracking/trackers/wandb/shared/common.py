"""The common parts of a shared run's handles: the run's name on the node, its rows and its read-only config."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.node_group import NodeRole
from flyteplugins_tracking.trackers.rows import RowBuffer
from flyteplugins_tracking.trackers.wandb import vendor


def node_name(request: RunRequest) -> str:
    """The name under which the leader listens on its node.

    It differs for another job with the same run id, and for an earlier attempt of this job that is still ending.
    """
    info = request.info
    assert info is not None
    run = (request.config.project, request.planned_run_id, info.worker_index)
    attempt = (
        info.launcher,
        info.job_id,
        info.restart_count,
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT"),
    )
    return json.dumps(["wandb", *run, *attempt])


def writer_barrier(request: RunRequest) -> WriterBarrier | None:
    """Enter the barrier of the leaders, or of the ranks whose node is unknown. None if the run has one writer."""
    if not NodeRole.of(request).has_peers:
        return None
    info = request.info
    kind, count = ("rank", 0) if info is None else ("rank", info.world_size)
    if info is not None and info.worker_index is not None:
        kind, count = "worker", info.num_workers or 1
    others = [f"{kind}-{index}" for index in range(count)]
    return WriterBarrier.entered(request, "W&B", request.plan.label or "", others)


def rows_of(request: RunRequest, run: Callable[[], Any]) -> RowBuffer:
    """The rows of this rank, for the run that `run` returns."""
    config, info = request.config, request.info
    prefix = f"rank_{info.rank if info else 0}/" if config.rank_prefix else ""
    return RowBuffer(config.step_metric, prefix, lambda: run().define_metric("*", step_metric=config.step_metric))


def step_of(read: Callable[[], Any], rows: RowBuffer) -> Any:
    """The run's step. W&B's shared mode has none; there it is the number of rows that this rank has logged."""
    try:
        return read()
    except Exception:
        return rows.logged


def make_config_read_only(run: Any, request: RunRequest) -> None:
    """Have `run.config` raise a `ConfigError` when this rank changes it."""
    rank = request.info.rank if request.info else 0
    vendor.replace_config_class(run, lambda kind: _read_only(kind, rank, request.primary_name))


@functools.cache
def _read_only(kind: Any, rank: int, primary: str) -> Any:
    """A subclass of `wandb.Config` that refuses changes, except for wandb's own keys, which begin with _."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            f"rank {rank} cannot change the config of its shared run, which is the primary's: change it on {primary}, "
            "or pass config= to tracking_init"
        )

    def refuse_users_keys(name: str) -> Any:
        def changed(config: Any, *args: Any, **kwargs: Any) -> Any:
            change = next(iter([*args, *kwargs.values()]), None)
            keys = change if isinstance(change, Mapping) else [change]
            method = getattr(kind, name) if all(str(key).startswith("_") for key in keys) else refuse
            return method(config, *args, **kwargs)

        return changed

    members = {name: refuse_users_keys(name) for name in ("__setitem__", "__setattr__", "update", "setdefaults")}
    members.update(dict.fromkeys(("update_locked", "merge_locked"), refuse))
    return type(kind.__name__, (kind,), members)
