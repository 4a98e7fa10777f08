"""torch's default process group for the length of a `with`: refused where it would hang, and given back at the end.

The name has an underscore since the package exports the function, which would hide a module of the same name.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.topology import get_distributed_info
from flyteplugins_tracking._util.checks import check_seconds
from flyteplugins_tracking.errors import ConfigError, TopologyError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# How long giving the group back may take where the ranks no longer go together: NCCL may wait for the others then.
_ABANDON_S = 10.0
# By where the ranks meet: the store there, and the numbers of the groups that have come from it.
_stores: dict[tuple[str, str, int, int], tuple[Any, Iterator[int]]] = {}
# How each process is told where rank 0 listens, by launchers that do not say it themselves.
_HOW_TO_TELL = {
    "slurm": 'before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
    "MASTER_PORT=29500",
    "openmpi": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, where HOST runs rank 0",
    "mpich": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500, where HOST runs rank 0",
}
_HOW_TO_TELL_ELSEWHERE = "in each process: export MASTER_ADDR=HOST MASTER_PORT=29500, where HOST runs rank 0"


@contextmanager
def process_group(
    backend: str | None = None, *, timeout_s: float | None = None, device: int | None = None
) -> Iterator[torch.device]:
    """Have torch's default process group for the length of a `with`.

    A group that is there already is joined, and left as it is at the end. Else one is made, of the ranks that
    `get_distributed_info()` tells, which meet at MASTER_ADDR and MASTER_PORT ("env://"); outside a distributed job it
    is a group of one. It is destroyed at the end, also after an exception.

    Args:
        backend: As in `torch.distributed.init_process_group`. None for NCCL where CUDA is available, else gloo.
        timeout_s: Seconds that the ranks wait for each other, at first and in a collective. None for torch's default:
            600 with NCCL, else 1800. A group that is joined keeps its own.
        device: The index of this process's GPU, which is for NCCL. None for the local rank. Pass 0 where each process
            sees only its own GPU.

    Yields:
        This rank's `torch.device`. With NCCL its GPU, which is the current one, and the group's own; else the CPU.

    Raises:
        ConfigError: An argument cannot work: NCCL without CUDA, say; or the group that is there is another one.
        TopologyError: The processes cannot meet, or have no GPU each: before anything waits for another rank.

    Example:
        ```python
        with process_group() as device:
            model = DistributedDataParallel(Model().to(device))
        ```
    """
    dist = _torch_distributed()
    _check_arguments(backend, timeout_s, device)
    info = get_distributed_info()
    if dist.is_initialized():
        yield _join(dist, backend, device, info)
        return
    hook_before = sys.excepthook
    place = _make(dist, backend, timeout_s, device, info)
    group, hook = dist.group.WORLD, sys.excepthook
    try:
        yield place
    except BaseException as error:
        _abandon(dist, group, error)
        raise
    if _is_there(dist, group):
        dist.destroy_process_group()
    if sys.excepthook is hook:  # each group's puts the rank before the lines; after an exception it is still of use
        sys.excepthook = hook_before


def _torch_distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        raise ConfigError("process_group() needs torch: pip install 'flyteplugins-tracking[torch]'") from None
    if not dist.is_available():
        raise ConfigError("process_group() needs a torch that is built with torch.distributed: pip install torch")
    return dist


def _check_arguments(backend: object, timeout_s: object, device: object) -> None:
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(f"backend={backend!r} is no name: pass 'nccl', 'gloo' or None")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
        raise ConfigError(f"device={device!r} is no index of a GPU: pass 0, 1, ... or None")


def _join(dist: Any, backend: str | None, device: int | None, info: DistributedInfo | None) -> torch.device:
    """The device of the group that is there, which is as it was asked for."""
    import torch

    there = _names(dist.get_backend_config())
    if backend is not None and not set(_names(backend)) <= set(there):
        raise ConfigError(
            f"backend={backend!r}, and there is a process group of {', '.join(sorted(set(there)))} already: pass "
            "backend=None to join it, or call torch.distributed.destroy_process_group() first"
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if info is not None and (info.rank, info.world_size) != (rank, world_size):
        raise TopologyError(
            f"there is a process group already, in which this is rank {rank} of {world_size}, and for {info.launcher} "
            f"it is rank {info.rank} of {info.world_size}: call torch.distributed.destroy_process_group() first"
        )
    place = getattr(dist.group.WORLD, "bound_device_id", None)
    if place is None:
        place = torch.device("cuda", torch.cuda.current_device()) if "nccl" in there else torch.device("cpu")
    if device is not None and device != place.index:
        raise ConfigError(f"device={device}, and there is a process group on {place} already: pass device=None")
    return place


def _make(
    dist: Any, backend: str | None, timeout_s: float | None, device: int | None, info: DistributedInfo | None
) -> torch.device:
    import torch

    if backend is None:
        backend = "nccl" if torch.cuda.is_available() or device is not None else "gloo"
    on_gpu = "nccl" in _names(backend)
    if device is not None and not on_gpu:
        raise ConfigError(
            f"device={device} goes with NCCL, and backend={backend!r} was asked for: leave one of them out"
        )
    if on_gpu:
        _check_cuda(device)
    place = torch.device("cuda", _gpu(device, info)) if on_gpu else torch.device("cpu")
    _check_backend(dist, backend)
    if on_gpu:
        torch.cuda.set_device(place)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=dist.HashStore() if info is None else _meet(dist, info, timeout),
        rank=0 if info is None else info.rank,
        world_size=1 if info is None else info.world_size,
        timeout=timeout,
        device_id=place if on_gpu else None,  # NCCL's errors then come here, and not in the first collective
    )
    return place


def _meet(dist: Any, info: DistributedInfo, timeout: timedelta | None) -> Any:
    """The store through which the ranks of a new group find each other, for that group alone.

    torch's own `env://` gives each group the same keys: in a second one, ranks find the first one's addresses there.
    And where rank 0's process has the store, it would end with the first group, as others come to it for the second.
    """
    from torch.distributed.rendezvous import rendezvous

    _check_meeting_point(info)
    place = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], info.rank, info.world_size)
    if place not in _stores:
        # The ranks of Slurm and MPI are in no variable that torch reads: what is passed goes before RANK.
        given = {} if timeout is None else {"timeout": timeout}
        _stores[place] = next(rendezvous("env://", info.rank, info.world_size, **given))[0], itertools.count()
    store, numbers = _stores[place]
    # torchrun's store has the addresses of the processes before a restart, too. Each node counts its own restarts.
    attempt = info.restart_count if info.num_workers == 1 else 0
    own = dist.PrefixStore(f"process_group/{attempt}/{next(numbers)}", store)
    if timeout is not None:
        own.set_timeout(timeout)
    return own


def _names(backend: str) -> Sequence[str]:
    """The backends of "nccl", or of "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]


def _check_cuda(device: int | None) -> None:
    import torch

    if torch.cuda.is_available():
        return
    what = "backend='nccl'" if device is None else f"device={device}"
    why = "sees no GPU" if torch.version.cuda or torch.version.hip else "is built without CUDA"
    raise ConfigError(
        f"{what} needs CUDA, and torch {torch.__version__} {why} here ({_visible_devices()}): run where nvidia-smi "
        "lists a GPU, or pass backend='gloo'"
    )


def _check_backend(dist: Any, backend: str) -> None:
    for name in _names(backend):
        if name == "undefined" or not dist.is_backend_available(name):
            known = [other for other in dist.Backend.backend_list if other not in ("undefined", "fake")]
            raise ConfigError(
                f"backend={backend!r}: this torch has no {name!r}. It has: "
                f"{', '.join(other for other in known if dist.is_backend_available(other))}"
            )


def _gpu(device: int | None, info: DistributedInfo | None) -> int:
    """The index of this process's GPU: each rank of a node has its own, or NCCL waits, or fails in its own words."""
    import torch

    count = torch.cuda.device_count()
    if device is None and info is None:
        return int(torch.cuda.current_device())
    if device is None and info is not None:
        ranks = info.local_world_size if info.local_world_size is not None else (info.local_rank or 0) + 1
        if ranks > count:
            raise TopologyError(
                f"{ranks} processes on this node, and torch sees {count} GPUs ({_visible_devices()}): NCCL needs one "
                f"for each. Start {count} processes (torchrun --nproc-per-node={count}), let torch see more GPUs, or "
                "pass backend='gloo'. Where each process sees only its own GPU, pass device=0."
            )
        device = info.local_rank
    if device is None:
        raise TopologyError("which GPU is this rank's is not known: set LOCAL_RANK in each process, or pass device=")
    if device >= count:
        raise ConfigError(f"device={device}, and torch sees {count} GPUs ({_visible_devices()}): pass a lower one")
    return device


def _visible_devices() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if value is None else f"CUDA_VISIBLE_DEVICES={value!r}"


def _check_meeting_point(info: DistributedInfo) -> None:
    """Refuse what rank 0 would not listen at: torch waits for it as long as for a rank that starts late."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        how = _HOW_TO_TELL.get(info.launcher, _HOW_TO_TELL_ELSEWHERE)
        raise TopologyError(
            f"{' and '.join(missing)} not set: {info.launcher} does not tell the {info.world_size} processes where "
            f"rank 0 listens. Start them with torchrun, or set both, {how}"
        )
    port = os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TopologyError(f"MASTER_PORT={port!r} is no port: set a number from 1 to 65535, on all ranks the same")


def _abandon(dist: Any, group: Any, error: BaseException) -> None:
    """Give the group back while other ranks may be in its collectives: they fail, and the error is to be seen here.

    NCCL's destruction waits for the other ranks: an abort does not, as a rule, and is given a deadline.
    https://docs.pytorch.org/docs/stable/distributed.html#shutdown
    """
    if not _is_there(dist, group):
        return
    logger.warning(
        "rank %d leaves its process group with %s: collectives of other ranks may fail for it",
        dist.get_rank(),
        type(error).__name__,
    )
    place = getattr(group, "bound_device_id", None)
    leaving = threading.Thread(target=_leave, args=(dist, place), name="leave-process-group", daemon=True)
    leaving.start()
    leaving.join(_ABANDON_S)
    if leaving.is_alive():
        logger.warning("the process group is not given back after %g s: it ends with the process", _ABANDON_S)


def _leave(dist: Any, place: torch.device | None) -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    try:
        if abort is not None and "nccl" in _names(dist.get_backend_config()):
            if place is not None:
                import torch

                torch.cuda.set_device(place)  # each thread has a current one of its own
            abort()
        else:
            dist.destroy_process_group()
    except Exception:
        logger.warning("the process group could not be given back", exc_info=True)


def _is_there(dist: Any, group: Any) -> bool:
    """Whether it still is the default group: Accelerate's `end_training`, for one, destroys that."""
    return dist.is_initialized() and dist.group.WORLD is group
