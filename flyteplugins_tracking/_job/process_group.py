"""torch's default process group for the length of a `with`. What cannot work is refused before anything can hang."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
from collections.abc import Iterator
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

# How many seconds it may take to destroy the group after an error: NCCL may wait for the other ranks then.
_ABANDON_S = 10.0
# The name of the threads that run gloo's collectives, and how many seconds they may go on when the process ends.
_GLOO_THREAD, _GLOO_S = "pt_gloo_runloop", 1.0
# By master address and port: the store there, and the numbers of the groups that use it.
_stores: dict[tuple[str, str], tuple[Any, Iterator[int]]] = {}
# The group that was left last. A DistributedDataParallel model often outlives its group, and its destructor holds the
# GIL: if the group ended there too, torch would wait for a thread of the group's, which may wait for the GIL. So torch
# hung in about 1 of 3 short gloo jobs of 4 ranks. Here the group ends with the next one or with the process.
# https://github.com/pytorch/pytorch/issues/56297
_left: list[Any] = []


@contextmanager
def process_group(backend: str | None = None, *, timeout_s: float | None = None) -> Iterator[torch.device]:
    """Provide torch's default process group for the length of a `with`.

    An existing group is joined, and left as it is at the end. Otherwise a group of all ranks of
    `get_distributed_info()` is created, which meet at MASTER_ADDR and MASTER_PORT ("env://"); outside a distributed job
    it is a group of one. It is destroyed at the end. After an exception other ranks may be in a collective that this
    one never joins, so the group is left within 10 s then, and ends with the process.

    Args:
        backend: As in `torch.distributed.init_process_group`. None for NCCL if CUDA is available, else gloo.
        timeout_s: Seconds that the ranks wait for each other, at first and in a collective. None for torch's default:
            600 with NCCL, else 1800. An existing group keeps its own timeout.

    Yields:
        This rank's `torch.device`: with NCCL the GPU of its local rank, which becomes the current one; else the CPU.

    Raises:
        ConfigError: torch is missing, or `timeout_s` is invalid.
        TopologyError: The processes cannot meet, or do not have a GPU each. It is raised before anything waits for
            another rank.

    Example:
        ```python
        with process_group() as device:
            model = DistributedDataParallel(Model().to(device))
        ```
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise ConfigError("process_group() needs torch: pip install 'flyteplugins-tracking[torch]'") from None
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    info = get_distributed_info()
    if dist.is_initialized():
        yield _device(torch, dist.get_backend_config(), info)
        return
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(torch, backend, info)
    _create(dist, backend, None if timeout_s is None else timedelta(seconds=timeout_s), info)
    group = dist.group.WORLD
    if not _left:
        atexit.register(_let_go)
    _left[:] = [group]
    try:
        yield device
    except BaseException:
        # Its destructor waits for collectives too. A list would not keep it, since that ends before the threads do.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        run_with_timeout(_ABANDON_S, _destroy, dist, group, name="leave-process-group")
        raise
    _destroy(dist, group)


def _create(dist: Any, backend: str, timeout: timedelta | None, info: DistributedInfo | None) -> None:
    if info is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:  # torch would raise too, but without the way out
        raise TopologyError(
            f"{' and '.join(missing)} must be set to where rank 0 listens, which {info.launcher} does not do. Start "
            f"the {info.world_size} processes with torchrun; or set both in each process, to the host of rank 0: "
            "export MASTER_ADDR=HOST MASTER_PORT=29500"
        )
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if place not in _stores:
        from torch.distributed.rendezvous import rendezvous

        # torch reads no variables of Slurm and MPI: the rank is passed, which takes precedence over RANK.
        waits = {} if timeout is None else {"timeout": timeout}
        _stores[place] = next(rendezvous("env://", info.rank, info.world_size, **waits))[0], itertools.count()
    # torch's own "env://" has the same keys for each group: in a second one, ranks would find the first's addresses.
    # And if rank 0's process hosts the store, that would end with the first group while others connect for the second.
    store, numbers = _stores[place]
    # torchrun's store keeps the addresses of the processes before a restart. Nodes may count restarts differently.
    attempt = info.restart_count if info.num_workers == 1 else 0
    group_store = dist.PrefixStore(f"process_group/{attempt}/{next(numbers)}", store)
    dist.init_process_group(backend, store=group_store, rank=info.rank, world_size=info.world_size, timeout=timeout)


def _device(torch: Any, backend: str, info: DistributedInfo | None) -> torch.device:
    """Return this rank's device. With one GPU for several ranks, NCCL hangs or fails unclearly."""
    if "nccl" not in backend:
        return torch.device("cpu")
    index, count = torch.cuda.current_device() if info is None else info.local_rank or 0, torch.cuda.device_count()
    if index >= count:
        raise TopologyError(
            f"this is local rank {index}, but torch sees {count} GPUs: NCCL needs one for each process. Start one "
            "process for each GPU (torchrun --nproc-per-node), or pass backend='gloo'. If each process sees only its "
            "own GPU, call torch.distributed.init_process_group() instead"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _destroy(dist: Any, group: Any) -> None:
    """Destroy the group, unless it is not the default one any more: Accelerate's `end_training` destroys it."""
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _let_go() -> None:
    """Release the group, and wait for gloo's threads, before Python ends.

    A thread may still have a collective's tensors after the collective has ended. It needs the GIL to release them, and
    torch aborts the process (SIGABRT) if Python has begun to end: https://github.com/pytorch/pytorch/pull/179291
    Releasing the group ends the threads, unless something else has it: `torch.distributed.nn.functional`, which
    DistributedDataParallel imports, keeps the group in which it is imported for ever.
    """
    _left.clear()
    wait_until_asleep(_GLOO_THREAD, _GLOO_S)
