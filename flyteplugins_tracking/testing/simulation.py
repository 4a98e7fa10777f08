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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.launchers import LAUNCHERS
from flyteplugins_tracking._rank.plan import NodeRequest
from flyteplugins_tracking._rank.topology import override_distributed_info
from flyteplugins_tracking._runs.call import Call, Doubles, exit_code_of, override, override_here
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._util.checks import check_flag
from flyteplugins_tracking._util.proc import variables
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.testing.openings import recorded_openings
from flyteplugins_tracking.testing.recorder import RecordedRuns, RecordingTracker, Store

# The base ids of simulated jobs, and of functions that are called outside a simulation.
_SIMULATED = "simulated"
_RECORDED = "recorded"
# More ranks than this are called one after another.
_MAX_THREADS = 64
# The variables that are unset beside those that the entries of launchers name. There is no store, so it has no address.
_UNSET = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_MAX_RESTARTS", "ROLE_RANK", "ROLE_WORLD_SIZE", "PET_NNODES"),
)


@dataclass(frozen=True)
class RankResult:
    """The result of the function on one rank. The rank has failed if its `exit_code` is not 0.

    Attributes:
        rank: The rank.
        local_rank: The rank on its node.
        worker_index: The node.
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
    function, requested = _function_of(function)
    check_flag("distributed", distributed)
    if requested is None and num_workers is None is nproc_per_node:
        distributed = False
    requested = requested if requested is not None and distributed else NodeRequest(1, 1, 1)
    sizes = _sizes(num_workers, nproc_per_node, requested, distributed)
    _check_integer("max_restarts", max_restarts, minimum=0)
    if max_restarts and not distributed:
        raise ConfigError(f"max_restarts={max_restarts} needs a distributed job: leave it out, or distributed=False")
    failures = dict(failing or {})
    for rank in failures:
        if rank not in range(sum(sizes)):
            raise ConfigError(f"failing has the rank {rank!r}, but the ranks are 0 to {sum(sizes) - 1}")
    in_threads = sum(sizes) <= _MAX_THREADS if threads is None else threads
    process = _Process()
    attempts: list[tuple[RankResult, ...]] = []
    for stores in _recordings:
        stores.append(process.store)
    with (
        recorded_openings(),
        _without_variables_of_launchers(),
        override(process.doubles),
    ):  # in threads without the context, too
        while not attempts or (len(attempts) <= max_restarts and _failed(attempts[-1])):
            infos = iter_ranks(sizes, restart_count=len(attempts), launcher=_SIMULATED, job_id=_SIMULATED)
            call = functools.partial(function, *args, **(kwargs or {}))
            ranks = (
                _Rank(process, call, info, distributed, None if attempts else failures.get(info.rank)) for info in infos
            )
            attempts.append(_in_threads(ranks, timeout_s) if in_threads else _one_by_one(ranks, max_restarts))
            if not process.has_tracked:
                name = getattr(function, "__qualname__", function)
                text = f"{name} called no tracked function on any rank: put @tracking_init on it"
                raise ConfigError(text) from attempts[0][0].error
    runs = tuple(process.store.read())
    return Simulation(tuple(attempts), RecordedRuns(lambda: runs))


@contextlib.contextmanager
def recording() -> Iterator[RecordedRuns]:
    """Record the runs of the block instead of sending them. The fixture `recorded_runs` does this for a test.

    Functions that are called outside `simulate` are not distributed. The runs of simulations are recorded too.

    Yields:
        The runs so far; each use of the sequence reads the current ones.
    """
    process = _Process()
    stores = [process.store]
    _recordings.append(stores)
    try:
        with recorded_openings(), _without_variables_of_launchers(), override(process.doubles):
            yield RecordedRuns(lambda: [run for store in list(stores) for run in store.read()])
    finally:
        _recordings[:] = [other for other in _recordings if other is not stores]


# The stores of each open block of `recording`: its own, and those of the simulations in it.
_recordings: list[list[Store]] = []


class _SimulatedContext(ExecutionContext):
    """The execution context of functions in a simulation or a recording. It reads no secret.

    Attributes:
        failures: The error that the rank shall raise once; empty for none.
    """

    is_simulated: bool = True
    failures: Iterator[BaseException] = iter(())

    def on_return(self, call: Call) -> None:
        """Raise the error of a rank that shall fail, in the outermost call of its tracker."""
        parent = call.parent
        while parent is not None and parent.tracker.name != call.tracker.name:
            parent = parent.parent
        if parent is None:
            self.fail()

    def fail(self) -> None:
        """Raise the rank's error, once."""
        for failure in self.failures:
            raise failure


# The context of the simulated rank that this thread or task is; None in a thread that does not inherit it.
_current: ContextVar[_SimulatedContext | None] = ContextVar("flyteplugins_tracking_rank", default=None)


class _Process:
    """The process in which functions are simulated or recorded: its runs, and the test doubles of its calls.

    Attributes:
        has_tracked: Whether a tracked function was called.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.has_tracked = False
        self.doubles = Doubles(lambda tracker: RecordingTracker(tracker, self.store), self._context)
        self._without_rank = _SimulatedContext(base_id=_RECORDED, call_counts=Counter())

    def _context(self, real: ExecutionContext) -> ExecutionContext:
        """Return the context of a call. It has only the success exceptions of the real one."""
        self.has_tracked = True
        return replace(_current.get() or self._without_rank, success_exceptions=real.success_exceptions)


class _Rank(NamedTuple):
    """One rank in one attempt, which would be one process in a job."""

    process: _Process
    call: Callable[[], Any]
    info: DistributedInfo
    is_distributed: bool
    failure: BaseException | None

    def run(self) -> RankResult:
        """Call the function as this rank, in a context of its own."""
        return copy_context().run(self._run)

    def _run(self) -> RankResult:
        info, failure = self.info, self.failure
        result = functools.partial(RankResult, info.rank, info.local_rank or 0, info.worker_index or 0)
        failures = iter([] if failure is None else [failure])
        context = _SimulatedContext(base_id=_SIMULATED, call_counts=Counter(), failures=failures)
        _current.set(context)
        with override_here(self.process.doubles), override_distributed_info(info if self.is_distributed else None):
            try:
                value = self.call()
                if inspect.isawaitable(value):
                    value = asyncio.run(_awaited(value))
                context.fail()  # if no tracked call has ended in the function
            except BaseException as error:
                # Exceptions of pytest and Ctrl-C are for the caller of `simulate`.
                if not isinstance(error, (Exception, SystemExit)) and error is not failure:
                    raise
                return result(error=error)
        return result(value)

    def variables(self, max_restarts: int) -> dict[str, str]:
        """Return torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""
        info = self.info
        values = {
            **dict.fromkeys(("RANK", "ROLE_RANK"), info.rank),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), info.world_size),
            "LOCAL_RANK": info.local_rank,
            "LOCAL_WORLD_SIZE": info.local_world_size,
            "GROUP_RANK": info.worker_index,
            "GROUP_WORLD_SIZE": info.num_workers,
            "TORCHELASTIC_RUN_ID": _SIMULATED,
            "TORCHELASTIC_RESTART_COUNT": info.restart_count,
            "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        }
        return {name: str(value) for name, value in values.items()} if self.is_distributed else {}


async def _awaited(outcome: Any) -> Any:
    return await outcome


def _one_by_one(ranks: Iterator[_Rank], max_restarts: int) -> tuple[RankResult, ...]:
    """Call the ranks in order: in this thread, or in a new one if this thread has a running event loop."""
    if asyncio._get_running_loop() is not None:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, _one_by_one, ranks, max_restarts).result()
    results = []
    for rank in ranks:
        os.environ.update(rank.variables(max_restarts))
        results.append(rank.run())
    return tuple(results)


def _in_threads(ranks: Iterator[_Rank], timeout_s: float) -> tuple[RankResult, ...]:
    """Call all ranks at the same time, each in its own thread, with a copy of this thread's context."""
    futures: list[Future[RankResult]] = []
    for rank in ranks:
        futures.append(Future())
        name, target = f"rank-{rank.info.rank}", copy_context().run
        threading.Thread(target=target, args=(_fulfil, futures[-1], rank), name=name, daemon=True).start()
    done, late = wait(futures, timeout_s)
    results = [future.result() for future in futures if future in done]  # raises what is no rank's error
    if not late:
        return tuple(results)
    names = [str(number) for number, future in enumerate(futures) if future in late]
    errors = [f" Rank {result.rank} raised {result.error!r}" for result in results if result.error]
    raise TimeoutError(
        f"rank {', '.join(names[:8])}{' ...' if names[8:] else ''} of {len(futures)} did not end within "
        f"{timeout_s:g} s: they may wait for a rank that has raised.{''.join(errors[:1])}"
    )


def _fulfil(future: Future[RankResult], rank: _Rank) -> None:
    try:
        future.set_result(rank.run())
    except BaseException as error:
        future.set_exception(error)


def _without_variables_of_launchers() -> contextlib.AbstractContextManager[None]:
    """Unset the variables of this process's launcher, and restore them at the end."""
    names = {*_UNSET, *(name for launcher in LAUNCHERS.values() for name in launcher.variables)}
    return variables(dict.fromkeys(names))


def _function_of(target: Any) -> tuple[Callable[..., Any], NodeRequest | None]:
    """Return the function that the processes of a job with `target` call, and how many of them there are by default.

    Raises:
        ConfigError: The target is neither a function nor a Flyte task.
    """
    for sdk in flyte_context.loaded_sdks():
        if sdk.is_entity(target):
            function, workers = sdk.function_of(target, "it is not a Python task with a function to call")
            return function, workers
    if not callable(target) or isinstance(target, type):
        raise ConfigError(f"simulate() needs a function or a Flyte task, got {target!r}")
    return target, NodeRequest(2, 2, 4)


def _sizes(num_workers: Any, nproc_per_node: Any, requested: NodeRequest, distributed: bool) -> Sequence[int]:
    """Return the number of ranks of each worker.

    Args:
        num_workers: The user's number.
        nproc_per_node: The user's number or numbers.
        requested: The numbers by default.
        distributed: The user's flag.

    Raises:
        ConfigError: The numbers are invalid or contradict each other.
    """
    is_list = isinstance(nproc_per_node, Sequence) and not isinstance(nproc_per_node, str)
    listed = {f"nproc_per_node[{index}]": size for index, size in enumerate(nproc_per_node if is_list else ())}
    numbers = {"num_workers": num_workers, **(listed if is_list else {"nproc_per_node": nproc_per_node})}
    for name, value in numbers.items():
        if value is not None or name in listed:
            _check_integer(name, value)
        if not distributed and value not in (None, 1):
            raise ConfigError(f"{name}={value!r} and distributed=False contradict each other: leave one out")
    if not is_list:
        return (nproc_per_node or requested.nproc_per_node,) * (num_workers or requested.max_nodes)
    if len(nproc_per_node) != (len(nproc_per_node) or 1 if num_workers is None else num_workers):
        raise ConfigError(
            f"nproc_per_node={nproc_per_node!r} has {len(nproc_per_node)} numbers for {num_workers or 'no'} "
            "workers: pass one for each"
        )
    return tuple(nproc_per_node)


def _check_integer(name: str, value: Any, minimum: int = 1) -> None:
    """Check that `value` is an integer of at least `minimum`.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
