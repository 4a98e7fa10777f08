"""The test kit: `simulate` calls a tracked function once per rank in this process, and records its runs.

The library's own code decides about runs, as in a job: topology, plan and lifecycle. Its world has nothing that is
outside the process: no launcher, no service, no signals, and no other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.launchers import LAUNCHERS
from flyteplugins_tracking._rank.plan import NodeRequest
from flyteplugins_tracking._rank.topology import override_distributed_info
from flyteplugins_tracking._runs.calls import current
from flyteplugins_tracking._runs.context import Asked, ExecutionContext, World, override
from flyteplugins_tracking._runs.exit_codes import exit_code_of
from flyteplugins_tracking._util.checks import check_flag
from flyteplugins_tracking._util.proc import variables
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.testing.openings import recorded_openings
from flyteplugins_tracking.testing.recorder import RecordedRuns, RecordingTracker, Store

T = TypeVar("T")

# The base ids of simulated jobs, and of functions that are called outside a simulation.
_SIMULATED = "simulated"
_RECORDED = "recorded"
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
        ranks: The results of all ranks.
        runs: The runs of the job.
    """

    ranks: tuple[RankResult, ...]
    runs: RecordedRuns

    @property
    def failed(self) -> tuple[RankResult, ...]:
        """The results of the ranks that raised anything but a successful `SystemExit`."""
        return tuple(result for result in self.ranks if result.exit_code != 0)

    @property
    def returned(self) -> tuple[Any, ...]:
        """The return value of each rank.

        Raises:
            BaseException: A rank has failed: this is the error of the first such rank.
        """
        for result in self.failed:
            if result.error is not None:
                raise result.error
        return tuple(result.value for result in self.ranks)


# What to use instead of the arguments of an earlier release.
_REMOVED = {
    "failing": "raise the error in the function, if get_distributed_info().rank is that rank",
    "max_restarts": "test one attempt at a time; override_distributed_info sets the restart_count of one rank",
    "threads": "the ranks are called one after another, each with the variables that torchrun sets",
    "timeout_s": "the ranks do not wait for each other; your test runner has a time limit for a test",
}


def simulate(
    function: Any,
    /,
    num_workers: int | None = None,
    nproc_per_node: int | Sequence[int] | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    distributed: bool = True,
    **removed: NoReturn,
) -> Simulation:
    """Call a tracked function once per rank in this process, and return the results and the runs.

    The ranks are called one after another, each with the variables that torchrun sets.

    Args:
        function: A function under `@tracking_init`, sync or async, or one that calls such a function; or a task of
            Flyte 1 or 2.
        num_workers: The number of workers (= nodes). By default 2, or the number that the task requests.
        nproc_per_node: The number of ranks on each worker, or a sequence with a number for each worker. By default 4,
            or the number that the task requests. A task without Elastic workers is not distributed, unless this or
            `num_workers` is set.
        args: The positional arguments of the function, on each rank.
        kwargs: The keyword arguments of the function.
        distributed: If False, the function is called once, as by `python train.py`, and `get_distributed_info()` is
            None.
        **removed: Arguments of an earlier release. The error says what to use instead.

    Returns:
        The result of each rank, and the runs. Errors of ranks are not raised here, but by the result's `returned`.

    Raises:
        ConfigError: An argument is invalid, or no rank has called a function under `@tracking_init`.
    """
    for name in removed:
        raise ConfigError(f"simulate() has no argument {name!r}: {_REMOVED.get(name, 'leave it out')}")
    function, requested = _function_of(function)
    check_flag("distributed", distributed)
    if requested is None and num_workers is None is nproc_per_node:
        distributed = False
    requested = requested if requested is not None and distributed else NodeRequest(1, 1, 1)
    sizes = _sizes(num_workers, nproc_per_node, requested, distributed)
    world = _SimulatedWorld()
    for stores in _recordings:
        stores.append(world.store)
    infos = iter_ranks(sizes, launcher=_SIMULATED, job_id=_SIMULATED)
    with recorded_openings(), _without_variables_of_launchers(), override(world):
        call = functools.partial(function, *args, **(kwargs or {}))
        ranks = _without_loop(lambda: tuple(world.run(call, info, distributed) for info in infos))
    if not world.has_tracked:
        name = getattr(function, "__qualname__", function)
        text = f"{name} called no tracked function on any rank: put @tracking_init on it"
        raise ConfigError(text) from ranks[0].error
    runs = tuple(world.store.read())
    return Simulation(ranks, RecordedRuns(lambda: runs))


@contextlib.contextmanager
def recording() -> Iterator[RecordedRuns]:
    """Record the runs of the block instead of sending them. The fixture `recorded_runs` does this for a test.

    Functions that are called outside `simulate` are not distributed. The runs of simulations are recorded too.

    Yields:
        The runs so far; each use of the sequence reads the current ones.
    """
    world = _SimulatedWorld()
    stores = [world.store]
    _recordings.append(stores)
    try:
        with recorded_openings(), _without_variables_of_launchers(), override(world):
            yield RecordedRuns(lambda: [run for store in list(stores) for run in store.read()])
    finally:
        _recordings[:] = [other for other in _recordings if other is not stores]


# The stores of each open block of `recording`: its own, and those of the simulations in it.
_recordings: list[list[Store]] = []


class _SimulatedWorld(World):
    """The world of functions in a simulation or a recording, with their runs.

    Attributes:
        has_tracked: Whether a tracked function was called.
        own_context: The execution context of the rank that is simulated, or of a recording. It reads no secret.
    """

    is_real = False

    def __init__(self) -> None:
        self.store = Store()
        self.has_tracked = False
        self.own_context = ExecutionContext(base_id=_RECORDED, call_counts=Counter())

    def adapted(self, asked: Asked) -> Asked:
        self.has_tracked = True
        return replace(
            asked,
            config=replace(asked.config, run_file=None, hang_timeout_s=None, pulse_s=None),
            tracker=RecordingTracker(asked.tracker, self.store),
            context=replace(self.own_context, success_exceptions=asked.context.success_exceptions),
        )

    def run(self, call: Callable[[], Any], info: DistributedInfo, is_distributed: bool) -> RankResult:
        """Call a function as one rank, which would be a process of its own in a job."""
        self.own_context = ExecutionContext(base_id=_SIMULATED, call_counts=Counter())
        if is_distributed:
            os.environ.update(_torchruns_variables(info))
        result = functools.partial(RankResult, info.rank, info.local_rank or 0, info.worker_index or 0)
        try:
            return result(copy_context().run(_called, call, info if is_distributed else None))
        except (Exception, SystemExit) as error:  # exceptions of pytest and Ctrl-C are for the caller of `simulate`
            return result(error=error)


def _called(call: Callable[[], Any], info: DistributedInfo | None) -> Any:
    current.set(None)  # it joins no function around the simulation
    with override_distributed_info(info):
        value = call()
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(outcome: Any) -> Any:
    return await outcome


def _torchruns_variables(info: DistributedInfo) -> dict[str, str]:
    """https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""
    values = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), info.rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), info.world_size),
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "GROUP_RANK": info.worker_index,
        "GROUP_WORLD_SIZE": info.num_workers,
        "TORCHELASTIC_RUN_ID": _SIMULATED,
        "TORCHELASTIC_RESTART_COUNT": info.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in values.items()}


def _without_loop(function: Callable[[], T]) -> T:
    """Call it in this thread; or in a new one, if this thread has a running event loop."""
    if asyncio._get_running_loop() is None:
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, function).result()


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


def _check_integer(name: str, value: Any) -> None:
    """Check that `value` is an integer of at least 1.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
