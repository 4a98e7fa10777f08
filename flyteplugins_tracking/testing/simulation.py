"""The test kit: `simulate` calls a tracked function once per rank in this process, and records its runs.

What decides about runs is the library's own code, as in a job: topology, policy and lifecycle. What is outside of the
process has stand-ins: the launcher, the tracker and its service, signals, and other processes.
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
from dataclasses import dataclass, field, replace
from typing import Any

from flyteplugins_tracking._config.propagation import set_variables
from flyteplugins_tracking._flyte import flyte1, flyte2
from flyteplugins_tracking._job.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._job.plan import NodeRequest
from flyteplugins_tracking._job.topology import override_distributed_info
from flyteplugins_tracking._runs.calls import Override, TrackedCall, override, override_here
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._runs.lifecycle import exit_code_of
from flyteplugins_tracking._util.checks import check_flag, check_seconds
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

# The base ids of simulated jobs, and of functions that are called by themselves.
SIMULATED = "simulated"
RECORDED = "recorded"
# More ranks than these are called one after another.
_MOST_THREADS = 64
# What torchrun sets for each process, and what marks the processes of other launchers; those of torchrun's that lead to
# a store are left unset, since nobody listens there.
_OF_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
_OF_WORLD = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_OF_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
_UNSET = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "NODE_RANK"),
    *("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK", "PMI_SIZE"),
    *("SLURM_STEP_ID", "SLURM_PROCID", "KONDUKTOR_JOB_NAME", "SKYPILOT_NODE_RANK", "JOBSET_RESTART_ATTEMPT"),
)
_VARIABLES = (*_OF_RANK, *_OF_WORLD, *_OF_JOB, *_UNSET)


@dataclass(frozen=True)
class RankResult:
    """What came of the function on one rank. It has failed if its `exit_code` is not 0.

    Attributes:
        rank: The rank.
        local_rank: The rank on its worker.
        worker_index: The worker (= node).
        value: What the function has returned; None where it has raised.
        error: What it has raised; None where it has returned.
    """

    rank: int
    local_rank: int
    worker_index: int
    value: Any = None
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """The status with which the rank's process would have ended."""
        return 0 if self.error is None else exit_code_of(self.error)


@dataclass(frozen=True)
class Simulation:
    """What came of a simulated job.

    Attributes:
        attempts: The results of all ranks, for each attempt: the first one, and one for each restart.
        runs: The runs that the job has had.
    """

    attempts: tuple[tuple[RankResult, ...], ...]
    runs: RecordedRuns

    @property
    def ranks(self) -> tuple[RankResult, ...]:
        """The results of all ranks in the last attempt."""
        return self.attempts[-1]

    @property
    def failed(self) -> tuple[RankResult, ...]:
        """Those of them that have raised anything but a `SystemExit` of success."""
        return _failed(self.ranks)

    @property
    def returned(self) -> tuple[Any, ...]:
        """What each rank has returned in the last attempt.

        Raises:
            BaseException: What the first of the ranks that have failed has raised.
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
    """Call a tracked function once per rank in this process, and tell what each rank and each run came to.

    Args:
        function: A function under `@tracking_init`, sync or async, or one that calls such; or a task of Flyte 1 or 2.
        num_workers: How many workers (= nodes) there are: 2, or those that the task asks for.
        nproc_per_node: How many ranks each has, or a sequence with a number for each worker: 4, or what the task asks
            for. A task without Elastic workers is in no distributed job, unless a number is given here.
        args: What the function is called with, on each rank.
        kwargs: What it is called with by name.
        failing: Errors by ranks: each is raised at the end of the rank's function, in the first attempt.
        max_restarts: As torchrun's: while a rank has failed, all are called again, at most so often.
        distributed: False: as `python train.py`, in no distributed job, where `get_distributed_info()` is None.
        threads: Whether each rank has a thread of its own, so that they can wait for each other; None for up to 64
            ranks. Otherwise they are called one after another, each with the variables that torchrun sets.
        timeout_s: Seconds that the ranks' threads may take, in each attempt.

    Returns:
        What each rank has returned or raised. Errors of ranks are not raised here, but by the `returned` of the result.

    Raises:
        ConfigError: An argument that cannot work, or no rank has called a function under `@tracking_init`.
        TimeoutError: Ranks have not ended in time: they wait for each other, perhaps for one that has raised.
    """
    callee = _callee_of(function)
    check_flag("distributed", distributed)
    if callee.is_task and callee.workers is None and num_workers is None is nproc_per_node:
        distributed = False
    sizes = (_sizes if distributed else _single)(num_workers, nproc_per_node, callee)
    _check_whole("max_restarts", max_restarts, least=0)
    if max_restarts and not distributed:
        raise ConfigError(f"max_restarts={max_restarts}: nobody restarts what is in no distributed job")
    _check_call(args, kwargs, threads, timeout_s)
    failures = _checked_failures(failing, sum(sizes))
    in_threads = sum(sizes) <= _MOST_THREADS if threads is None else threads
    job = _Job(functools.partial(callee.function, *args, **(kwargs or {})), sizes, distributed)
    call_all = functools.partial(_in_threads, timeout_s=timeout_s) if in_threads else _one_by_one
    for stores in _shown_to:
        stores.append(job.store)
    with _variables(), override(job.override):  # also for threads that do not inherit the context
        attempts = [call_all(job.ranks(0, max_restarts, failures))]
        job.refuse_what_is_not_tracked(attempts[0])
        while len(attempts) <= max_restarts and _failed(attempts[-1]):
            attempts.append(call_all(job.ranks(len(attempts), max_restarts, {})))
    runs = tuple(job.store.read())
    return Simulation(tuple(attempts), RecordedRuns(lambda: runs))


@contextlib.contextmanager
def recording() -> Iterator[RecordedRuns]:
    """Record what is called in the block instead of sending it: the fixture `recorded_runs`.

    Functions that are called by themselves are in no distributed job. The runs of simulations are among the runs.

    Yields:
        The runs so far, as they are when they are looked at.
    """
    stores, call_counts = [Store()], Counter[str]()
    context = SimulatedContext(base_id=RECORDED, call_counts=call_counts)
    runs = RecordedRuns(lambda: [run for store in list(stores) for run in store.read()])
    _shown_to.append(stores)
    try:
        with _variables(), override(_override(stores[0], lambda: context)):
            yield runs
    finally:
        _shown_to[:] = [other for other in _shown_to if other is not stores]


# The stores of the blocks of `recording` that are open.
_shown_to: list[list[Store]] = []


@dataclass(frozen=True, kw_only=True)
class SimulatedContext(ExecutionContext):
    """The context of a function that is called in a simulation or a recording. No secret is read.

    Attributes:
        rank: The simulated rank; None outside of a simulation.
    """

    is_simulated: bool = True
    rank: _Rank | None = None

    def read_secret(self, secret: Any) -> str | None:  # noqa: ARG002
        return None

    def on_return(self, call: TrackedCall) -> None:
        """Raise the error with which the rank is to fail."""
        if self.rank is not None:
            self.rank.fail(call)


def _override(store: Store, simulated: Callable[[], SimulatedContext]) -> Override:
    """Return the test doubles of a simulation. Of the real context only the success exceptions are used."""

    def context(real: ExecutionContext) -> ExecutionContext:
        return replace(simulated(), success_exceptions=real.success_exceptions)

    return Override(lambda tracker: RecordingTracker(tracker, store), context)


@dataclass(eq=False)
class _Rank:
    """One rank in one attempt: what would be one process."""

    info: DistributedInfo
    call: Callable[[], Any]
    override: Override
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
        with override_here(self.override), override_distributed_info(self.info if self.is_distributed else None):
            try:
                value = self.call()
                self.fail()  # where the function has called no tracked one to its end
            except BaseException as error:
                # What pytest and Ctrl-C raise is for the one who simulates.
                if not isinstance(error, (Exception, SystemExit)) and error is not failure:
                    raise
                return result(error=error)
        return result(value)

    def fail(self, call: TrackedCall | None = None) -> None:
        """Raise what this rank fails with, if it does: not in a function that another one waits for."""
        if self.failure is not None and not _is_inner(call):
            failure, self.failure = self.failure, None
            raise failure


_current: ContextVar[_Rank | None] = ContextVar("flyteplugins_tracking_rank", default=None)


class _Job:
    """A job, and the record of its runs."""

    def __init__(self, call: functools.partial[Any], sizes: Sequence[int], is_distributed: bool) -> None:
        self.store = Store()
        self._function = call
        self._sizes = sizes
        self._is_distributed = is_distributed
        self._has_tracked = False
        self._without_rank = SimulatedContext(base_id=RECORDED, call_counts=Counter())
        self.override = _override(self.store, self._context)

    def ranks(self, attempt: int, max_restarts: int, failures: Mapping[int, BaseException]) -> Iterator[_Rank]:
        """The ranks of an attempt, made one by one."""
        for info in iter_ranks(self._sizes, restart_count=attempt, launcher=SIMULATED, job_id=SIMULATED):
            variables = _torchrun(info, max_restarts) if self._is_distributed else {}
            yield _Rank(info, self._call, self.override, self._is_distributed, variables, failures.get(info.rank))

    def refuse_what_is_not_tracked(self, results: Sequence[RankResult]) -> None:
        """Say so where the simulation has shown nothing, with what the first rank has raised, if it has."""
        if not self._has_tracked:
            name = getattr(self._function.func, "__qualname__", self._function.func)
            raise ConfigError(
                f"{name} has called no tracked function on any rank: put @tracking_init on it"
            ) from results[0].error

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
    """Whether another call with this tracker is around it; those of other trackers may be stacked on it."""
    parent = None if call is None else call.parent
    while parent is not None and call is not None and parent.tracker != call.tracker:
        parent = parent.parent
    return parent is not None


def _one_by_one(ranks: Iterator[_Rank]) -> tuple[RankResult, ...]:
    """Call all in their order: in this thread, or in one of its own where this one's has a loop that runs."""
    if asyncio._get_running_loop() is None:
        return tuple(_with_variables(rank) for rank in ranks)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, _one_by_one, ranks).result()


def _with_variables(rank: _Rank) -> RankResult:
    os.environ.update(rank.variables)
    return rank.run()


def _in_threads(ranks: Iterator[_Rank], timeout_s: float) -> tuple[RankResult, ...]:
    """Call all at once, each in a thread of its own, with this one's context."""
    results: dict[int, RankResult | BaseException] = {}

    def run(rank: _Rank) -> None:
        try:
            results[rank.info.rank] = rank.run()
        except BaseException as error:
            results[rank.info.rank] = error

    started = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank-{rank.info.rank}", daemon=True)
        for rank in ranks
    ]
    until = time.monotonic() + timeout_s
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(max(0.0, until - time.monotonic()))
    late = [str(rank) for rank in range(len(started)) if rank not in results]
    if late:
        raise TimeoutError(
            f"rank {', '.join(late[:8])}{' ...' if late[8:] else ''} of {len(started)} did not end within "
            f"{timeout_s:g} s: do they wait for a rank that has raised?{_first_error(results)}"
        )
    return tuple(_result(results[rank]) for rank in range(len(started)))


def _result(found: RankResult | BaseException) -> RankResult:
    if isinstance(found, BaseException):
        raise found
    return found


def _first_error(results: Mapping[int, RankResult | BaseException]) -> str:
    errors = [(rank, getattr(found, "error", found)) for rank, found in sorted(results.items())]
    return next((f" Rank {rank} has raised {error!r}" for rank, error in errors if error is not None), "")


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    """Without the launcher's variables of this process, if it has one; they come back."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    set_variables(dict.fromkeys(_VARIABLES))
    try:
        yield
    finally:
        set_variables(before)


def _torchrun(info: DistributedInfo, max_restarts: int) -> dict[str, str]:
    """The variables of a worker: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""
    of_rank = (info.rank, info.local_rank, info.worker_index, info.rank)
    of_world = (info.world_size, info.local_world_size, info.num_workers, info.world_size)
    of_job = (SIMULATED, info.restart_count, max_restarts)
    names = (*_OF_RANK, *_OF_WORLD, *_OF_JOB)
    return dict(zip(names, map(str, (*of_rank, *of_world, *of_job)), strict=True))


@dataclass(frozen=True)
class _Callee:
    """What runs in each process of a job.

    Attributes:
        function: The function itself.
        is_task: Whether it is of a task.
        workers: The workers that the task asks for, as far as its configuration is known; None for none of its own.
    """

    function: Callable[..., Any]
    is_task: bool = False
    workers: NodeRequest | None = None


def _callee_of(target: Any) -> _Callee:
    """What the processes of a job call that runs `target`, a function or a task.

    Raises:
        ConfigError: It is neither.
    """
    for sdk in (flyte2, flyte1):
        if sdk.is_entity(target):
            function, workers = sdk.function_of(target)
            return _Callee(function, True, workers)
    if not callable(target) or isinstance(target, type):
        raise ConfigError(f"{target!r} is no function and no Flyte task")
    return _Callee(target)


def _single(num_workers: Any, nproc_per_node: Any, _: _Callee) -> tuple[int, ...]:
    for name, value in (("num_workers", num_workers), ("nproc_per_node", nproc_per_node)):
        if value not in (None, 1):
            raise ConfigError(f"{name}={value!r} and distributed=False contradict each other: leave one out")
    return (1,)


def _sizes(num_workers: Any, nproc_per_node: Any, callee: _Callee) -> tuple[int, ...]:
    """The number of ranks of each worker.

    Raises:
        ConfigError: The numbers are none, or contradict each other.
    """
    if num_workers is not None:
        _check_whole("num_workers", num_workers)
    if isinstance(nproc_per_node, Sequence) and not isinstance(nproc_per_node, str):
        for index, size in enumerate(nproc_per_node):
            _check_whole(f"nproc_per_node[{index}]", size)
        if len(nproc_per_node) != (len(nproc_per_node) or 1 if num_workers is None else num_workers):
            raise ConfigError(
                f"nproc_per_node={nproc_per_node!r} has {len(nproc_per_node)} numbers for {num_workers or 'no'} "
                "workers: give one for each"
            )
        return tuple(nproc_per_node)
    if nproc_per_node is not None:
        _check_whole("nproc_per_node", nproc_per_node)
    asked = callee.workers
    workers, processes = (asked.max_nodes, asked.nproc_per_node) if asked else (1, 1) if callee.is_task else (2, 4)
    return (nproc_per_node or processes,) * (num_workers or workers)


def _check_whole(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} is no whole number of at least {least}")


def _check_call(args: Any, kwargs: Any, threads: Any, timeout_s: Any) -> None:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"args={args!r} is no sequence of arguments: write args=({args!r},)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ConfigError(f"kwargs={kwargs!r} is no mapping of names to arguments")
    if threads is not None:
        check_flag("threads", threads)
    check_seconds("timeout_s", timeout_s)


def _checked_failures(failing: Any, world_size: int) -> Mapping[int, BaseException]:
    """`failing`, if it can work.

    Raises:
        ConfigError: It cannot.
    """
    if failing is None:
        return {}
    if not isinstance(failing, Mapping):
        raise ConfigError(f"failing={failing!r} is no mapping of ranks to errors: write failing={{3: RuntimeError()}}")
    for rank, error in failing.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ConfigError(f"failing has the rank {rank!r}, and there are the ranks 0 to {world_size - 1}")
        if not isinstance(error, BaseException):
            raise ConfigError(f"failing[{rank}]={error!r} is no error: write RuntimeError()")
    return failing
