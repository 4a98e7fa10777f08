"""The contexts of a task's run and sweep, with the attributes that they have in the other plugins."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._rank.plan import RankScope, RunMode
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.call import get_run
from flyteplugins_tracking.trackers.wandb import vendor


@dataclass(frozen=True)
class WandbContext:
    """The propagated arguments of `wandb_config`. `kwargs` holds the arguments that have no attribute."""

    project: str | None = None
    entity: str | None = None
    host: str | None = None
    id: str | None = None
    name: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None
    mode: str | None = None
    group: str | None = None
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    download_logs: bool = False
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class WandbSweepContext:
    """The propagated arguments of `wandb_sweep_config`. `kwargs` holds the keys that have no attribute."""

    name: str | None = None
    method: str | None = None
    metric: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    project: str | None = None
    entity: str | None = None
    prior_runs: list[str] | None = None
    download_logs: bool = False
    kwargs: dict[str, Any] | None = None

    def to_sweep_config(self) -> dict[str, Any]:
        """Return the sweep configuration for `wandb.sweep`."""
        values = asdict(self)
        other_keys = values.pop("kwargs") or {}
        for name in ("project", "entity", "prior_runs", "download_logs"):
            del values[name]
        return {name: value for name, value in {**values, **other_keys}.items() if value is not None}


def get_wandb_context() -> WandbContext | None:
    """Return what `wandb_config` propagates to this task, function or process; None if it propagates nothing."""
    arguments = _arguments(propagation.CONFIG, WandbContext)
    return WandbContext(**arguments) if arguments else None


def get_wandb_sweep_context() -> WandbSweepContext | None:
    """Return what `wandb_sweep_config` propagates to this task, function or process; None if it propagates nothing."""
    arguments = _arguments(propagation.SWEEP, WandbSweepContext)
    return WandbSweepContext(**arguments) if arguments else None


def get_wandb_run() -> Any:
    """Return the W&B run of the decorated function, or one opened without the decorator; None without a run."""
    run = get_run("wandb")
    return vendor.global_run() if run is None else run


def _arguments(key: str, kind: type) -> dict[str, Any]:
    """Return what is propagated under `key`, as the arguments of `kind`; empty if nothing is."""
    propagated = flyte_context.propagated(key)
    names = set(kind.__dataclass_fields__) - {"kwargs"}  # type: ignore[attr-defined]
    others = {name: value for name, value in propagated.items() if name not in names}
    known = {name: value for name, value in propagated.items() if name in names}
    return {**known, "kwargs": others or None} if propagated else {}
