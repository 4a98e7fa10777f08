"""Downloads of a run or a sweep from W&B, as local files and as Flyte directories."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.files import private_directory, replace_whole
from flyteplugins_tracking.compat._context import (
    get_wandb_context,
    get_wandb_run,
    get_wandb_sweep_context,
)
from flyteplugins_tracking.trackers.config import merged

if TYPE_CHECKING:
    from flyte.io import Dir

logger = logging.getLogger(__name__)
_APP = "https://wandb.ai"


@dataclass(frozen=True)
class _Address:
    """The address of a run or a sweep. None stands for W&B's default."""

    id: str
    project: str | None = None
    entity: str | None = None
    server: str | None = None

    @property
    def path(self) -> str:
        parts = [self.entity if self.project else None, self.project, self.id]
        return "/".join(part for part in parts if part)


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
    run = _run_address(run_id)
    path = path or _directory_in(_default_base(), run.id)
    return _download(_open_api(run, "run"), run, path, include_history)


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
    sweep = _sweep_address(sweep_id)
    api = _open_api(sweep, "sweep")
    with _runtime_error(f"W&B did not return the sweep {sweep.path!r}"):
        run_ids = [run.id for run in api.sweep(sweep.path).runs]
    directories, failures = [], {}
    for run_id in run_ids:
        run = _Address(run_id, sweep.project, sweep.entity)
        try:
            path = _directory_in(base_path or _default_base(), run_id)
            directories.append(_download(api, run, path, include_history))
        except RuntimeError as error:
            failures[run_id] = error
    if failures:
        summary = f"{len(failures)} of the {len(run_ids)} runs of sweep {sweep.id!r} could not be downloaded: " + (
            "; ".join(str(error) for error in failures.values())
        )
        if not directories:
            raise RuntimeError(summary) from next(iter(failures.values()))
        logger.warning("%s", summary)
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


def _default_base() -> str:
    return str(private_directory("wandb_runs", on_disk=True))


def _run_address(run_id: str | None) -> _Address:
    """Return the address of `run_id`: that of an open run with this id, or else the propagated one."""
    parent_runs = propagation.parse((flyte2.custom_context() or {}).get(propagation.RUNS), propagation.RUNS)
    for open_run in (_open_run(), parent_runs.get("wandb") or {}):
        if open_run.get("id") and run_id in (None, open_run["id"]):
            return _Address(**merged(_propagated(), open_run))
    if run_id is None:
        raise RuntimeError("no W&B run is open: pass run_id=..., or call this in a task with @wandb_init")
    return _Address(run_id, **_propagated())


def _open_run() -> dict[str, Any]:
    run = get_wandb_run()
    if run is None:
        return {}
    server = getattr(getattr(run, "settings", None), "base_url", None)
    return {"id": run.id, "project": run.project or None, "entity": run.entity or None, "server": server}


def _sweep_address(sweep_id: str | None) -> _Address:
    current_sweep = flyte_context.propagated(propagation.SWEEP_ID)
    context = get_wandb_sweep_context()
    location = {} if context is None else {"project": context.project, "entity": context.entity}
    if current_sweep.get("id") and sweep_id in (None, current_sweep["id"]):
        location = {**location, **{name: current_sweep.get(name) for name in ("project", "entity")}}
        sweep_id = current_sweep["id"]
    if sweep_id is None:
        raise RuntimeError("no W&B sweep is open: pass sweep_id=..., or call this in a task with @wandb_sweep")
    return _Address(sweep_id, **merged(_propagated(), location))


def _propagated() -> dict[str, str | None]:
    context = get_wandb_context()
    if context is None:
        return {}
    # As for runs: the variable takes precedence over host=, and https://wandb.ai is a page and not a server.
    is_default = context.host is None or context.host.rstrip("/") == _APP or os.environ.get("WANDB_BASE_URL")
    return {"project": context.project, "entity": context.entity, "server": None if is_default else context.host}


def _open_api(address: _Address, kind: str) -> Any:
    import wandb

    with _runtime_error(f"W&B did not return the {kind} {address.path!r}"):
        return wandb.Api(overrides=None if address.server is None else {"base_url": address.server})


def _download(api: Any, run: _Address, path: str, include_history: bool) -> str:
    with _runtime_error(f"W&B did not return the run {run.path!r}"):
        api_run = api.run(run.path)
    with _runtime_error(f"the run {run.path!r} could not be downloaded to {path}"):
        os.makedirs(path, exist_ok=True)
        inside = Path(path).resolve()
        for file in api_run.files():
            if not (inside / file.name).resolve().is_relative_to(inside):
                raise PermissionError(f"{file.name!r} is outside of {path}")
            file.download(root=path, replace=True)
        _write(path, "summary.json", api_run.summary_metrics)
        if include_history:
            # Not `history`, which samples 500 rows. Not the cache, which may be outdated.
            _write(path, "metrics_history.json", list(api_run.scan_history(use_cache=False)))
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
