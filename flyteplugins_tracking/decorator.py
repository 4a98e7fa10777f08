"""`tracking_init` gives a training function its tracking run, and `tracking_run` gives one to a block."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, NoReturn, TypeVar, overload

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte.target import Decorator
from flyteplugins_tracking._rank.plan import PrimaryRank, RankScope, RunMode
from flyteplugins_tracking._runs.call import Call
from flyteplugins_tracking._runs.calls import here
from flyteplugins_tracking._runs.context import Asked, Task, worlds
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.config import IfUnavailable, TrackingConfig
from flyteplugins_tracking.trackers.registry import check_config, find_tracker, propagated_to

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
# How long a signal waits for the run of a block that is being opened or closed.
_PATIENCE_S = 5.0
# `CO_GENERATOR` and `CO_ASYNC_GENERATOR` of `inspect`, which a rank without a run does not load.
_GENERATOR = 0x20 | 0x200


@overload
def tracking_init(function: F, /) -> F: ...


# The arguments here and in the docstring are those of `TrackingConfig`: `make includes` writes both.
@overload
def tracking_init(
    *,
    tracker: str | Tracker = "wandb",
    run_mode: RunMode = "auto",
    rank_scope: RankScope = "global",
    primary_rank: PrimaryRank = 0,
    id: str | None = None,
    run_file: str | None = None,
    roles: Sequence[str] | None = None,
    role: str | None = None,
    project: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: Sequence[str] | Mapping[str, Any] | None = None,
    notes: str | None = None,
    config: Any = None,
    secret: Any = None,
    if_unavailable: IfUnavailable = "degrade",
    init_timeout_s: float = 30.0,
    kill_after_s: float = 30.0,
    hang_timeout_s: float | None = None,
    pulse_s: float | None = None,
    stop_before_s: float | None = None,
    rank_prefix: bool = False,
    step_metric: str = "global_step",
    download_logs: bool = False,
    **options: Any,
) -> Callable[[F], F]: ...


def tracking_init(function: Any = None, /, **options: Any) -> Any:
    """Open a tracking run for a function, on the right ranks, and close it with the function's true exit code.

    It works on a plain function, sync or async, under any launcher or none; on a Flyte 1 task, above or below `@task`;
    and above `@env.task` of Flyte 2. In the function, `get_run()` returns the tracker's own run object on the ranks
    that have a run, and None on the others. The run ends when the function ends, with its true status.

    Args:
        function: The function or task, if the decorator is used without arguments.
        tracker: The tracker's name: "wandb", "pluto", "mlflow", "trackio", or one of the entry point group
            `flyteplugins_tracking.trackers`; or a `flyteplugins_tracking.trackers.Tracker`.
        run_mode: Which ranks have a run. "auto": one run, on the primary rank, which is rank 0 unless `primary_rank`
            names another one. "new": a run for every rank. "shared": one run that all ranks log to; the primary rank
            ends it.
        rank_scope: Whether `run_mode` holds once for the job ("global") or once for each worker ("worker"), which is a
            node.
        primary_rank: The primary rank, or with rank_scope="worker" the primary local rank of each node. Negative
            numbers count from the end: -1 is the last one, on which Megatron-LM logs. Or a callable of
            `DistributedInfo` that returns the same int on every rank. No effect with "new".
        id: The base of the run ids: the same on every rank, and another for each job, unless they share a run with
            `roles`. By default the ranks agree on one.
        run_file: A file in which the job keeps its run's id, for instance beside its checkpoints: a later job that
            finds it goes on in the run. A function that returns by itself has finished the training: the next job has a
            new run. After a stop by `should_stop()`, the next job goes on in this one. Only the first primary rank
            needs to see the file. Not together with `id` and `role`.
        roles: The roles of other jobs that join the run of this one, which owns and ends it: each calls a function with
            `role=` and the same `id`. One that is not listed may join too. Only with W&B.
        role: The role under which this job joins the run of a job with `roles=`. The keys of this job begin with
            `{role}/`, it counts its own steps, and its end does not end the run. It waits up to `init_timeout_s` for
            the run, and never creates it. Only with W&B, and with run_mode="auto".
        project: The runs' project; None for the tracker's default.
        group: The runs' group, instead of the one that `run_mode` and `rank_scope` give.
        name: The run's name. As with `tags`, `notes` and `config`, only that of the primary rank counts.
        tags: The run's tags. A mapping gives tags such as "team=vision", from which MLflow gets the key and the value.
        notes: The run's notes.
        config: The run's config: a mapping, a dataclass, a namespace, or anything like these, such as a Hydra config;
            or, for W&B, the path of a file. Values that JSON cannot hold are shown as text.
        secret: A flytekit `Secret`, or a callable without arguments that returns the API key. Read on the ranks that
            open a run.
        if_unavailable: What happens if the service is away at the start: no network, no answer in time, HTTP 402 (a
            full quota), 408, 425, 429 or 5xx. "degrade": the run is logged to local files, which the next attempt
            sends, or `flyteplugins-tracking send`. "raise": a `TrackerUnavailableError`. A missing key, a refusal and a
            role that finds no run are errors in both cases.
        init_timeout_s: Seconds that opening the run may take. Before that, the ranks agree on the run's id, which may
            take 30 s more.
        kill_after_s: How long your launcher waits between SIGTERM and SIGKILL, in seconds: 30 by default, as torchrun,
            Slurm and Kubernetes. A loop that calls `should_stop()` and the run's end have 5 s less than that, or half
            of it if it is below 10 s. An end without a SIGTERM lasts as long as the service takes data.
        hang_timeout_s: If neither a row nor a `heartbeat()` comes for this many seconds, the library writes where each
            rank is to the run and to the log of the rank with the run. Each rank writes its stacks to its own log.
            Nothing is ended. None for never.
        pulse_s: Seconds between two measurements of which rank is slow and of how busy each node is. The next row of
            the primary rank has them: as `ranks/*` and, with the extra `pulse`, as `nodes/*`. It uses no collective.
            None for never.
        stop_before_s: Seconds before the time limit at which `should_stop()` returns True. The limit is that of a Slurm
            job (SLURM_JOB_END_TIME), or the `timeout=` of a Flyte task below this decorator. None for never.
        rank_prefix: In a shared run, put `rank_{rank}/` before the keys that a rank logs.
        step_metric: The column for the `step=` of `log`, where the service cannot take it as its own step: in a shared
            run, and after a job has gone back to its checkpoint.
        download_logs: Make the run's local files an output of the Flyte task, if the task has no Elastic.
        **options: The tracker's own arguments: for W&B those of `wandb.init`, and `host=`, the address of a server.

    Raises:
        ConfigError: At decoration: an argument is invalid, or the object cannot be tracked.
        TopologyError: At the call: the launcher's variables are incomplete or contradict each other, or the job has no
            rank `primary_rank`.
        IdentityError: At the call: the ranks cannot agree on a run id.
        TrackerUnavailableError: At the call: the service cannot be reached, or has no valid API key.
        TrackerNotInstalledError: At the call: the tracker's package is missing.
    """
    decorate = decorator_of(TrackingConfig.from_arguments(options), tracked_function)
    return decorate if function is None else decorate(function)


def decorator_of(
    config: TrackingConfig, wrap: Callable[[TrackingConfig, Any, Task | None], Any]
) -> Callable[[Any], Any]:
    """Return a decorator of functions and tasks, which calls `wrap` with `config` and the function.

    Raises:
        ConfigError: The config is invalid.
    """
    check_config(config)

    def decorate(target: Any) -> Any:
        decorator = Decorator("tracking_init", config)
        return flyte_context.adapt(target, functools.partial(wrap, config), decorator)

    return decorate


def tracked_function(
    config: TrackingConfig,
    function: Callable[..., Any],
    task: Task | None,
    config_of: Callable[[tuple[Any, ...], dict[str, Any]], TrackingConfig] | None = None,
) -> Callable[..., Any]:
    """Return a real function, so that it pickles, binds and is inspected like the one that it wraps.

    `config_of` returns the config of one call from its arguments; None if all calls have the same `config`.
    """
    config_of = config_of or (lambda *_: config)
    if flyte_context.is_async(function):

        @functools.wraps(function)
        async def tracked_async(*args: Any, **kwargs: Any) -> Any:
            with _call_of(config_of(args, kwargs), task) as call:
                result = await function(*args, **kwargs)
            published = call.publish_files(is_async=True)
            if published is not None:
                await published
            return result

        return tracked_async

    @functools.wraps(function)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        with _call_of(config_of(args, kwargs), task) as call:
            result = function(*args, **kwargs)
            _refuse_body_to_come(function, result)
        call.publish_files()
        return result

    return tracked


class tracking_run:  # noqa: N801 it is used as a function, like `tracking_init`
    """Give the block of a `with` its run, on the ranks that should have one: what `tracking_init` does for a function.

    `with tracking_run(...) as run:` gives the tracker's own run object, or None on a rank without a run. The run ends
    with the block, and with its status: 0, 1 for an exception, the code of a SystemExit, 143 after a SIGTERM. Decorated
    functions that the block calls, and blocks in it, join the run. `async with` does the same.

    An object stands for one block: make another one for the next block. Not for Flyte tasks, which take the decorator.

    Args:
        **arguments: Those of `tracking_init`.

    Raises:
        ConfigError: An argument is invalid; or the block is entered again, in a Flyte task, or by a child process of
            multiprocessing that imports the script.
        TrackingError: As `tracking_init`, when the block is entered.
    """

    _opens_later = False  # True for the command `run`: see `Call`

    def __init__(self, **arguments: Any) -> None:
        self._config = TrackingConfig.from_arguments(arguments)
        check_config(self._config)
        self._was_entered = False

    @critical_section(_PATIENCE_S)
    def __enter__(self) -> Any:
        self._call = _call_of(self._config, None)
        self._call.opens_later = self._opens_later
        self._check()
        self._was_entered = True
        self._call.__enter__()
        return None if self._call.run is None else self._call.run.handle.run

    @critical_section(_PATIENCE_S)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is GeneratorExit and traceback is not None and traceback.tb_frame.f_code.co_flags & _GENERATOR:
            text = "%s: the generator with this block was closed before its end, so its run fails: use it in a `with`"
            logger.warning(text, self._call.asked.tracker.name)
        self._call.__exit__(kind, error, traceback)

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, *_: object) -> NoReturn:
        """Refuse to be a decorator."""
        raise ConfigError("tracking_run(...) is for `with`: put @tracking_init(...) on a function")

    def _check(self) -> None:
        if self._was_entered:
            raise ConfigError("this tracking_run(...) has had its block: make another one for the next block")
        is_task = self._call.asked.context.can_publish_files  # and not only a script with flytekit
        if is_task and here() is None:
            raise ConfigError("tracking_run(...) is not for Flyte tasks: put @tracking_init(...) on the task")
        process = sys.modules.get("multiprocessing.process")
        if process is not None and getattr(process.current_process(), "_inheriting", False):
            raise ConfigError(
                "multiprocessing imports the script again in a child process, which would open a run too: put the "
                "block below `if __name__ == '__main__':`"
            )


def _refuse_body_to_come(function: Callable[..., Any], result: Any) -> None:
    """Refuse what a function returns instead of running: its body would run after the end of the run.

    Raises:
        ConfigError: `result` is a coroutine, a generator or a generator's context manager that has not started.
    """
    if isinstance(result, (contextlib.AbstractContextManager, contextlib.AbstractAsyncContextManager)):
        result = getattr(result, "gen", None)
    if not isinstance(result, (CoroutineType, GeneratorType, AsyncGeneratorType)):
        return
    if isinstance(result, GeneratorType):
        import inspect

        if inspect.getgeneratorstate(result) != inspect.GEN_CREATED:
            return
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    name = getattr(function, "__qualname__", repr(function))
    raise ConfigError(
        f"{name} returned a {type(result).__name__.replace('_', ' ')} that has not started: its body would run after "
        "the end of the run. Decorate the async function itself, or the function that consumes the generator."
    )


def _call_of(config: TrackingConfig, task: Task | None) -> Call:
    """Return one call, with the propagated arguments for those that the decorator does not set."""
    context = flyte_context.current_context()
    config = propagated_to(config, context.propagated)
    world = worlds[-1]
    return Call(world.adapted(Asked(config, find_tracker(config.tracker), context, task or Task(), world)))
