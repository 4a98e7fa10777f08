"""What engines keep private: the world of Ray Train, the trial of Ray Tune, and the processes and the store of JAX.

Nothing here imports an engine. Ray has no public name for one `fit()`, nor for a trial's config. JAX tells a process
its place only when it has started its devices, and its store is not public. All private parts that are read stand here.
https://docs.ray.io/en/latest/train/api/doc/ray.train.get_context.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.modules import loaded

_WORKER_MODE = 1  # of Ray


# Ray


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


def is_ray_worker() -> bool:
    """Return whether this process runs Ray's tasks or an actor. A driver does not."""
    module = loaded("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    return getattr(worker, "mode", None) == _WORKER_MODE


def ray_world() -> DistributedInfo | None:
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


def ray_trial() -> Trial | None:
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
    if kind is None or not is_ray_worker():
        return None
    actors = getattr(getattr(module, "global_worker", None), "actors", {})
    return next((actor for actor in list(actors.values()) if isinstance(actor, kind)), None)


# JAX


def jax_world() -> DistributedInfo | None:
    """Return this process's place among JAX's; None if it is not connected to others."""
    state = _jax_state()
    if state is None:
        return None
    return DistributedInfo(rank=state.process_id, world_size=state.num_processes, launcher="jax")


def jax_store(info: DistributedInfo) -> JaxStore | None:
    """Return the store of JAX's processes if they are the ranks of this job; None if they are not."""
    state = _jax_state()
    return None if state is None or state.num_processes != info.world_size else JaxStore(state.client)


@dataclass(frozen=True)
class JaxStore:
    """The key-value store of JAX's coordinator, which is in process 0, as a store for a board. Threads may share it.

    Its methods raise a RuntimeError if the coordinator has gone.
    """

    _client: Any

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return its value."""
        return int(self._client.key_value_increment(key, amount))

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Return a value that has been stored."""
        text: str = self._client.key_value_try_get(key)
        return text.encode()

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys have been stored."""
        return all(self._has(key) for key in keys)

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        """Store the first value of a key, and return the one that is stored then: as if "" was expected."""
        with _suppressed("ALREADY_EXISTS"):
            self._client.key_value_set(key, value)
        return self.get(key)

    def _has(self, key: str) -> bool:
        with _suppressed("NOT_FOUND"):
            self._client.key_value_try_get(key)
            return True
        return False


@contextmanager
def _suppressed(status: str) -> Iterator[None]:
    """Suppress the store's error of this status, with which the error's text begins."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(status):
            raise


def _jax_state() -> Any:
    """Return JAX's state of this process, if it is connected to other processes. Imports nothing."""
    state: Any = getattr(loaded("jax._src.distributed"), "global_state", None)
    is_known = all(hasattr(state, name) for name in ("client", "process_id", "num_processes"))
    return state if is_known and state.client is not None else None
