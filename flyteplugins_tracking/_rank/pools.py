"""Pools of long-lived workers: Ray, Dask, Spark, mpi4py.futures, loky and concurrent.futures start functions.

Such a worker is a launcher of its own, the innermost one. What Slurm, an MPI or a pod have told the process was told to
the pool's daemon: the function is nobody's rank, unless its worker has become one since, as Ray Train's do.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import detect_process_group
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.loaded import loaded

if TYPE_CHECKING:
    from flyteplugins_tracking._rank.ray import Trial


class Pool(NamedTuple):
    """The pool whose worker runs this function.

    Attributes:
        name: "ray", "dask", "spark", "mpi4py.futures", "loky" or "concurrent.futures".
        reason: How it was found, for the doctor.
        daemon: The process that was given the variables of what is around the pool: this one, or one above it.
        is_child: Whether its workers are children of the process that uses the pool.
        trial: The trial of Ray Tune that this worker runs; None for another worker.
    """

    name: str
    reason: str
    daemon: int
    is_child: bool = False
    trial: Trial | None = None

    def has_inherited(self, variables: Mapping[str, str]) -> bool:
        """Return whether these variables describe the pool's daemon: they are as they were at its start."""
        return children.has(self._variables(), variables)

    def _variables(self) -> Mapping[str, str]:
        if self.daemon == os.getpid():
            return children.variables_at_birth()
        return proc.variables_at_start(self.daemon)


# A function of this file on the stack, for each pool. None for all functions of the file.
_ON_STACK: Sequence[tuple[str, str, str | None]] = (
    ("dask", "distributed/worker.py", "apply_function"),
    ("mpi4py.futures", "mpi4py/futures/_core.py", None),
    ("mpi4py.futures", "mpi4py/futures/__main__.py", None),
    ("mpi4py.futures", "mpi4py/futures/server.py", None),
    ("spark", "pyspark/worker.py", None),
    ("loky", "loky/process_executor.py", "_process_worker"),
    ("concurrent.futures", "concurrent/futures/process.py", "_process_worker"),
)
# How a command line begins: the end of its first word, and the words that follow.
_COMMANDS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("ray", ("ray::",)),
    ("ray", ("raylet/raylet",)),
    ("dask", ("dask-worker",)),
    ("dask", ("dask", "worker")),
    ("dask", ("distributed.cli.dask_worker",)),
    ("spark", ("pyspark.daemon",)),
    ("spark", ("pyspark/daemon.py",)),
    ("mpi4py.futures", ("mpi4py.futures",)),
    ("mpi4py.futures", ("mpi4py.futures.server",)),
)
_CHILDREN = ("loky", "concurrent.futures")
# The launchers whose variables a pod or a machine has, and not a process: they never make a pool's worker a rank. RANK
# and WORLD_SIZE alone do not either: helpers leave them behind when their process group ends.
NODES_ONLY = ("lepton", "kubeflow", "konduktor", "skypilot", "env_rank")
_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
# The variables of the last world of this worker that had a process group: helpers leave them behind.
_last_world: dict[str, str | None] = {}


def innermost_pool() -> Pool | None:
    """Return the pool whose worker runs this function; None if a launcher has started it."""
    return next((pool for detector in POOLS for pool in [detector()] if pool is not None), None)


def _on_stack() -> Pool | None:
    """A pool's own function that has called this one."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for name, file, function in _ON_STACK:
            if code.co_filename.endswith(file) and (function is None or code.co_name.startswith(function)):
                reason = f"{code.co_name} of {file} has called this function"
                return Pool(name, reason, os.getpid(), is_child=name in _CHILDREN)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _ray() -> Pool | None:
    """A process of Ray, whose functions may run in threads.

    It overwrites the place of its environment with its title: the raylet, its parent, is asked.
    """
    if "ray" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import ray

    if not ray.is_worker():
        return None
    return Pool("ray", "this process is a worker of Ray", os.getppid(), trial=ray.trial())


def _dask() -> Pool | None:
    """A coroutine that a worker of Dask runs, which is not on the stack.

    https://distributed.dask.org/en/stable/api.html#distributed.get_worker
    """
    distributed = loaded("distributed.worker")
    if distributed is None:
        return None
    try:
        distributed.get_worker()
    except ValueError:
        return None
    return Pool("dask", "distributed.get_worker() has a worker", os.getpid())


def _above() -> Pool | None:
    """A program that a pool's worker has started, or a thread of such a worker."""
    return _pool_above(os.getpid())


@functools.lru_cache(maxsize=1)
def _pool_above(_: int) -> Pool | None:
    for pid in (os.getpid(), *children.ancestors()):
        name = _name_in(proc.command_line(pid))
        if name is not None:
            daemon = pid if name != "ray" else _raylet(pid)
            where = "this process" if pid == os.getpid() else f"process {pid}, which has started this one,"
            return Pool(name, f"{where} is one of {name}, by its command line", daemon)
    return None


def _raylet(pid: int) -> int:
    return proc.parent(pid) if proc.command_line(pid)[0].startswith("ray::") else pid


def _name_in(command: Sequence[str]) -> str | None:
    """Return the pool whose daemon or worker has this command line, also as a script or a module of Python."""
    if os.path.basename(command[0]).startswith("python"):
        command = tuple(itertools.dropwhile(lambda word: word.startswith("-"), command[1:])) or ("",)
    return next((name for name, words in _COMMANDS if _begins_with(command, words)), None)


def _begins_with(command: Sequence[str], words: Sequence[str]) -> bool:
    first = command[0].startswith("ray::") if words[0] == "ray::" else _ends_with(command[0], words[0])
    return first and tuple(command[1 : len(words)]) == tuple(words[1:])


def _ends_with(word: str, end: str) -> bool:
    return word == end or word.endswith(f"/{end}")


# In this order: what has called the function is nearer than what its process is, and that nearer than what has started
# the process.
POOLS: Sequence[Callable[[], Pool | None]] = (_on_stack, _ray, _dask, _above)


def is_inherited(launcher: str) -> bool:
    """Return whether a fork has copied what `launcher` has left in the memory of another process, and no variable."""
    return children.has_inherited_group() if launcher == "process_group" else children.is_forked()


def is_left_over(info: DistributedInfo, env: Mapping[str, str]) -> bool:
    """Return whether a worker's variables are those of a world that it was in before, or contradict its group."""
    global _last_world
    variables = {name: env.get(name) for name in _OF_RANK}
    group = detect_process_group()
    if group is not None:
        _last_world = variables
        return (group.rank, group.world_size) != (info.rank, info.world_size)
    return info.launcher == "env" and variables == _last_world
