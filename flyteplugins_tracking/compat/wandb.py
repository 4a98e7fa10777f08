"""The public names of flyteplugins-wandb and flytekitplugins-wandb, implemented with this library.

Users of these plugins change the import line: `from flyteplugins_tracking.compat.wandb import wandb_init`. Differences
in behaviour are in docs/guides/migrate.md.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig, tracking_config
from flyteplugins_tracking._rank import topology
from flyteplugins_tracking._rank.plan import RankScope, RunMode
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import Task
from flyteplugins_tracking._sweeps.sweep import get_sweep_id, tracking_sweep, tracking_sweep_config
from flyteplugins_tracking._util.checks import check_flag
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.compat._context import get_wandb_context, get_wandb_run, get_wandb_sweep_context
from flyteplugins_tracking.compat._downloads import (
    download_wandb_run_dir,
    download_wandb_run_logs,
    download_wandb_sweep_dirs,
    download_wandb_sweep_logs,
)
from flyteplugins_tracking.compat._links import Wandb, WandbSweep
from flyteplugins_tracking.decorator import decorator_of, tracked_function
from flyteplugins_tracking.trackers.config import TrackingConfig

__all__ = [
    "RankScope",
    "RunMode",
    "Wandb",
    "WandbSweep",
    "download_wandb_run_dir",
    "download_wandb_run_logs",
    "download_wandb_sweep_dirs",
    "download_wandb_sweep_logs",
    "get_distributed_info",
    "get_wandb_context",
    "get_wandb_run",
    "get_wandb_run_dir",
    "get_wandb_sweep_context",
    "get_wandb_sweep_id",
    "wandb_config",
    "wandb_init",
    "wandb_sweep",
    "wandb_sweep_config",
]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
_API = "https://api.wandb.ai"
_INFO = ("rank", "local_rank", "world_size", "local_world_size", "worker_index", "num_workers")


@overload
def wandb_init(function: F, /) -> F: ...


@overload
def wandb_init(
    *,
    project: str | None = None,
    entity: str | None = None,
    secret: Any = None,
    id: str | None = None,
    host: str | None = None,
    api_host: str | None = None,
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    download_logs: bool | None = None,
    **kwargs: Any,
) -> Callable[[F], F]: ...


def wandb_init(function: Any = None, /, *, secret: Any = None, api_host: str | None = None, **kwargs: Any) -> Any:
    """`tracking_init`, with the arguments of both plugins' `wandb_init`.

    Args:
        function: The function or task, if the decorator is used without arguments.
        project: The run's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        secret: A flytekit `Secret`, or a callable without arguments that returns the API key.
        id: The base of the run ids, as for `tracking_init`.
        host: The address of W&B's pages, and of its server if there is no `api_host`.
        api_host: The address of W&B's server.
        run_mode: As for `tracking_init`; None for the propagated one, or "auto".
        rank_scope: As for `tracking_init`; None for the propagated one, or "global".
        download_logs: As for `tracking_init`; None for the propagated value, or False.
        **kwargs: The other arguments of `tracking_init` and `wandb.init`. `dir` may be the name of a parameter of the
            function: then that parameter's value is the directory. A `FlyteDirectory` is downloaded.

    Raises:
        ConfigError: As `tracking_init`.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    if secret is not None:
        options["secret"] = _ClusterSecret(secret) if callable(secret) else secret
    if api_host is not None and api_host.rstrip("/") != _API:
        options["settings"] = _with_server(options.get("settings"), api_host)
    directory = options.get("dir")
    wrap = _wrap if isinstance(directory, str) and directory.isidentifier() else tracked_function
    decorate = decorator_of(TrackingConfig.from_arguments(options), wrap)
    return decorate if function is None else decorate(function)


def wandb_config(
    project: str | None = None,
    entity: str | None = None,
    host: str | None = None,
    id: str | None = None,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    mode: str | None = None,
    group: str | None = None,
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    download_logs: bool | None = None,
    **kwargs: Any,
) -> PropagatedConfig:
    """`tracking_config`, with the arguments of flyteplugins-wandb's `wandb_config`.

    Returns:
        A mapping for `flyte.with_runcontext(custom_context=...)`, and a context manager.

    Raises:
        ConfigError: As `tracking_config`.
    """
    arguments = {**locals()}
    arguments |= arguments.pop("kwargs")
    return tracking_config(**{name: value for name, value in arguments.items() if value is not None})


@overload
def wandb_sweep(function: F, /) -> F: ...


@overload
def wandb_sweep(
    *, project: str | None = None, entity: str | None = None, download_logs: bool | None = None, **kwargs: Any
) -> Callable[[F], F]: ...


def wandb_sweep(function: Any = None, /, *, download_logs: bool | None = None, **kwargs: Any) -> Any:
    """`tracking_sweep` with the additional argument `download_logs`.

    Args:
        function: The function or task, if the decorator is used without arguments.
        download_logs: Whether to call `download_wandb_sweep_logs` after the task has returned; None for the value of
            `wandb_sweep_config`.
        **kwargs: The arguments of `tracking_sweep`.

    Raises:
        ConfigError: As `tracking_sweep`.
    """
    if download_logs is not None:
        check_flag("download_logs", download_logs)
    sweep, wrap = tracking_sweep(**kwargs), functools.partial(_downloading, download_logs)

    def decorate(target: Any) -> Any:
        return sweep(flyte_context.adapt(target, wrap, flyte_context.Decorator("wandb_sweep")))

    return decorate if function is None else decorate(function)


def wandb_sweep_config(
    method: str | None = None,
    metric: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    project: str | None = None,
    entity: str | None = None,
    prior_runs: Sequence[str] | None = None,
    name: str | None = None,
    download_logs: bool = False,
    **kwargs: Any,
) -> PropagatedConfig:
    """`tracking_sweep_config`, with the arguments of flyteplugins-wandb's `wandb_sweep_config`.

    Returns:
        A mapping for `flyte.with_runcontext(custom_context=...)`, and a context manager.

    Raises:
        ConfigError: As `tracking_sweep_config`.
    """
    arguments = {**locals()}
    arguments |= arguments.pop("kwargs")
    check_flag("download_logs", arguments.pop("download_logs"))
    propagated = tracking_sweep_config(**arguments)
    configuration = propagation.parse(propagated[propagation.SWEEP], propagation.SWEEP)
    if download_logs:
        configuration["download_logs"] = True
    return PropagatedConfig(propagation.SWEEP, configuration, "wandb_sweep_config")


def get_wandb_sweep_id() -> str | None:
    """Return the id of the sweep of the `wandb_sweep` task that runs here or calls this task; None without one."""
    return get_sweep_id()


def get_wandb_run_dir() -> str | None:
    """Return the local directory of the run of `get_wandb_run`; None without a run."""
    run = get_wandb_run()
    return None if run is None else str(run.dir)


def get_distributed_info() -> dict[str, Any] | None:
    """Return this rank's place in its job; None for a job of one process.

    Returns:
        A dict with `rank`, `local_rank`, `world_size`, `local_world_size`, `worker_index` and `num_workers`. Values
        that the launcher does not set are None.

    Raises:
        TopologyError: The launcher's variables contradict each other.
    """
    info = topology.get_distributed_info()
    return None if info is None or info.world_size == 1 else {name: info[name] for name in _INFO}


def _downloading(download_logs: bool | None, function: Callable[..., Any], _: Task | None) -> Callable[..., Any]:
    """Wrap the function: download its sweep after it has returned, if it has one and `download_logs` is set."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def then_download_async(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            await _download_sweep(download_logs)
            return result

        return then_download_async

    @functools.wraps(function)
    def then_download(*args: Any, **kwargs: Any) -> Any:
        import asyncio

        result = function(*args, **kwargs)
        # In a thread, since a notebook's thread already has a running loop.
        run_with_timeout(None, asyncio.run, _download_sweep(download_logs))
        return result

    return then_download


async def _download_sweep(download_logs: bool | None) -> None:
    """Download the sweep if that is wanted, with a warning if it fails: the task must not fail because of it."""
    context, sweep_id = get_wandb_sweep_context(), get_sweep_id()
    if download_logs is None:
        download_logs = context is not None and context.download_logs
    if sweep_id is None or not download_logs:
        return
    try:
        await download_wandb_sweep_logs(sweep_id)
    except Exception:
        text = "download_logs=True: sweep %s could not be downloaded, and is not an output of the task"
        logger.warning(text, sweep_id, exc_info=True)


@dataclass(frozen=True)
class _ClusterSecret:
    """Return the key. Outside a pod return None if it cannot be read: W&B uses its own credentials there."""

    read: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            return self.read()
        except Exception:
            if "FLYTE_INTERNAL_EXECUTION_ID" in os.environ:
                raise
            return None


def _with_server(settings: Any, address: str) -> Any:
    """Return the user's `settings`, with the address of the server if they have none."""
    if settings is None or isinstance(settings, Mapping):
        return {"base_url": address, **(settings or {})}
    if "base_url" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"base_url": address})


def _wrap(config: TrackingConfig, function: Callable[..., Any], task: Task | None) -> Callable[..., Any]:
    """Return the tracked function. If `dir` is the name of a parameter, each call has its own directory."""
    if config.options["dir"] not in inspect.signature(function).parameters:
        return tracked_function(config, function, task)

    def tracked_for_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        options = {**config.options, "dir": bound.arguments[config.options["dir"]]}
        return tracked_function(replace(config, options=options), function, task)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def tracked_async(*args: Any, **kwargs: Any) -> Any:
            return await tracked_for_call(args, kwargs)(*args, **kwargs)

        return tracked_async

    @functools.wraps(function)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        return tracked_for_call(args, kwargs)(*args, **kwargs)

    return tracked
