"""What W&B keeps of a run or a sweep, as local files and as Flyte's own directories."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._config.config import merged
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking.compat._context import (
    get_wandb_context,
    get_wandb_run,
    get_wandb_sweep_context,
)

if TYPE_CHECKING:
    from flyte.io import Dir

logger = logging.getLogger(__name__)
_APP = "https://wandb.ai"


@dataclass(frozen=True)
class _Address:
    """Where W&B has a run or a sweep; what is None is W&B's own default."""

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

    What a run has logged just now may not be there yet: for the files of the run that is open see
    `get_wandb_run_dir`.

    Args:
        run_id: The run; None for the one that is open here, or in the task that has called this one.
        path: The directory to download to; None for `wandb_runs/{run_id}` in the system's temporary directory.
        include_history: Whether all rows are written to `metrics_history.json`.

    Returns:
        The directory: with the files that W&B has of the run, and `summary.json`.

    Raises:
        RuntimeError: There is no run, or W&B does not give it. W&B's own error is the cause.
    """
    run = _run_address(run_id)
    path = path or os.path.join(_default_base(), run.id)
    return _download(_open_api(run, "run"), run, path, include_history)


def download_wandb_sweep_dirs(
    sweep_id: str | None = None, base_path: str | None = None, include_history: bool = True
) -> list[str]:
    """Download all runs of a sweep, each to a directory of its id.

    Args:
        sweep_id: The sweep; None for that of the `wandb_sweep` task that runs here, or has called this one.
        base_path: Where the directories are put; None for `wandb_runs` in the system's temporary directory.
        include_history: See `download_wandb_run_dir`.

    Returns:
        The directories. Runs that cannot be downloaded are left out, with a warning.

    Raises:
        RuntimeError: There is no sweep, W&B does not give it, or none of its runs. W&B's own error is the cause.
    """
    sweep = _sweep_address(sweep_id)
    api = _open_api(sweep, "sweep")
    with _explained(f"W&B does not give the sweep {sweep.path!r}"):
        run_ids = [run.id for run in api.sweep(sweep.path).runs]
    done, failures = [], {}
    for run_id in run_ids:
        run = _Address(run_id, sweep.project, sweep.entity)
        try:
            done.append(_download(api, run, os.path.join(base_path or _default_base(), run_id), include_history))
        except RuntimeError as error:
            failures[run_id] = error
    if failures:
        summary = f"{len(failures)} of the {len(run_ids)} runs of sweep {sweep.id!r} could not be downloaded: " + (
            "; ".join(str(error) for error in failures.values())
        )
        if not done:
            raise RuntimeError(summary) from next(iter(failures.values()))
        logger.warning("%s", summary)
    return done


Downloading = Callable[[str], Coroutine[Any, Any, "Dir"]]


def _traced(function: Downloading) -> Downloading:
    """`flyte.trace`, from the first call on: before it flyte may not be installed."""

    @functools.wraps(function)
    async def call(id: str) -> Dir:
        import flyte
        from flyte.io import Dir

        function.__annotations__["return"] = Dir  # by which flyte stores what it returns
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
        RuntimeError: See `download_wandb_run_dir`.
    """
    import asyncio

    from flyte.io import Dir

    path = os.path.join(_own_directory(), run_id)
    return await Dir.from_local(await asyncio.to_thread(download_wandb_run_dir, run_id, path))


@_traced
async def download_wandb_sweep_logs(sweep_id: str) -> Dir:
    """Download a sweep as an output of a trace of the Flyte 2 task that runs here.

    Args:
        sweep_id: The sweep.

    Returns:
        A directory with those that `download_wandb_sweep_dirs` fills.

    Raises:
        RuntimeError: See `download_wandb_sweep_dirs`.
    """
    import asyncio

    from flyte.io import Dir

    base = os.path.join(_own_directory(), sweep_id)
    os.makedirs(base)
    await asyncio.to_thread(download_wandb_sweep_dirs, sweep_id, base)
    return await Dir.from_local(base)


def _own_directory() -> str:
    """One that holds nothing of another download's, as the default directory may."""
    return tempfile.mkdtemp(prefix="wandb_runs_")


def _default_base() -> str:
    return os.path.join(tempfile.gettempdir(), "wandb_runs")


def _run_address(run_id: str | None) -> _Address:
    """The run `run_id`: its place is that of an open run of this id, or else what is propagated."""
    opened, of_parent = (
        _opened(),
        propagation.parse((flyte2.custom_context() or {}).get(propagation.RUNS), propagation.RUNS).get("wandb"),
    )
    for known in (opened, of_parent or {}):
        if known.get("id") and run_id in (None, known["id"]):
            return _Address(**merged(_propagated(), known))
    if run_id is None:
        raise RuntimeError("no W&B run is open here: pass run_id=, or call this in a task with @wandb_init")
    return _Address(run_id, **_propagated())


def _opened() -> dict[str, Any]:
    run = get_wandb_run()
    if run is None:
        return {}
    server = getattr(getattr(run, "settings", None), "base_url", None)
    return {"id": run.id, "project": run.project or None, "entity": run.entity or None, "server": server}


def _sweep_address(sweep_id: str | None) -> _Address:
    opened = flyte_context.propagated(propagation.SWEEP_ID)
    sweep = get_wandb_sweep_context()
    place = {} if sweep is None else {"project": sweep.project, "entity": sweep.entity}
    if opened.get("id") and sweep_id in (None, opened["id"]):
        place = {**place, **{name: opened.get(name) for name in ("project", "entity")}}
        sweep_id = opened["id"]
    if sweep_id is None:
        raise RuntimeError("no W&B sweep is open here: pass sweep_id=, or call this in a task with @wandb_sweep")
    return _Address(sweep_id, **merged(_propagated(), place))


def _propagated() -> dict[str, str | None]:
    context = get_wandb_context()
    if context is None:
        return {}
    # As for runs: the variable goes before host=, and W&B's own page is not its server.
    is_own = context.host is None or context.host.rstrip("/") == _APP or os.environ.get("WANDB_BASE_URL")
    return {"project": context.project, "entity": context.entity, "server": None if is_own else context.host}


def _open_api(of: _Address, kind: str) -> Any:
    import wandb

    with _explained(f"W&B does not give the {kind} {of.path!r}"):
        return wandb.Api(overrides=None if of.server is None else {"base_url": of.server})


def _download(api: Any, run: _Address, path: str, include_history: bool) -> str:
    with _explained(f"the directory {path} cannot be made"):
        os.makedirs(path, exist_ok=True)
    with _explained(f"W&B does not give the run {run.path!r}"):
        found = api.run(run.path)
    with _explained(f"the files of run {run.path!r} could not be downloaded"):
        for file in found.files():
            file.download(root=path, replace=True)
    with _explained(f"the summary of run {run.path!r} could not be written"):
        _write(path, "summary.json", found.summary_metrics)
    if include_history:
        with _explained(f"the rows of run {run.path!r} could not be written"):
            # Not `history`, which samples 500 of them; and what was read of it before may be old.
            _write(path, "metrics_history.json", list(found.scan_history(use_cache=False)))
    return path


def _write(path: str, name: str, value: Any) -> None:
    with open(os.path.join(path, name), "w") as file:
        json.dump(value, file, indent=2, default=str)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of the block as a RuntimeError that says `what` has failed."""
    from wandb.errors import AuthenticationError

    try:
        yield
    except Exception as error:
        hint = "; check WANDB_API_KEY" if isinstance(error, AuthenticationError) else ""
        raise RuntimeError(f"{what}: {error}{hint}") from error
