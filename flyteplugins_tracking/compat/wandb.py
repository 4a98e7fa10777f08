"""The public names of flyteplugins-wandb and flytekitplugins-wandb, implemented with this library.

Users of these plugins change the import line: `from flyteplugins_tracking.compat.wandb import wandb_init`. Differences
in behaviour are in docs/guides/move.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._flyte.flyte2 import TrackingLink
from flyteplugins_tracking._flyte.target import Decorator
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig, tracking_config
from flyteplugins_tracking._rank import topology
from flyteplugins_tracking._rank.plan import RankScope, RunMode
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.calls import get_run
from flyteplugins_tracking._runs.context import Task
from flyteplugins_tracking._sweeps.sweep import SweepLink, get_sweep_id, tracking_sweep, tracking_sweep_config
from flyteplugins_tracking._util.checks import check_flag, check_run_id
from flyteplugins_tracking._util.files import private_directory, replace_whole
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.decorator import decorator_of, tracked_function
from flyteplugins_tracking.trackers.config import TrackingConfig, merged
from flyteplugins_tracking.trackers.registry import check_config
from flyteplugins_tracking.trackers.wandb import vendor

if TYPE_CHECKING:
    from flyte.io import Dir

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
_APP = "https://wandb.ai"
_API = "https://api.wandb.ai"
_INFO = ("rank", "local_rank", "world_size", "local_world_size", "worker_index", "num_workers")


@overload
def wandb_init(function: F, /) -> F: ...


@overload
def wandb_init(**kwargs: Any) -> Callable[[F], F]: ...


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


def wandb_config(project: str | None = None, entity: str | None = None, **kwargs: Any) -> PropagatedConfig:
    """`tracking_config`, where None stands for "not given", as for flyteplugins-wandb's `wandb_config`.

    Args:
        project: The runs' project.
        entity: Its entity.
        **kwargs: The other arguments of `tracking_config`: `host`, `id`, `name`, `tags`, `config`, `mode`, `group`,
            `run_mode`, `rank_scope`, `download_logs`, ...

    Returns:
        A mapping for `flyte.with_runcontext(custom_context=...)`, and a context manager.

    Raises:
        ConfigError: As `tracking_config`.
    """
    arguments = {"project": project, "entity": entity, **kwargs}
    return tracking_config(**{name: value for name, value in arguments.items() if value is not None})


@overload
def wandb_sweep(function: F, /) -> F: ...


@overload
def wandb_sweep(**kwargs: Any) -> Callable[[F], F]: ...


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
        return sweep(flyte_context.adapt(target, wrap, Decorator("wandb_sweep")))

    return decorate if function is None else decorate(function)


def wandb_sweep_config(
    method: str | None = None,
    metric: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    download_logs: bool = False,
    **kwargs: Any,
) -> PropagatedConfig:
    """`tracking_sweep_config` with the additional argument `download_logs`.

    Args:
        method: As for `tracking_sweep_config`, as are the next two.
        metric: The metric to optimise.
        parameters: The search range of each parameter.
        download_logs: As for `wandb_sweep`, for the tasks that do not set it.
        **kwargs: The other arguments of `tracking_sweep_config`: `project`, `entity`, `prior_runs`, `name`, ...

    Returns:
        A mapping for `flyte.with_runcontext(custom_context=...)`, and a context manager.

    Raises:
        ConfigError: As `tracking_sweep_config`.
    """
    check_flag("download_logs", download_logs)
    propagated = tracking_sweep_config(method=method, metric=metric, parameters=parameters, **kwargs)
    configuration = propagation.parse(propagated[propagation.SWEEP], propagation.SWEEP)
    more = {"download_logs": True} if download_logs else {}
    return PropagatedConfig(propagation.SWEEP, {**configuration, **more}, "wandb_sweep_config")


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
    name, signature = config.options["dir"], inspect.signature(function)
    if name not in signature.parameters:
        return tracked_function(config, function, task)

    def config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrackingConfig:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replace(config, options={**config.options, "dir": bound.arguments[name]})

    return tracked_function(config, function, task, config_of)


# The contexts of a task's run and sweep, with the attributes that they have in the other plugins


@dataclass(frozen=True)
class WandbContext:
    """The propagated arguments of `wandb_config`. `kwargs` holds the arguments that have no attribute."""

    project: str | None = None
    entity: str | None = None
    host: str | None = None
    id: str | None = None
    name: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None
    mode: str | None = None
    group: str | None = None
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    download_logs: bool = False
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class WandbSweepContext:
    """The propagated arguments of `wandb_sweep_config`. `kwargs` holds the keys that have no attribute."""

    name: str | None = None
    method: str | None = None
    metric: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    project: str | None = None
    entity: str | None = None
    prior_runs: list[str] | None = None
    download_logs: bool = False
    kwargs: dict[str, Any] | None = None

    def to_sweep_config(self) -> dict[str, Any]:
        """Return the sweep configuration for `wandb.sweep`."""
        values = asdict(self)
        other_keys = values.pop("kwargs") or {}
        for name in ("project", "entity", "prior_runs", "download_logs"):
            del values[name]
        return {name: value for name, value in {**values, **other_keys}.items() if value is not None}


def get_wandb_context() -> WandbContext | None:
    """Return what `wandb_config` propagates to this task, function or process; None if it propagates nothing."""
    arguments = _propagated_arguments(propagation.CONFIG, WandbContext)
    return WandbContext(**arguments) if arguments else None


def get_wandb_sweep_context() -> WandbSweepContext | None:
    """Return what `wandb_sweep_config` propagates to this task, function or process; None if it propagates nothing."""
    arguments = _propagated_arguments(propagation.SWEEP, WandbSweepContext)
    return WandbSweepContext(**arguments) if arguments else None


def get_wandb_run() -> Any:
    """Return the W&B run of the decorated function, or one opened without the decorator; None without a run."""
    run = get_run("wandb")
    return vendor.global_run() if run is None else run


def _propagated_arguments(key: str, kind: type) -> dict[str, Any]:
    """Return what is propagated under `key`, as the arguments of `kind`; empty if nothing is."""
    propagated = flyte_context.propagated(key)
    names = set(kind.__dataclass_fields__) - {"kwargs"}  # type: ignore[attr-defined]
    others = {name: value for name, value in propagated.items() if name not in names}
    known = {name: value for name, value in propagated.items() if name in names}
    return {**known, "kwargs": others or None} if propagated else {}


# Links of Flyte 2 that a user puts on a task: `@env.task(links=[Wandb(...)])`


@dataclass
class _Link:
    """A link to a page of W&B.

    Attributes:
        host: The address of W&B. If it is not the default, it takes precedence over the propagated one.
        project: The project of the run or sweep; None for the propagated one.
        entity: Its entity; None for the propagated one.
        id: Its id; None for that of the task or of the task that calls it.
        name: The link's name in the console.
        icon_uri: The address of an icon.
    """

    host: str = _APP
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    name: str = ""
    icon_uri: str = ""

    def __post_init__(self) -> None:
        """Refuse invalid arguments now rather than when the task is submitted.

        Raises:
            ConfigError: An argument is invalid.
        """
        check_config(TrackingConfig.from_arguments(self._arguments()))

    def _arguments(self) -> dict[str, Any]:
        host = None if self.host == _APP else self.host
        arguments = {"project": self.project, "entity": self.entity, "host": host, "id": self.id}
        return {name: value for name, value in arguments.items() if value is not None}


@dataclass
class Wandb(_Link):
    """A link to the run of a task, as `@wandb_init` adds it by itself.

    Attributes:
        run_mode: With "auto" and "shared" the link leads to the run of the calling task, if it has one.
        rank_scope: Has no effect: the link leads to one run.
    """

    name: str = "Weights & Biases"
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "run_mode": self.run_mode, "rank_scope": self.rank_scope}

    def get_link(self, **of_task: Any) -> str:
        """Return the run's page, or the project's or W&B's if the run or the project is not known."""
        return TrackingLink(self.name, TrackingConfig.from_arguments(self._arguments())).get_link(**of_task)


@dataclass
class WandbSweep(_Link):
    """A link to the sweep of a task."""

    name: str = "Weights & Biases Sweep"

    def get_link(self, **of_task: Any) -> str:
        """Return the sweep's page, or the page of all sweeps or W&B's if the sweep or the project is not known."""
        return SweepLink(self._arguments(), self.name).get_link(**of_task)


# Downloads of a run or a sweep from W&B, as local files and as Flyte directories


def download_wandb_run_dir(run_id: str | None = None, path: str | None = None, include_history: bool = True) -> str:
    """Download a run's files, its summary and its rows.

    The last rows of a run that is still open may be missing. `get_wandb_run_dir` has the local files of an open run.

    Args:
        run_id: The run; None for the run that is open here or in the calling task.
        path: The directory to download to; None for `wandb_runs/{run_id}` in this user's private directory below the
            system's temporary directory.
        include_history: Whether all rows are written to `metrics_history.json`.

    Returns:
        The directory, with the run's files and `summary.json`.

    Raises:
        RuntimeError: There is no run, or W&B does not return it. W&B's own error is the cause.
    """
    parents = propagation.parse((flyte2.custom_context() or {}).get(propagation.RUNS), propagation.RUNS)
    place = _place("run", "@wandb_init", run_id, _open_run(), parents.get("wandb") or {})
    path = path or _directory_in(str(private_directory("wandb_runs", on_disk=True)), place["id"])
    return _download(_api_of(place), place, path, include_history)


def download_wandb_sweep_dirs(
    sweep_id: str | None = None, base_path: str | None = None, include_history: bool = True
) -> list[str]:
    """Download all runs of a sweep, each to a directory of its id.

    Args:
        sweep_id: The sweep; None for that of the `wandb_sweep` task that runs here or calls this task.
        base_path: The parent of the directories; None for `wandb_runs` as in `download_wandb_run_dir`.
        include_history: As for `download_wandb_run_dir`.

    Returns:
        The directories. Runs that cannot be downloaded are left out, with a warning.

    Raises:
        RuntimeError: There is no sweep, or W&B does not return it or any of its runs. W&B's own error is the cause.
    """
    current = flyte_context.propagated(propagation.SWEEP_ID)
    place = _place("sweep", "@wandb_sweep", sweep_id, current, defaults=flyte_context.propagated(propagation.SWEEP))
    api = _api_of(place)
    with _runtime_error(f"W&B did not return the sweep {_path(place)!r}"):
        run_ids = [run.id for run in api.sweep(_path(place)).runs]
    base = base_path or str(private_directory("wandb_runs", on_disk=True))
    directories, failures = [], list[RuntimeError]()
    for run_id in run_ids:
        try:
            path = _directory_in(base, run_id)
            directories.append(_download(api, {**place, "id": run_id}, path, include_history))
        except RuntimeError as error:
            failures.append(error)
    if failures:
        of_sweep = f"{len(failures)} of the {len(run_ids)} runs of sweep {place['id']!r} could not be downloaded: "
        if not directories:
            raise RuntimeError(of_sweep + "; ".join(map(str, failures))) from failures[0]
        logger.warning("%s%s", of_sweep, "; ".join(map(str, failures)))
    return directories


Downloading = Callable[[str], Coroutine[Any, Any, "Dir"]]


def _traced(function: Downloading) -> Downloading:
    """Apply `flyte.trace` at the call, since flyte may not be installed."""

    @functools.wraps(function)
    async def call(id: str) -> Dir:
        import flyte
        from flyte.io import Dir

        function.__annotations__["return"] = Dir  # flyte stores the result by its annotation
        result: Dir = await flyte.trace(function)(id)
        return result

    return call


@_traced
async def download_wandb_run_logs(run_id: str) -> Dir:
    """Download a run as an output of a trace of the Flyte 2 task that runs here.

    Args:
        run_id: The run.

    Returns:
        The directory that `download_wandb_run_dir` fills.

    Raises:
        RuntimeError: As `download_wandb_run_dir`.
    """
    return await _as_dir(download_wandb_run_dir, run_id)


@_traced
async def download_wandb_sweep_logs(sweep_id: str) -> Dir:
    """Download a sweep as an output of a trace of the Flyte 2 task that runs here.

    Args:
        sweep_id: The sweep.

    Returns:
        A directory with those that `download_wandb_sweep_dirs` fills.

    Raises:
        RuntimeError: As `download_wandb_sweep_dirs`.
    """
    return await _as_dir(download_wandb_sweep_dirs, sweep_id)


async def _as_dir(download: Callable[[str, str], object], id: str) -> Dir:
    """Download to an empty directory: the default one may hold files of another download."""
    import asyncio

    from flyte.io import Dir

    path = _directory_in(tempfile.mkdtemp(prefix="wandb_runs_"), id)
    os.mkdir(path)
    await asyncio.to_thread(download, id, path)
    return await Dir.from_local(path)


def _directory_in(base: str, run_id: str) -> str:
    """Return the directory of a run or a sweep in that of all."""
    with _runtime_error(f"{run_id!r} cannot be the name of a directory"):
        check_run_id("the id", run_id, longest=200)
    return os.path.join(base, run_id)


def _place(
    kind: str, decorator: str, of_id: str | None, *known: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return where a run or a sweep is: the one of the `known` with the id `of_id`, or else a propagated one.

    Raises:
        RuntimeError: `of_id` is None, and none is known.
    """
    config = merged(flyte_context.propagated(propagation.CONFIG), defaults or {})
    place = {name: config.get(name) for name in ("project", "entity", "host")}
    if os.environ.get("WANDB_BASE_URL") or (place["host"] or "").rstrip("/") == _APP:
        place["host"] = None  # as for runs: the variable takes precedence, and https://wandb.ai is a page, not a server
    for one in known:
        if one.get("id") and of_id in (None, one["id"]):
            return {**place, **{name: value for name, value in one.items() if value is not None}}
    if of_id is None:
        raise RuntimeError(f"no W&B {kind} is open: pass {kind}_id=..., or call this in a task with {decorator}")
    return {**place, "id": of_id}


def _open_run() -> dict[str, Any]:
    run = get_wandb_run()
    if run is None:
        return {}
    server = getattr(getattr(run, "settings", None), "base_url", None)
    return {"id": run.id, "project": run.project or None, "entity": run.entity or None, "host": server}


def _path(place: Mapping[str, Any]) -> str:
    parts = [place["entity"] if place["project"] else None, place["project"], place["id"]]
    return "/".join(part for part in parts if part)


def _api_of(place: Mapping[str, Any]) -> Any:
    import wandb

    with _runtime_error("W&B's API cannot be used"):
        return wandb.Api(overrides={"base_url": place["host"]} if place["host"] else None)


def _download(api: Any, place: Mapping[str, Any], path: str, include_history: bool) -> str:
    with _runtime_error(f"W&B did not return the run {_path(place)!r}"):
        run = api.run(_path(place))
    with _runtime_error(f"the run {_path(place)!r} could not be downloaded to {path}"):
        os.makedirs(path, exist_ok=True)
        inside = Path(path).resolve()
        for file in run.files():
            if not (inside / file.name).resolve().is_relative_to(inside):
                raise PermissionError(f"{file.name!r} is outside of {path}")
            file.download(root=path, replace=True)
        _write(path, "summary.json", run.summary_metrics)
        if include_history:
            # Not `history`, which samples 500 rows. Not the cache, which may be outdated.
            _write(path, "metrics_history.json", list(run.scan_history(use_cache=False)))
    return path


def _write(path: str, name: str, value: Any) -> None:
    # Not through a link, if others can write to a directory that the user has named.
    replace_whole(Path(path, name), json.dumps(value, indent=2, default=str), 0o666)


@contextmanager
def _runtime_error(failure: str) -> Iterator[None]:
    """Raise errors of the block as a RuntimeError whose message starts with `failure`."""
    from wandb.errors import AuthenticationError

    try:
        yield
    except Exception as error:
        hint = "; check WANDB_API_KEY" if isinstance(error, AuthenticationError) else ""
        raise RuntimeError(f"{failure}: {error}{hint}") from error
