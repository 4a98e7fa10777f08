"""`simulate_pool` calls a tracked function once per task on the long-lived workers of a pool, as Ray and Dask do."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._rank.topology import override_distributed_info
from flyteplugins_tracking._runs.calls import Override, override, override_here
from flyteplugins_tracking._runs.lifecycle import exit_code_of
from flyteplugins_tracking._util.checks import check_seconds
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.testing.recorder import RecordedRuns, Store
from flyteplugins_tracking.testing.simulation import (
    SimulatedContext,
    callee_of,
    check_integer,
    open_recordings,
    recording_override,
    without_variables_of_launchers,
)


@dataclass(frozen=True)
class TaskResult:
    """The result of one task. It has failed if its `exit_code` is not 0.

    Attributes:
        task: The task's number, from 0.
        worker: The worker that ran it, from 0.
        value: The return value; None if the function raised.
        error: The exception that it raised; None if it returned.
    """

    task: int
    worker: int
    value: Any = None
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that a process of its own would have."""
        return 0 if self.error is None else exit_code_of(self.error)


@dataclass(frozen=True)
class PoolSimulation:
    """The result of a simulated pool.

    Attributes:
        tasks: The results of all tasks, in their order.
        runs: Their runs.
    """

    tasks: tuple[TaskResult, ...]
    runs: RecordedRuns

    @property
    def returned(self) -> tuple[Any, ...]:
        """The return value of each task.

        Raises:
            BaseException: A task has failed: this is the error of the first such task.
        """
        for result in self.tasks:
            if result.error is not None and result.exit_code != 0:
                raise result.error
        return tuple(result.value for result in self.tasks)


def simulate_pool(
    function: Any, /, tasks: Sequence[Sequence[Any]], *, num_workers: int = 2, timeout_s: float = 60.0
) -> PoolSimulation:
    """Call a tracked function once for each task, on a pool's long-lived workers, and return the results and the runs.

    The workers are threads of this process. As on a pool of Ray, Dask or mpi4py.futures, no task is a rank:
    `get_distributed_info()` is None, and each task has a run of its own, also below Slurm or an MPI. A worker runs one
    task after another: task `n` runs on worker `n % num_workers`.

    Args:
        function: A function under `@tracking_init`, sync or async, or one that calls such a function.
        tasks: The positional arguments of each task, for instance `[(0.1,), (0.2,)]`.
        num_workers: The number of workers.
        timeout_s: Seconds that all tasks together may take.

    Returns:
        The result of each task, and the runs. Errors of tasks are not raised here, but by the result's `returned`.

    Raises:
        ConfigError: An argument is invalid.
        TimeoutError: The tasks did not end in time.
    """
    call = callee_of(function).function
    check_integer("num_workers", num_workers)
    check_seconds("timeout_s", timeout_s)
    _check_tasks(tasks)
    store, tracked = Store(), SimulatedContext()
    doubles = recording_override(store, lambda: tracked)
    for stores in open_recordings:
        stores.append(store)
    with without_variables_of_launchers(), override(doubles):
        results = _run_all(call, tasks, num_workers, doubles, timeout_s)
    runs = tuple(store.read())
    return PoolSimulation(results, RecordedRuns(lambda: runs))


def _run_all(
    call: Callable[..., Any], tasks: Sequence[Sequence[Any]], num_workers: int, doubles: Override, timeout_s: float
) -> tuple[TaskResult, ...]:
    deadline = time.monotonic() + timeout_s
    workers = [ThreadPoolExecutor(1, thread_name_prefix=f"worker-{index}") for index in range(num_workers)]
    pending: list[Future[TaskResult]] = []
    for number, arguments in enumerate(tasks):
        worker = number % num_workers
        pending.append(workers[worker].submit(copy_context().run, _run, call, arguments, number, worker, doubles))
    try:
        return tuple(future.result(max(0.0, deadline - time.monotonic())) for future in pending)
    finally:
        for executor in workers:
            executor.shutdown(wait=False, cancel_futures=True)


def _run(call: Callable[..., Any], arguments: Sequence[Any], task: int, worker: int, doubles: Override) -> TaskResult:
    with override_here(doubles), override_distributed_info(None):
        try:
            outcome = call(*arguments)
            value = asyncio.run(_awaited(outcome)) if inspect.isawaitable(outcome) else outcome
        except (Exception, SystemExit) as error:
            return TaskResult(task, worker, error=error)
    return TaskResult(task, worker, value)


async def _awaited(outcome: Any) -> Any:
    return await outcome


def _check_tasks(tasks: Any) -> None:
    is_sequence = isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes))
    if not is_sequence or not all(isinstance(one, Sequence) and not isinstance(one, (str, bytes)) for one in tasks):
        raise ConfigError(f"tasks must be a sequence with the arguments of each task, like [(1,), (2,)], got {tasks!r}")
