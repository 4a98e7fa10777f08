"""The undocumented names of Trackio. No other module uses them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.threads import call_within
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.client import join_calls, left_of_opening, refuse_to_pickle
from flyteplugins_tracking.trackers.idle import IDLE as _IDLE
from flyteplugins_tracking.trackers.idle import IdleRun, is_idle, undo_later
from flyteplugins_tracking.trackers.trackio import INIT_ARGUMENTS
from flyteplugins_tracking.trackers.vendor_parts import VendorParts

PARTS = VendorParts("Trackio", "trackio", "trackio==0.43.0")
# The arguments of `trackio.init` that a script's own opening of its run has.
_OPENING = {"project", "name", "group", *INIT_ARGUMENTS} - {"embed", "resume"}
# How long the Hugging Face Hub may take to name the token's owner. Trackio itself has no limit.
_USERNAME_S = 2.0


def require() -> None:
    """Look up the names without which no run can be opened.

    Raises:
        TrackerNotInstalledError: The installed version lacks one of them.
    """
    PARTS.require("trackio.sqlite_storage", "SQLiteStorage.bulk_log", "SQLiteStorage.init_db")
    PARTS.require("trackio.remote_client", "RemoteClient")
    PARTS.require("trackio.context_vars", "current_run")


# Where runs are kept.


def check_project(project: str) -> None:
    """Refuse a project whose files would be those of another project, as `trackio.init` does since it knows of them.

    Raises:
        ConfigError: The project has such a name.
    """
    from trackio.sqlite_storage import SQLiteStorage

    try:
        getattr(SQLiteStorage, "validate_project_name", str)(project)
    except ValueError as error:
        raise ConfigError(f"project={project!r} cannot be used: {error}") from error


def database(project: str) -> Path:
    """Return the path of the project's database, which is there then."""
    from trackio.sqlite_storage import SQLiteStorage

    return Path(SQLiteStorage.init_db(project))


def write_rows(entries: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of one run to its database, and the config that the first one has. Rows that are there are left."""
    from trackio.sqlite_storage import SQLiteStorage

    first = entries[0]
    SQLiteStorage.bulk_log(
        project=first["project"],
        run=first["run"],
        run_id=first["run_id"],
        metrics_list=[entry["metrics"] for entry in entries],
        steps=[entry["step"] for entry in entries],
        timestamps=[entry["timestamp"] for entry in entries],
        config=first["config"],
        log_ids=[entry["log_id"] for entry in entries],
    )


def remote_client(url: str, token: str | None, timeout_s: float) -> Any:
    """Return a client of a server."""
    from trackio.remote_client import RemoteClient

    return RemoteClient(url, write_token=token, httpx_kwargs={"timeout": timeout_s})


# The current run.


def join_clients_calls(_: object = None) -> None:
    """Have Trackio's functions that open and end a run join the open one from now on."""
    import trackio

    join_calls(trackio.init, _join)
    join_calls(trackio.finish, _finish)


def make_current(run: Any) -> Callable[[], None]:
    """Have `trackio.log` and the like go to `run`. Returns a function that undoes that."""
    import trackio
    from trackio import context_vars as variables

    join_clients_calls()
    values = {variables.current_run: run}
    with PARTS.optional("trackio.save() does not use the run's project"):
        values[variables.current_project] = run.project
    before = {variable: variable.get() for variable in values}
    for variable, value in values.items():
        variable.set(value)
    config_before = getattr(trackio, "config", None)
    trackio.config = run.config

    def restore() -> None:
        if variables.current_run.get() is run:
            for variable, value in before.items():
                variable.set(value)
        if trackio.config is run.config:
            trackio.config = config_before

    return restore


def _current(_: Mapping[str, Any]) -> Any:
    """Return the current run if it is one of ours."""
    from trackio.context_vars import current_run

    run = current_run.get()
    return run if isinstance(run, run_class()) else None


def _finish(given: Mapping[str, Any]) -> Any:
    run = _current(given)
    if run is not None:
        run.finish()
    return run


def _join(given: Mapping[str, Any]) -> Any:
    """Return the run of the decorated function for a `trackio.init`; None if it is not the current one."""
    given = left_of_opening("trackio", given, {name: name for name in _OPENING})
    run = _current(given)
    if run is not None:
        run.tracking.join(given)
    elif is_idle("trackio"):
        of_run = {"id": _IDLE, "name": given.get("name") or _IDLE, "project": given.get("project"), "url": None}
        run = IdleRun("trackio", "Trackio", config=dict(given.get("config") or {}), **of_run)
        undo_later("trackio", make_current(run))
    return run


# The run.


@functools.cache
def run_class() -> Any:
    """Return the class of our runs: Trackio's own, with the methods of `_Logging` before it."""
    import trackio

    return type("Run", (_Logging, trackio.Run), {"__doc__": trackio.Run.__doc__})


class _Taken(list[Any]):
    """What the client takes for its queue of rows, and finds empty. It keeps what is put into it for us."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()  # the outbox's thread prepares kept rows beside the function's

    @property
    def entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._of_thread.__dict__.setdefault("entries", [])
        return entries

    def append(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


class _Logging:
    """Methods that take the place of those of `trackio.Run`: rows go through our outbox.

    Attributes:
        resumed: Whether the run existed before.
        tracking: The run's handle.
    """

    resumed = False
    tracking: Any = None
    _taken: _Taken | None = None

    # Attributes of Trackio's own run.
    id: str
    name: str
    project: str
    config: dict[str, Any]

    @property
    def _queued_logs(self) -> Any:
        if self._taken is None:  # this version of the client has another queue
            raise AttributeError("_queued_logs")
        return self._taken

    @_queued_logs.setter
    def _queued_logs(self, _: Any) -> None:
        if self._taken is None:  # it is always empty: another thread of the client's takes it while a row is prepared
            self._taken = _Taken()

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row."""
        self.tracking.log(metrics, step)

    def finish(self) -> None:
        """End nothing: the run ends when the decorated function does."""
        self.tracking.tell_end()

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    def prepared(self, row: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Return a row as Trackio sends it: images are files, and values are JSON's. Nothing if it cannot be sent."""
        entries = self._queued_logs.entries
        super().log(dict(row), step=step)  # type: ignore[misc]
        rows = [entry["metrics"] for entry in entries]
        entries.clear()
        return rows

    def _get_username(self) -> Any:
        with suppress(TimeoutError):
            return call_within(_USERNAME_S, super()._get_username)  # type: ignore[misc]
        return None


def take_over(run: Any) -> None:
    """Keep the client from sending the run's config with a row: that would replace the config that is there.

    Raises:
        TrackerNotInstalledError: The run lacks a required name.
    """
    PARTS.require(run, "_queued_logs", "_config_logged")
    run._config_logged = True


def finish(run: Any) -> None:
    """End what the client itself does for the run: metrics of the system, alerts and files. May take 30 s."""
    import trackio

    module: Any = sys.modules[trackio.Run.__module__]
    module.print = lambda *_, **__: None  # it would say that it uploads the rows, which are sent already
    try:
        trackio.Run.finish(run)
    finally:
        vars(module).pop("print", None)
