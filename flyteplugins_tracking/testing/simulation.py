"""The test kit: `simulate` calls a tracked function once per rank in this process, and records its runs.

The library's own code decides about runs, as in a job: topology, plan and lifecycle. Test doubles replace everything
outside the process: the launcher, the tracker and its service, signals, and other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from flyteplugins_tracking._flyte import flyte1, flyte2
from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.launchers import LAUNCHERS
from flyteplugins_tracking._rank.plan import NodeRequest
from flyteplugins_tracking._rank.topology import override_distributed_info
from flyteplugins_tracking._runs.call import Call as TrackedCall
from flyteplugins_tracking._runs.call import Doubles, exit_code_of, override, override_here
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._runs.propagation import set_variables
from flyteplugins_tracking._util.checks import check_flag, check_seconds
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.testing.recorder import Call, RecordedRun, RecordedRuns, RecordingTracker, Row, Store

__all__ = [
    "Call",
    "RankResult",
    "RecordedRun",
    "RecordedRuns",
    "RecordingTracker",
    "Row",
    "Simulation",
    "recording",
    "simulate",
]

# The base ids of simulated jobs, and of functions that are called outside a simulation.
SIMULATED = "simulated"
RECORDED = "recorded"
# More ranks than this are called one after another.
_MAX_THREADS = 64
# The variables that torchrun sets for each process, and others that are unset beside the markers of all launchers. The
# address of a store stays unset, since there is no store.
_OF_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
_OF_WORLD = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_OF_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
_UNSET = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "NODE_RANK"),
    *("PMI_SIZE", "PET_NODE_RANK", "PET_NNODES", "JOBSET_RESTART_ATTEMPT"),
)


@dataclass(frozen=True)
class RankResult:
    """The result of the function on one rank. The rank has failed if its `exit_code` is not 0.

    Attributes:
        rank: The rank.
        local_rank: The rank on its worker.
        worker_index: The worker (= node).
        value: The return value; None if the function raised.
        error: The exception that it raised; None if it returned.
    """

    rank: int
    local_rank: int
    worker_index: int
    value: Any = None
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that the rank's process would have."""
        return 0 if self.error is None else exit_code_of(self.error)


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated job.

    Attributes:
        attempts: The results of all ranks, for each attempt: the first one, and one for each restart.
        runs: The runs of the job.
    """

    attempts: tuple[tuple[RankResult, ...], ...]
    runs: RecordedRuns

    @property
    def ranks(self) -> tuple[RankResult, ...]:
        """The results of all ranks in the last attempt."""
        return self.attempts[-1]

    @property
    def failed(self) -> tuple[RankResult, ...]:
        """The results of the ranks that raised anything but a successful `SystemExit`, in the last attempt."""
        return _failed(self.ranks)

    @property
    def returned(self) -> tuple[Any, ...]:
        """The return value of each rank in the last attempt.

        Raises:
            BaseException: A rank has failed: this is the error of the first such rank.
        """
        for result in self.failed:
            if result.error is not None:
                raise result.error
        return tuple(result.value for result in self.ranks)


def _failed(results: Sequence[RankResult]) -> tuple[RankResult, ...]:
    return tuple(result for result in results if result.exit_code != 0)


def simulate(
    function: Any,
    /,
    num_workers: int | None = None,
    nproc_per_node: int | Sequence[int] | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    failing: Mapping[int, BaseException] | None = None,
    max_restarts: int = 0,
    distributed: bool = True,
    threads: bool | None = None,
    timeout_s: float = 60.0,
) -> Simulation:
    """Call a tracked function once per rank in this process, and return the results and the runs.

    Args:
        function: A function under `@tracking_init`, sync or async, or one that calls such a function; or a task of
            Flyte 1 or 2.
        num_workers: The number of workers (= nodes). By default 2, or the number that the task requests.
        nproc_per_node: The number of ranks on each worker, or a sequence with a number for each worker. By default 4,
            or the number that the task requests. A task without Elastic workers is not distributed, unless this or
            `num_workers` is set.
        args: The positional arguments of the function, on each rank.
        kwargs: The keyword arguments of the function.
        failing: Errors by rank: each is raised at the end of that rank's function, in the first attempt.
        max_restarts: As for torchrun: while a rank fails, all ranks are called again, at most this many times.
        distributed: If False, the function is called once, as by `python train.py`, and `get_distributed_info()` is
            None.
        threads: Whether each rank has its own thread, so that ranks can wait for each other; None for up to 64 ranks.
            Otherwise they are called one after another, each with the variables that torchrun sets.
        timeout_s: Seconds that the ranks' threads may take, in each attempt.

    Returns:
        The result of each rank, and the runs. Errors of ranks are not raised here, but by the result's `returned`.

    Raises:
        ConfigError: An argument is invalid, or no rank has called a function under `@tracking_init`.
        TimeoutError: Ranks did not end in time: they may wait for each other, or for a rank that has raised.
    """
    callee = callee_of(function)
    check_flag("distributed", distributed)
    if callee.is_task and callee.workers is None and num_workers is None is nproc_per_node:
        distributed = False
    sizes = (_sizes if distributed else _single)(num_workers, nproc_per_node, callee)
    check_integer("max_restarts", max_restarts, minimum=0)
    if max_restarts and not distributed:
        raise ConfigError(f"max_restarts={max_restarts} needs a distributed job: leave it out, or distributed=False")
    _check_call(args, kwargs, threads, timeout_s)
    failures = _checked_failures(failing, sum(sizes))
    in_threads = sum(sizes) <= _MAX_THREADS if threads is None else threads
    job = _Job(functools.partial(callee.function, *args, **(kwargs or {})), sizes, distributed)
    call_all = functools.partial(_in_threads, timeout_s=timeout_s) if in_threads else _one_by_one
    for stores in open_recordings:
        stores.append(job.store)
    with without_variables_of_launchers(), override(job.doubles):  # also for threads that do not inherit the context
        attempts = [call_all(job.ranks(0, max_restarts, failures))]
        job.refuse_untracked(attempts[0])
        while len(attempts) <= max_restarts and _failed(attempts[-1]):
            attempts.append(call_all(job.ranks(len(attempts), max_restarts, {})))
    runs = tuple(job.store.read())
    return Simulation(tuple(attempts), RecordedRuns(lambda: runs))


@contextlib.contextmanager
def recording() -> Iterator[RecordedRuns]:
    """Record the runs of the block instead of sending them. The fixture `recorded_runs` does this for a test.

    Functions that are called outside `simulate` are not distributed. The runs of simulations are recorded too.

    Yields:
        The runs so far; each use of the sequence reads the current ones.
    """
    stores, call_counts = [Store()], Counter[str]()
    context = SimulatedContext(base_id=RECORDED, call_counts=call_counts)
    runs = RecordedRuns(lambda: [run for store in list(stores) for run in store.read()])
    open_recordings.append(stores)
    try:
        with without_variables_of_launchers(), override(recording_override(stores[0], lambda: context)):
            yield runs
    finally:
        open_recordings[:] = [other for other in open_recordings if other is not stores]


# The stores of each open block of `recording`.
open_recordings: list[list[Store]] = []


class SimulatedContext(ExecutionContext):
    """The execution context of functions in a simulation or a recording. It reads no secret.

    Attributes:
        rank: The simulated rank; None outside a simulation.
    """

    is_simulated: bool = True
    rank: _Rank | None = None

    def read_secret(self, secret: Any) -> str | None:  # noqa: ARG002
        return None

    def on_return(self, call: TrackedCall) -> None:
        """Raise the error of a rank that shall fail."""
        if self.rank is not None:
            self.rank.fail(call)


def recording_override(store: Store, simulated: Callable[[], SimulatedContext]) -> Doubles:
    """Return the test doubles of a simulation. They use only the success exceptions of the real context."""

    def context(real: ExecutionContext) -> ExecutionContext:
        return replace(simulated(), success_exceptions=real.success_exceptions)

    return Doubles(lambda tracker: RecordingTracker(tracker, store), context)


@dataclass(eq=False)
class _Rank:
    """One rank in one attempt, which would be one process in a job."""

    info: DistributedInfo
    call: Callable[[], Any]
    doubles: Doubles
    is_distributed: bool
    variables: Mapping[str, str]
    failure: BaseException | None = None
    call_counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> RankResult:
        """Call the function as this rank, in a context of its own."""
        return copy_context().run(self._run)

    def _run(self) -> RankResult:
        result = functools.partial(RankResult, self.info.rank, self.info.local_rank or 0, self.info.worker_index or 0)
        failure = self.failure
        _current.set(self)
        with override_here(self.doubles), override_distributed_info(self.info if self.is_distributed else None):
            try:
                value = self.call()
                self.fail()  # if no tracked call has ended in the function
            except BaseException as error:
                # Exceptions of pytest and Ctrl-C are for the caller of `simulate`.
                if not isinstance(error, (Exception, SystemExit)) and error is not failure:
                    raise
                return result(error=error)
        return result(value)

    def fail(self, call: TrackedCall | None = None) -> None:
        """Raise this rank's error, if it has one and `call` is the outermost call of its tracker."""
        if self.failure is not None and not _is_inner(call):
            failure, self.failure = self.failure, None
            raise failure


_current: ContextVar[_Rank | None] = ContextVar("flyteplugins_tracking_rank", default=None)


class _Job:
    """A simulated job and its runs."""

    def __init__(self, call: functools.partial[Any], sizes: Sequence[int], is_distributed: bool) -> None:
        self.store = Store()
        self._function = call
        self._sizes = sizes
        self._is_distributed = is_distributed
        self._has_tracked = False
        self._without_rank = SimulatedContext(base_id=RECORDED, call_counts=Counter())
        self.doubles = recording_override(self.store, self._context)

    def ranks(self, attempt: int, max_restarts: int, failures: Mapping[int, BaseException]) -> Iterator[_Rank]:
        """Yield the ranks of an attempt."""
        for info in iter_ranks(self._sizes, restart_count=attempt, launcher=SIMULATED, job_id=SIMULATED):
            variables = _torchrun(info, max_restarts) if self._is_distributed else {}
            yield _Rank(info, self._call, self.doubles, self._is_distributed, variables, failures.get(info.rank))

    def refuse_untracked(self, results: Sequence[RankResult]) -> None:
        """Raise a `ConfigError` if no rank has called a tracked function. The first rank's error is its cause."""
        if not self._has_tracked:
            name = getattr(self._function.func, "__qualname__", self._function.func)
            raise ConfigError(f"{name} called no tracked function on any rank: put @tracking_init on it") from results[
                0
            ].error

    def _call(self) -> Any:
        outcome = self._function()
        return asyncio.run(_awaited(outcome)) if inspect.isawaitable(outcome) else outcome

    def _context(self) -> SimulatedContext:
        self._has_tracked = True
        rank = _current.get()
        if rank is None:  # in a thread that does not inherit the context
            return self._without_rank
        return SimulatedContext(base_id=SIMULATED, call_counts=rank.call_counts, rank=rank)


async def _awaited(outcome: Any) -> Any:
    return await outcome


def _is_inner(call: TrackedCall | None) -> bool:
    """Return whether the call is inside another call with the same tracker."""
    parent = None if call is None else call.parent
    while parent is not None and call is not None and parent.tracker.name != call.tracker.name:
        parent = parent.parent
    return parent is not None


def _one_by_one(ranks: Iterator[_Rank]) -> tuple[RankResult, ...]:
    """Call the ranks in order: in this thread, or in a new one if this thread has a running event loop."""
    if asyncio._get_running_loop() is None:
        results = []
        for rank in ranks:
            os.environ.update(rank.variables)
            results.append(rank.run())
        return tuple(results)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, _one_by_one, ranks).result()


def _in_threads(ranks: Iterator[_Rank], timeout_s: float) -> tuple[RankResult, ...]:
    """Call all ranks at once, each in its own thread, with a copy of this thread's context."""
    results: dict[int, RankResult | BaseException] = {}

    def run(rank: _Rank) -> None:
        try:
            results[rank.info.rank] = rank.run()
        except BaseException as error:
            results[rank.info.rank] = error

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank-{rank.info.rank}", daemon=True)
        for rank in ranks
    ]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [str(rank) for rank in range(len(threads)) if rank not in results]
    if late:
        raise TimeoutError(
            f"rank {', '.join(late[:8])}{' ...' if late[8:] else ''} of {len(threads)} did not end within "
            f"{timeout_s:g} s: they may wait for a rank that has raised.{_first_error(results)}"
        )
    return tuple(_result_or_raise(results[rank]) for rank in range(len(threads)))


def _result_or_raise(result: RankResult | BaseException) -> RankResult:
    if isinstance(result, BaseException):
        raise result
    return result


def _first_error(results: Mapping[int, RankResult | BaseException]) -> str:
    errors = [(rank, getattr(result, "error", result)) for rank, result in sorted(results.items())]
    return next((f" Rank {rank} raised {error!r}" for rank, error in errors if error is not None), "")


@contextlib.contextmanager
def without_variables_of_launchers() -> Iterator[None]:
    """Unset the variables of this process's launcher, and restore them at the end."""
    markers = (name for launcher in LAUNCHERS.values() for name in (launcher.rank, *launcher.markers))
    names = (*_OF_RANK, *_OF_WORLD, *_OF_JOB, *_UNSET, *markers)
    before = {name: os.environ.get(name) for name in names}
    set_variables(dict.fromkeys(names))
    try:
        yield
    finally:
        set_variables(before)


def _torchrun(info: DistributedInfo, max_restarts: int) -> dict[str, str]:
    """Return the variables of a rank: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""
    of_rank = (info.rank, info.local_rank, info.worker_index, info.rank)
    of_world = (info.world_size, info.local_world_size, info.num_workers, info.world_size)
    of_job = (SIMULATED, info.restart_count, max_restarts)
    names = (*_OF_RANK, *_OF_WORLD, *_OF_JOB)
    return dict(zip(names, map(str, (*of_rank, *of_world, *of_job)), strict=True))


@dataclass(frozen=True)
class _Callee:
    """The function that each process of a job calls.

    Attributes:
        function: The function itself.
        is_task: Whether it is the function of a Flyte task.
        workers: The workers that the task requests, if its configuration is known; None if it has none of its own.
    """

    function: Callable[..., Any]
    is_task: bool = False
    workers: NodeRequest | None = None


def callee_of(target: Any) -> _Callee:
    """Return the function that the processes of a job with `target` call.

    Raises:
        ConfigError: The target is neither a function nor a Flyte task.
    """
    for sdk in (flyte2, flyte1):
        if sdk.is_entity(target):
            function, workers = sdk.function_of(target)
            return _Callee(function, True, workers)
    if not callable(target) or isinstance(target, type):
        raise ConfigError(f"simulate() needs a function or a Flyte task, got {target!r}")
    return _Callee(target)


def _single(num_workers: Any, nproc_per_node: Any, _: _Callee) -> tuple[int, ...]:
    for name, value in (("num_workers", num_workers), ("nproc_per_node", nproc_per_node)):
        if value not in (None, 1):
            raise ConfigError(f"{name}={value!r} and distributed=False contradict each other: leave one out")
    return (1,)


def _sizes(num_workers: Any, nproc_per_node: Any, callee: _Callee) -> tuple[int, ...]:
    """Return the number of ranks of each worker.

    Raises:
        ConfigError: The numbers are invalid or contradict each other.
    """
    if num_workers is not None:
        check_integer("num_workers", num_workers)
    if isinstance(nproc_per_node, Sequence) and not isinstance(nproc_per_node, str):
        for index, size in enumerate(nproc_per_node):
            check_integer(f"nproc_per_node[{index}]", size)
        if len(nproc_per_node) != (len(nproc_per_node) or 1 if num_workers is None else num_workers):
            raise ConfigError(
                f"nproc_per_node={nproc_per_node!r} has {len(nproc_per_node)} numbers for {num_workers or 'no'} "
                "workers: pass one for each"
            )
        return tuple(nproc_per_node)
    if nproc_per_node is not None:
        check_integer("nproc_per_node", nproc_per_node)
    request = callee.workers or (NodeRequest(1, 1, 1) if callee.is_task else NodeRequest(2, 2, 4))
    return (nproc_per_node or request.nproc_per_node,) * (num_workers or request.max_nodes)


def check_integer(name: str, value: Any, minimum: int = 1) -> None:
    """Check that `value` is an integer of at least `minimum`.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def _check_call(args: Any, kwargs: Any, threads: Any, timeout_s: Any) -> None:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"args must be a sequence of arguments such as ({args!r},), got {args!r}")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ConfigError(f"kwargs must be a mapping of names to arguments, got {kwargs!r}")
    if threads is not None:
        check_flag("threads", threads)
    check_seconds("timeout_s", timeout_s)


def _checked_failures(failing: Any, world_size: int) -> Mapping[int, BaseException]:
    """Return `failing`, or an empty mapping for None.

    Raises:
        ConfigError: It is not a mapping of ranks of this job to exceptions.
    """
    if failing is None:
        return {}
    if not isinstance(failing, Mapping):
        raise ConfigError(f"failing must be a mapping such as {{3: RuntimeError()}}, got {failing!r}")
    for rank, error in failing.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ConfigError(f"failing has the rank {rank!r}, but the ranks are 0 to {world_size - 1}")
        if not isinstance(error, BaseException):
            raise ConfigError(f"failing[{rank}] must be an exception such as RuntimeError(), got {error!r}")
    return failing
