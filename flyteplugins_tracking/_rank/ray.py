"""The world of Ray Train and the trial of Ray Tune, as Ray tells them to a process. Nothing here imports Ray.

Ray has no public name for one `fit()`, nor for the trial's config: the private parts that are read stand here alone.
https://docs.ray.io/en/latest/train/api/doc/ray.train.get_context.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.modules import loaded

_WORKER_MODE = 1


class Trial(NamedTuple):
    """A trial of Ray Tune.

    Attributes:
        name: Its name, for instance "train_d0b33_00001".
        experiment: The name of its experiment.
        config: Its hyperparameters.
    """

    name: str
    experiment: str
    config: Mapping[str, Any] = {}


def is_worker() -> bool:
    """Return whether this process runs Ray's tasks or an actor. A driver does not."""
    module = loaded("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    return getattr(worker, "mode", None) == _WORKER_MODE


def train_world() -> DistributedInfo | None:
    """Return this worker's place in the world of Ray Train; None outside a function of Ray Train."""
    context = _train_context() or _session_of_train()
    if context is None:
        return None
    size, local_size = context.get_world_size(), context.get_local_world_size()
    one_node = size == local_size
    return DistributedInfo(
        rank=context.get_world_rank(),
        world_size=size,
        local_rank=context.get_local_rank(),
        local_world_size=local_size,
        worker_index=context.get_node_rank(),
        num_workers=1 if one_node else None,
        launcher="ray",
        job_id=_name_of_fit(context),
    )


def trial() -> Trial | None:
    """Return the trial of Ray Tune that this actor runs; None for another process."""
    trainable = _trainable()
    if trainable is None:
        return None
    storage = getattr(trainable, "_storage", None)
    experiment = getattr(storage, "experiment_dir_name", "")
    return Trial(trainable.trial_name, str(experiment), dict(trainable.config or {}))


def _train_context() -> Any:
    """Return the context of Ray Train; None outside of its workers."""
    module = loaded("ray.train.v2._internal.execution.context")
    return getattr(module, "_train_context", None)


def _session_of_train() -> Any:
    """Return the context of Ray Train's first version, which is on with RAY_TRAIN_V2_ENABLED=0."""
    module, train = loaded("ray.train._internal.session"), loaded("ray.train")
    session = getattr(module, "_session", None)
    if session is None or session.world_rank is None or train is None:
        return None
    return train.get_context()


def _name_of_fit(context: Any) -> str:
    """Join the experiment's name and what is another for each `fit()`; Ray's own retries keep both."""
    run = getattr(context, "train_run_context", None)
    token = context.get_trial_id() if run is None else str(run.run_id)[:8]
    return "-".join(part for part in (context.get_experiment_name(), token) if part)


def _trainable() -> Any:
    tune, module = loaded("ray.tune"), loaded("ray._private.worker")
    kind = getattr(tune, "Trainable", None)
    if kind is None or not is_worker():
        return None
    actors = getattr(getattr(module, "global_worker", None), "actors", {})
    return next((actor for actor in list(actors.values()) if isinstance(actor, kind)), None)
