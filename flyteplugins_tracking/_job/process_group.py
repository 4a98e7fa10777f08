"""torch's default process group for the length of a `with`. Errors are raised before anything can hang."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking._util.checks import check_seconds
from flyteplugins_tracking._util.threads import run_with_timeout, wait_until_asleep
from flyteplugins_tracking.errors import ConfigError, TopologyError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# How many seconds it may take to destroy the group after an error: NCCL may wait for the other ranks then.
_ABANDON_S = 10.0
# The name of the threads that run gloo's collectives, and how many seconds they may go on when the process ends.
_GLOO_THREAD, _GLOO_S = "pt_gloo_runloop", 1.0
# By master address, master port, rank and world size: the store there, and the numbers of the groups that use it.
_stores: dict[tuple[str, str, int, int], tuple[Any, Iterator[int]]] = {}
# The group that was left last. A DistributedDataParallel model often outlives its group, and its destructor holds the
# GIL: if the group ended there too, torch would wait for a thread of the group's, which may wait for the GIL. So torch
# hung in about 1 of 3 short gloo jobs of 4 ranks. Here the group ends with the next one or with the process.
# https://github.com/pytorch/pytorch/issues/56297
_left: list[Any] = []


@contextmanager
def process_group(
    backend: str | None = None, *, timeout_s: float | None = None, device: int | None = None
) -> Iterator[torch.device]:
    """Provide torch's default process group for the length of a `with`.

    An existing group is joined, and left as it is at the end. Otherwise a group of all ranks of
    `get_distributed_info()` is created, which meet at MASTER_ADDR and MASTER_PORT ("env://"); outside a distributed job
    it is a group of one. It is destroyed at the end, even after an exception.

    Args:
        backend: As in `torch.distributed.init_process_group`. None for NCCL if CUDA is available, else gloo.
        timeout_s: Seconds that the ranks wait for each other, at first and in a collective. None for torch's default:
            600 with NCCL, else 1800. An existing group keeps its own timeout.
        device: The index of this process's GPU; for NCCL only. None for the local rank. Pass 0 if each process sees
            only its own GPU.

    Yields:
        This rank's `torch.device`: with NCCL its GPU, which is torch's current one and bound to the group; else the
        CPU.

    Raises:
        ConfigError: An argument is invalid, or does not match the existing group.
        TopologyError: The processes cannot meet, or do not have a GPU each. It is raised before anything waits for
            another rank.

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
    rank_device = _create(dist, backend, timeout_s, device, info)
    group, hook = dist.group.WORLD, sys.excepthook
    if not _left:
        atexit.register(_let_go)
    _left[:] = [group]
    try:
        yield rank_device
    except BaseException as error:
        _never_destroy(group)
        _abandon(dist, group, error)
        raise
    if _is_default_group(dist, group):
        dist.destroy_process_group()
    if sys.excepthook is hook:  # torch's prefixes errors with the rank. After an exception it stays, to do that.
        sys.excepthook = hook_before


def _let_go() -> None:
    """Release the group, and wait for gloo's threads, before Python ends.

    A thread may still have a collective's tensors after the collective has ended. It needs the GIL to release them, and
    torch aborts the process (SIGABRT) if Python has begun to end: https://github.com/pytorch/pytorch/pull/179291
    Releasing the group ends the threads, unless something else has it: `torch.distributed.nn.functional`, which
    DistributedDataParallel imports, keeps the group in which it is imported for ever.
    """
    _left.clear()
    wait_until_asleep(_GLOO_THREAD, _GLOO_S)


def _never_destroy(group: Any) -> None:
    """Keep the object to the end of the process: its destructor waits for collectives that other ranks may never join.

    A list would not do, since it is destroyed before the process's threads are.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


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
        raise ConfigError(f"backend must be 'nccl', 'gloo', another backend's name or None, got {backend!r}")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
        raise ConfigError(f"device must be the index of a GPU (0, 1, ...) or None, got {device!r}")


def _join(dist: Any, backend: str | None, device: int | None, info: DistributedInfo | None) -> torch.device:
    """Return this rank's device in the existing group, after checking the arguments against the group."""
    import torch

    backends = _backend_names(dist.get_backend_config())
    if backend is not None and not set(_backend_names(backend)) <= set(backends):
        raise ConfigError(
            f"backend={backend!r} does not match the existing process group of {', '.join(sorted(set(backends)))}: "
            "pass backend=None to join it, or call torch.distributed.destroy_process_group() first"
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if info is not None and (info.rank, info.world_size) != (rank, world_size):
        raise TopologyError(
            f"in the existing process group this is rank {rank} of {world_size}, but according to {info.launcher} it "
            f"is rank {info.rank} of {info.world_size}: call torch.distributed.destroy_process_group() first"
        )
    rank_device = getattr(dist.group.WORLD, "bound_device_id", None)
    if rank_device is None:
        rank_device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backends else torch.device("cpu")
    if device is not None and device != rank_device.index:
        raise ConfigError(
            f"device={device} does not match the existing process group on {rank_device}: pass device=None"
        )
    return rank_device


def _create(
    dist: Any, backend: str | None, timeout_s: float | None, device: int | None, info: DistributedInfo | None
) -> torch.device:
    import torch

    if backend is None:
        backend = "nccl" if torch.cuda.is_available() or device is not None else "gloo"
    on_gpu = "nccl" in _backend_names(backend)
    if device is not None and not on_gpu:
        raise ConfigError(f"device={device} needs NCCL, but backend={backend!r}: leave one of them out")
    rank_device = torch.device("cuda", _gpu(device, info)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank_device)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    # NCCL fails here then, and not in the first collective; from torch 2.3 on.
    takes_device = "device_id" in inspect.signature(dist.init_process_group).parameters
    bound = {"device_id": rank_device} if on_gpu and takes_device else {}
    dist.init_process_group(
        backend,
        store=dist.HashStore() if info is None else _group_store(dist, info, timeout),
        rank=0 if info is None else info.rank,
        world_size=1 if info is None else info.world_size,
        timeout=timeout,
        **bound,
    )
    return rank_device


def _group_store(dist: Any, info: DistributedInfo, timeout: timedelta | None) -> Any:
    """Return the store through which the ranks of a new group find each other, for that group alone.

    torch's own `env://` uses the same keys for each group: in a second group, ranks would find the addresses of the
    first. And if rank 0's process hosts the store, the store would end with the first group while other ranks connect
    for the second.
    """
    from torch.distributed.rendezvous import rendezvous

    _check_master(info)
    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], info.rank, info.world_size)
    if key not in _stores:
        # torch reads no variables of Slurm and MPI: the rank is passed, which takes precedence over RANK.
        timeout_option = {} if timeout is None else {"timeout": timeout}
        _stores[key] = next(rendezvous("env://", info.rank, info.world_size, **timeout_option))[0], itertools.count()
    job_store, group_numbers = _stores[key]
    # torchrun's store keeps the addresses of the processes before a restart. Nodes may count restarts differently.
    attempt = info.restart_count if info.num_workers == 1 else 0
    group_store = dist.PrefixStore(f"process_group/{attempt}/{next(group_numbers)}", job_store)
    if timeout is not None:
        group_store.set_timeout(timeout)
    return group_store


def _backend_names(backend: str) -> Sequence[str]:
    """Return the names in a backend such as "nccl" or "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]


def _gpu(device: int | None, info: DistributedInfo | None) -> int:
    """Return the index of this process's GPU. With one GPU for several ranks, NCCL hangs or fails unclearly."""
    import torch

    count = torch.cuda.device_count()
    if device is None and info is None:
        return int(torch.cuda.current_device())
    if device is None and info is not None:
        ranks = info.local_world_size if info.local_world_size is not None else (info.local_rank or 0) + 1
        if ranks > count:
            raise TopologyError(
                f"{ranks} processes on this node, but torch sees {count} GPUs ({_visible_devices()}): NCCL needs one "
                "for each. Start one process for each GPU (torchrun --nproc-per-node), let torch see more GPUs, or "
                "pass backend='gloo'. If each process sees only its own GPU, pass device=0."
            )
        device = info.local_rank
    if device is None:
        raise TopologyError("the GPU of this rank is not known: set LOCAL_RANK in each process, or pass device=...")
    if device >= count:
        raise ConfigError(f"device={device}, but torch sees {count} GPUs ({_visible_devices()}): pass a lower index")
    return device


def _visible_devices() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if value is None else f"CUDA_VISIBLE_DEVICES={value!r}"


def _check_master(info: DistributedInfo) -> None:
    """Refuse an address at which rank 0 cannot listen: torch would wait for it until the timeout."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise TopologyError(
            f"{' and '.join(missing)} must be set to where rank 0 listens, which {info.launcher} does not do. Start "
            f"the {info.world_size} processes with torchrun; or set both in each process, to the host of rank 0: "
            "export MASTER_ADDR=HOST MASTER_PORT=29500"
        )
    port = os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TopologyError(f"MASTER_PORT must be a number from 1 to 65535, the same on all ranks, got {port!r}")


def _abandon(dist: Any, group: Any, error: BaseException) -> None:
    """Leave the group while other ranks may be in its collectives: those fail, and the log here says why.

    NCCL's destruction waits for the other ranks. An abort usually does not, and has a deadline.
    https://docs.pytorch.org/docs/stable/distributed.html#shutdown
    """
    if not _is_default_group(dist, group):
        return
    logger.warning(
        "rank %d leaves its process group with %s: collectives of other ranks may fail because of it",
        dist.get_rank(),
        type(error).__name__,
    )
    device = getattr(group, "bound_device_id", None)
    if not run_with_timeout(_ABANDON_S, _leave, dist, device, name="leave-process-group"):
        logger.warning("the process group was not destroyed within %g s: it ends with the process", _ABANDON_S)


def _leave(dist: Any, device: torch.device | None) -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    try:
        if abort is not None and "nccl" in _backend_names(dist.get_backend_config()):
            if device is not None:
                import torch

                torch.cuda.set_device(device)  # each thread has its own current device
            abort()
        else:
            dist.destroy_process_group()
    except Exception:
        logger.warning("the process group could not be destroyed", exc_info=True)


def _is_default_group(dist: Any, group: Any) -> bool:
    """Return whether `group` still is the default group: Accelerate's `end_training`, for example, destroys it."""
    return dist.is_initialized() and dist.group.WORLD is group
