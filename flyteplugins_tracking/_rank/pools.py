"""Pools of long-lived workers: Ray, Dask, Spark, mpi4py.futures, loky and concurrent.futures start functions.

Such a pool is the innermost launcher. The variables of Slurm, MPI or a pod describe the pool's daemon, so a function in
a worker is not a rank, unless the worker has become one since, as Ray Train's workers do.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import loaded
from flyteplugins_tracking._util.record import Record

if TYPE_CHECKING:
    from types import FrameType

    from flyteplugins_tracking._rank.engines import Trial


class Pool(Record):
    """The pool whose worker runs this function.

    Attributes:
        name: "ray", "dask", "spark", "mpi4py.futures", "loky" or "concurrent.futures".
        reason: How it was found, for the check of a job.
        daemon: The process that the launcher around the pool has started: this one, or one above it.
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
        own = self.daemon == os.getpid()
        return children.has(children.variables_at_birth() if own else proc.variables_at_start(self.daemon), variables)


class _KnownPool(Record):
    """How the workers of a pool are recognised: by any of these.

    Attributes:
        functions: The functions of the pool that call a task: the end of the file's path, and how the function's name
            begins; "" for all functions of the file.
        commands: How the command lines of its daemons and workers begin: the end of the first word, and the words that
            follow.
        detect: Returns the pool if this process is its worker: for a task that no such function has called.
    """

    functions: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = ()
    detect: Callable[[], Pool | None] = lambda: None


def _ray() -> Pool | None:
    """A process of Ray, whose functions may run in threads.

    It overwrites the place of its environment with its title: the raylet, its parent, is asked.
    """
    if "ray" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import engines

    if not engines.is_ray_worker():
        return None
    return Pool("ray", "this process is a worker of Ray", os.getppid(), trial=engines.ray_trial())


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


POOLS: Mapping[str, _KnownPool] = {
    "ray": _KnownPool(commands=("raylet/raylet",), detect=_ray),
    "dask": _KnownPool(
        functions=(("distributed/worker.py", "apply_function"),),
        commands=("dask-worker", "dask worker", "distributed.cli.dask_worker"),
        detect=_dask,
    ),
    "mpi4py.futures": _KnownPool(
        functions=(
            ("mpi4py/futures/_core.py", ""),
            ("mpi4py/futures/__main__.py", ""),
            ("mpi4py/futures/server.py", ""),
        ),
        commands=("mpi4py.futures", "mpi4py.futures.server"),
    ),
    "spark": _KnownPool(functions=(("pyspark/worker.py", ""),), commands=("pyspark.daemon", "pyspark/daemon.py")),
    "loky": _KnownPool(functions=(("loky/process_executor.py", "_process_worker"),)),
    "concurrent.futures": _KnownPool(functions=(("concurrent/futures/process.py", "_process_worker"),)),
}
_FILES = tuple(file for known in POOLS.values() for file, _ in known.functions)


def innermost_pool() -> Pool | None:
    """Return the pool whose worker runs this function; None if a launcher has started it.

    What has called the function is nearer than what its process is, and that nearer than what has started the process.
    """
    detected = (known.detect() for known in POOLS.values())  # only if no pool is on the stack
    return _on_stack() or next(filter(None, detected), None) or _pool_above(os.getpid())


def _on_stack() -> Pool | None:
    """Return the pool one of whose own functions has called this one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_FILES):
            for name, known in POOLS.items():
                for file, function in known.functions:
                    if code.co_filename.endswith(file) and code.co_name.startswith(function):
                        reason = f"{code.co_name} of {file} has called this function"
                        # Without a daemon, the process that uses the pool has started its workers.
                        return Pool(name, reason, os.getpid(), is_child=not known.commands)
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=1)
def _pool_above(_: int) -> Pool | None:
    """Return the pool whose process this one is, as a thread of a worker, or whose worker has started this program."""
    for pid in proc.lineage():
        command = proc.command_line(pid)
        name = _name_in(command)
        if name is not None:
            daemon = proc.parent(pid) if command[0].startswith("ray::") else pid
            where = "this process" if pid == os.getpid() else f"process {pid}, which has started this one,"
            return Pool(name, f"{where} is one of {name}, by its command line", daemon)
    return None


def _name_in(command: Sequence[str]) -> str | None:
    """Return the pool whose daemon or worker has this command line, even as a script or a module of Python."""
    if os.path.basename(command[0]).startswith("python"):
        command = tuple(itertools.dropwhile(lambda word: word.startswith("-"), command[1:])) or ("",)
    if command[0].startswith("ray::"):  # "ray::" and the function's name
        return "ray"
    for name, known in POOLS.items():
        for first, *words in map(str.split, known.commands):
            if f"/{command[0]}".endswith(f"/{first}") and [*command[1 : 1 + len(words)]] == words:
                return name
    return None


def is_inherited(launcher: str) -> bool:
    """Return whether a fork has copied what `launcher` has left in the memory of another process, and no variable."""
    return children.has_inherited_group() if launcher == "process_group" else children.is_forked()


_counts_of_groups: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_counts_of_jobs: dict[str, Counter[str]] = {}


def counts_of_world(info: DistributedInfo | None, pool: Pool | None) -> Counter[str] | None:
    """Return how many tracked calls this process has begun in its world, by tracker; None for the process's counts.

    All ranks must have the same number. A launcher's ranks live as long as their job: each counts its own calls. A
    long-lived worker has served other jobs before, with other ranks: there each world has counts of its own.
    """
    if pool is not None and pool.trial is not None:
        return _counts_of_jobs.setdefault(pool.trial.name, Counter())
    if info is None:
        return None
    if info.launcher == "ray" and info.job_id:
        return _counts_of_jobs.setdefault(info.job_id, Counter())
    # Ranks of these launchers may be workers of a pool that is not known here. Those of all others end with their job.
    may_live_on = pool is not None or info.launcher in ("env", "process_group")
    group = children.default_group() if may_live_on else None
    return None if group is None else _counts_of_groups.setdefault(group, Counter())
