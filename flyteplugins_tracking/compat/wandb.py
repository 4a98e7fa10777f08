"""The public names of flyteplugins-wandb and flytekitplugins-wandb, on top of this library's own.

Who used one of them changes the import line: `from flyteplugins_tracking.compat.wandb import wandb_init`. What behaves
differently is in docs/migration.md.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig, tracking_config
from flyteplugins_tracking._job import topology
from flyteplugins_tracking._job.plan import RankScope, RunMode
from flyteplugins_tracking._runs.calls import Task
from flyteplugins_tracking._sweeps.sweep import get_sweep_id, tracking_sweep, tracking_sweep_config
from flyteplugins_tracking._util.checks import check_flag
from flyteplugins_tracking._util.timeout import run_with_timeout
from flyteplugins_tracking.compat._context import get_wandb_context, get_wandb_run, get_wandb_sweep_context
from flyteplugins_tracking.compat._downloads import (
    download_wandb_run_dir,
    download_wandb_run_logs,
    download_wandb_sweep_dirs,
    download_wandb_sweep_logs,
)
from flyteplugins_tracking.compat._links import Wandb, WandbSweep
from flyteplugins_tracking.decorator import decorator_of, tracked_function

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
        function: The function or task, where the decorator is used without arguments.
        project: The run's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        secret: A flytekit `Secret`, or a callable without arguments that returns the API key.
        id: See `tracking_init`.
        host: The address of W&B's pages, and of its server where `api_host` names no other.
        api_host: The address of W&B's server.
        run_mode: See `tracking_init`; None for the propagated one, or "auto".
        rank_scope: See `tracking_init`; None for the propagated one, or "global".
        download_logs: See `tracking_init`; None for what is propagated, or False.
        **kwargs: What else `tracking_init` and `wandb.init` take. `dir` may name a parameter of the function: then it
            is that parameter's value, which is downloaded where it is a `FlyteDirectory`.

    Raises:
        ConfigError: As `tracking_init`.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    if secret is not None:
        options["secret"] = _ClusterSecret(secret) if callable(secret) else secret
    if api_host is not None and api_host.rstrip("/") != _API:
        options["settings"] = _with_server(options.get("settings"), api_host)
    wrap = _wrap if _is_name(options.get("dir")) else tracked_function
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
    given = {
        "project": project,
        "entity": entity,
        "host": host,
        "id": id,
        "name": name,
        "tags": tags,
        "config": config,
        "mode": mode,
        "group": group,
        "run_mode": run_mode,
        "rank_scope": rank_scope,
        "download_logs": download_logs,
        **kwargs,
    }
    return tracking_config(**{name: value for name, value in given.items() if value is not None})


@overload
def wandb_sweep(function: F, /) -> F: ...


@overload
def wandb_sweep(
    *, project: str | None = None, entity: str | None = None, download_logs: bool | None = None, **kwargs: Any
) -> Callable[[F], F]: ...


def wandb_sweep(function: Any = None, /, *, download_logs: bool | None = None, **kwargs: Any) -> Any:
    """`tracking_sweep`, with the argument that it does not have.

    Args:
        function: The function or task, where the decorator is used without arguments.
        download_logs: Whether `download_wandb_sweep_logs` is called when the task has returned; None for what
            `wandb_sweep_config` says.
        **kwargs: What else `tracking_sweep` takes.

    Raises:
        ConfigError: As `tracking_sweep`.
    """
    if download_logs is not None:
        check_flag("download_logs", download_logs)
    sweep, wrap = tracking_sweep(**kwargs), functools.partial(_downloading, download_logs)

    def decorate(target: Any) -> Any:
        no_links = flyte_context.Decorator("wandb_sweep", lambda *_: (), lambda _: {})
        return sweep(flyte_context.adapt(target, wrap, no_links))

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
    check_flag("download_logs", download_logs)
    given = tracking_sweep_config(
        method=method,
        metric=metric,
        parameters=parameters,
        project=project,
        entity=entity,
        prior_runs=prior_runs,
        name=name,
        **kwargs,
    )
    value = propagation.parse(given[propagation.SWEEP], propagation.SWEEP)
    more = {"download_logs": True} if download_logs else {}
    return PropagatedConfig(propagation.SWEEP, {**value, **more}, "wandb_sweep_config")


def get_wandb_sweep_id() -> str | None:
    """The id of the sweep of the `wandb_sweep` task that runs here, or has called this one; None without."""
    return get_sweep_id()


def get_wandb_run_dir() -> str | None:
    """The local directory of the run that `get_wandb_run` gives; None without one."""
    run = get_wandb_run()
    return None if run is None else str(run.dir)


def get_distributed_info() -> dict[str, Any] | None:
    """This rank's place in its job; None where there is one process.

    Returns:
        A dict with `rank`, `local_rank`, `world_size`, `local_world_size`, `worker_index` and `num_workers`. What the
        launcher does not tell is None.

    Raises:
        TopologyError: The launcher's variables contradict each other.
    """
    info = topology.get_distributed_info()
    return None if info is None or info.world_size == 1 else {name: info[name] for name in _INFO}


def _downloading(download_logs: bool | None, function: Callable[..., Any], _: Task | None) -> Callable[..., Any]:
    """The function, after which its sweep is downloaded, if it has one and that was asked for."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def then_download_async(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            await _download_sweep(download_logs)
            return result

        return then_download_async

    @functools.wraps(function)
    def then_download(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if _is_to_download(download_logs):
            import asyncio

            # In a thread: a notebook's has a loop that runs.
            run_with_timeout(None, asyncio.run, _download_sweep(download_logs))
        return result

    return then_download


def _is_to_download(asked: bool | None) -> bool:
    context = get_wandb_sweep_context() if asked is None else None
    return (asked or (context is not None and context.download_logs)) and get_sweep_id() is not None


async def _download_sweep(asked: bool | None) -> None:
    """A sweep that cannot be downloaded fails no task."""
    sweep_id = get_sweep_id()
    if sweep_id is None or not _is_to_download(asked):
        return
    try:
        await download_wandb_sweep_logs(sweep_id)
    except Exception:
        logger.warning("download_logs=True: sweep %s is no output of the task", sweep_id, exc_info=True)


@dataclass(frozen=True)
class _ClusterSecret:
    """Gives the key, and nothing where it cannot be read and this is no pod: W&B's own credentials will do there."""

    read: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            return self.read()
        except Exception:
            if "FLYTE_INTERNAL_EXECUTION_ID" in os.environ:
                raise
            return None


def _with_server(settings: Any, address: str) -> Any:
    """The user's `settings` with the address of the server, where they have none."""
    if settings is None or isinstance(settings, Mapping):
        return {"base_url": address, **(settings or {})}
    if "base_url" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"base_url": address})


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _wrap(wanted: TrackingConfig, function: Callable[..., Any], task: Task | None) -> Callable[..., Any]:
    """The tracked function: each call has its own directory, where `dir` is a parameter's name."""
    if wanted.options["dir"] not in inspect.signature(function).parameters:
        return tracked_function(wanted, function, task)

    def of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        here = replace(wanted, options=_options_of_call(wanted.options, function, args, kwargs))
        return tracked_function(here, function, task)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def tracked_async(*args: Any, **kwargs: Any) -> Any:
            return await of_call(args, kwargs)(*args, **kwargs)

        return tracked_async

    @functools.wraps(function)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        return of_call(args, kwargs)(*args, **kwargs)

    return tracked


def _options_of_call(
    options: Mapping[str, Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """`options` with the value of the parameter that `dir` names."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return {**options, "dir": bound.arguments[options["dir"]]}
