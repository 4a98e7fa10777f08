"""What a task is told about its runs and its sweep, in the shape that the other plugins give it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._job.plan import RankScope, RunMode
from flyteplugins_tracking._runs.calls import get_run


@dataclass(frozen=True)
class WandbContext:
    """What `wandb_config` says to the task that runs here. `kwargs` are the arguments that have no attribute."""

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
    """What `wandb_sweep_config` says to the task that runs here. `kwargs` are the keys that have no attribute."""

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
        """What `wandb.sweep` takes as the sweep's configuration."""
        values = asdict(self)
        more = values.pop("kwargs") or {}
        for name in ("project", "entity", "prior_runs", "download_logs"):
            del values[name]
        return {name: value for name, value in {**values, **more}.items() if value is not None}


def get_wandb_context() -> WandbContext | None:
    """What is propagated to this task, function or process by `wandb_config`; None for nothing."""
    arguments = _arguments(propagation.CONFIG, WandbContext)
    return WandbContext(**arguments) if arguments else None


def get_wandb_sweep_context() -> WandbSweepContext | None:
    """What is propagated to this task, function or process by `wandb_sweep_config`; None for nothing."""
    arguments = _arguments(propagation.SWEEP, WandbSweepContext)
    return WandbSweepContext(**arguments) if arguments else None


def get_wandb_run() -> Any:
    """The W&B run of the decorated function that runs here, or one that was opened without it; None for none."""
    run = get_run("wandb")
    if run is None and "wandb" in sys.modules:
        run = sys.modules["wandb"].run
        # A forked child has a copy of its parent's, and cannot log to it.
        return None if getattr(run, "_init_pid", None) != os.getpid() else run
    return run


def _arguments(key: str, kind: type) -> dict[str, Any]:
    """What is propagated under `key`, as the arguments of `kind`; empty for nothing."""
    given = flyte_context.propagated(key)
    names = set(kind.__dataclass_fields__) - {"kwargs"}  # type: ignore[attr-defined]
    more = {name: value for name, value in given.items() if name not in names}
    known = {name: value for name, value in given.items() if name in names}
    return {**known, "kwargs": more or None} if given else {}
