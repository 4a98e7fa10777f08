"""One process's place in a distributed job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util.record import Record
from flyteplugins_tracking.errors import TopologyError


class DistributedInfo(Record):
    """This process's place in a distributed job. Fields can be read as attributes or as `info["rank"]`.

    Attributes:
        rank: This process among all, `0 <= rank < world_size`.
        world_size: Processes in the job.
        local_rank: This process among those of its worker (= node). None if the launcher does not set it.
        local_world_size: Processes on this worker; workers may differ. None if the launcher does not set it.
        worker_index: This worker among all. None if the launcher does not set it (MPI on several nodes).
        num_workers: Workers in the job. None if the launcher does not set it.
        restart_count: Restarts so far, as counted by this worker's agent. An agent that joined later has a lower count.
        launcher: The launcher whose variables were read: "ray" (Ray Train), "torchelastic", "env" (RANK, WORLD_SIZE and
            LOCAL_RANK), "lightning", "horovod", "openmpi", "mpich", "pals", "slurm", "process_group", "jax",
            "kubeflow", "konduktor", "skypilot", "flux", "env_rank" (RANK and WORLD_SIZE alone),
            "simulated" (`flyteplugins_tracking.testing`) or "override". For a worker of another pool that has become a
            rank, the pool: "dask", "spark", "mpi4py.futures", "loky" or "concurrent.futures".
        job_id: The launcher's own name for the job, if it has one.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    worker_index: int | None = None
    num_workers: int | None = None
    restart_count: int = 0
    launcher: str = "override"
    job_id: str | None = None

    def __post_init__(self) -> None:
        check_orders({name: getattr(self, name) for name in self._fields}, names={})

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise KeyError(name)
        return getattr(self, name)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields, so that `dict(info)` works."""
        return self._fields


# In each pair the first field must be less than the second.
_ORDERED = (
    ("rank", "world_size"),
    ("local_rank", "local_world_size"),
    ("worker_index", "num_workers"),
    ("local_rank", "world_size"),
    ("worker_index", "world_size"),
)


def iter_ranks(sizes: Sequence[int], **common: Any) -> Iterator[DistributedInfo]:
    """Yield each rank of a job.

    Args:
        sizes: The number of processes on each worker (= node).
        **common: The fields that have the same value on all ranks.
    """
    world_size, rank = sum(sizes), 0
    for worker_index, size in enumerate(sizes):
        for local_rank in range(size):
            yield DistributedInfo(rank, world_size, local_rank, size, worker_index, len(sizes), **common)
            rank += 1


def check_orders(values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse values that contradict each other.

    Args:
        values: The values by field.
        names: The variable of each field, for the message; the field's own name if there is none.

    Raises:
        TopologyError: A value is too low, or one that must be below another is not.
    """
    for low_field, high_field in _ORDERED:
        low, high = values[low_field], values[high_field]
        low_name, high_name = names.get(low_field) or low_field, names.get(high_field) or high_field
        for name, value, minimum in ((low_name, low, 0), (high_name, high, 1)):
            if value is not None and value < minimum:
                raise TopologyError(f"{name}={value} is below {minimum}")
        if low is not None and high is not None and low >= high:
            raise TopologyError(
                f"{low_name}={low} and {high_name}={high} contradict each other: {low} is not below {high}"
            )
