"""Open a run of Trackio's, in files or on a server, and end it. The vendor's package is imported here."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.signals import TERMINATED
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import ClientHandle, new_id, run_config
from flyteplugins_tracking.trackers.trackio.options import (
    EXIT_CODE,
    SPACE,
    STATUS,
    check_address,
    page_address,
    without_token,
)

logger = logging.getLogger(__name__)

# What its database takes for a step, which others are to come behind.
_MOST_STEPS = 2**62
_DEFAULT_PROJECT = "default"
_INTERRUPTED = 130
_POLL_S = 0.1
# How long one request to a server may take, unless what is left for opening is less.
_REQUEST_S = 10.0
# What is left of finish_timeout_s for the status, behind the rows.
_STATUS_SHARE = 0.1


class TrackioHandle(ClientHandle):
    """An open run of Trackio's."""

    def __init__(self, request: RunRequest, tracker: Any, run: Any, store: Any, resumed: Any) -> None:
        super().__init__(request, tracker.title)
        self._tracker = tracker
        self.run, self._store = run, store
        is_retry = request.plan.primary or self._barrier is None or self._barrier.is_retry
        last_step = None if resumed is None or not (store.tells_when or is_retry) else resumed.last_step
        self._next_step = 0 if last_step is None else last_step + 1
        self._summary: dict[str, Any] = {}
        self._journal: Any = None
        self._was_told = False
        run.resumed = resumed is not None and (request.plan.primary or last_step is not None)
        run.tracking = self
        if request.plan.primary:
            self._tell_status("running", None, request.deadline)
        self._restore = _make_current(run, tracker.come)

    @property
    def url(self) -> str | None:
        """See `Handle.url`."""
        return page_address(self.run.url, self.run.project, self.id) if self.run.url else None

    def summary(self) -> Mapping[str, Any]:
        """See `Handle.summary`."""
        return self._summary

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        """See `ClientHandle.write`."""
        step = self._next_step if step is None else int(step)
        if abs(step) > _MOST_STEPS:  # written with others, it would keep them from being written
            raise ValueError(f"step={step}: Trackio takes 64 bits")
        self._next_step = max(self._next_step, step + 1)
        self.run.queue(row, step)
        self._summary.update({key: value for key, value in row.items() if isinstance(value, (int, float))})

    def end(self, exit_code: int) -> None:
        """See `ClientHandle.end`."""
        timeout_s = self.request.config.finish_timeout_s
        deadline = time.monotonic() + timeout_s
        if self.request.plan.primary and not self._store.shows_config:
            self._tell_status(_status(exit_code), exit_code, deadline)
        self.run.stop(deadline - timeout_s * _STATUS_SHARE)
        if self.request.plan.primary and self._store.shows_config:
            self._tell_status(_status(exit_code), exit_code, deadline)
        unwritten = self.run.unwritten()
        if unwritten:
            self._keep(unwritten, exit_code)

    def resume(self) -> None:
        """See `ClientHandle.resume`."""
        self.run.go_on()

    def finish(self, exit_code: int) -> None:
        """See `Handle.finish`."""
        try:
            super().finish(exit_code)
        finally:
            self._restore()

    def unsent(self) -> Sequence[str]:
        """See `Handle.unsent`. Trackio's own directory ends with a pod, unless somebody has chosen a place for it."""
        from trackio import utils

        info = self.request.info
        is_chosen = self.run.url is not None or "TRACKIO_DIR" in os.environ or "HF_HOME" in os.environ
        is_first = info is None or info.local_rank == 0
        own = [str(utils.TRACKIO_DIR)] if is_first and not is_chosen else []
        return own if self._journal is None else [*own, self._journal.directory]

    def how_to_send(self, directory: str) -> str:
        """See `Handle.how_to_send`."""
        from flyteplugins_tracking.trackers.journal import how_to_send

        is_journal = self._journal is not None and directory.endswith(os.path.basename(self._journal.directory))
        return how_to_send(directory) if is_journal else f"TRACKIO_DIR={directory} trackio show"

    def delayed(self, error: Exception) -> None:
        """Rows could not be written, and are kept in memory."""
        if not self._was_told:
            self._was_told = True
            logger.warning(
                "Trackio: run %s cannot be written to %s at present: %s. Its rows are kept, and written later",
                self.id,
                self._store.place,
                error,
            )

    def _tell_status(self, status: str, exit_code: int | None, deadline: float) -> None:
        config = self.run.config
        config.pop(EXIT_CODE, None)
        config.update({STATUS: status} if exit_code is None else {STATUS: status, EXIT_CODE: exit_code})
        if self._store.shows_config:
            self._put_config(deadline, is_opening=exit_code is None)
        elif exit_code is not None:
            self.run.tell_config()  # at the opening, Trackio does that with the first row

    def _put_config(self, deadline: float, is_opening: bool) -> None:
        from trackio.utils import serialize_values

        try:
            self._store.put_config(self.id, self.run.name, serialize_values(self.run.config), deadline)
        except Exception as error:
            if is_opening:
                raise TrackerUnavailableError(_cannot_write(self._store.place, error)) from error
            logger.warning("Trackio: the status of run %s is not written: %s", self.id, error)

    def _keep(self, rows: Sequence[Mapping[str, Any]], exit_code: int) -> None:
        from flyteplugins_tracking.trackers.journal import Journal

        self._journal = self._journal or Journal(self.request, self._tracker, self.id)
        for row in rows:
            self._journal.call("requeue", [row], {})
        self._journal.end(exit_code)
        logger.warning(
            "Trackio: %d rows of run %s could not be written to %s within finish_timeout_s=%g. They are kept. Write "
            "them when that is possible: %s",
            len(rows),
            self.id,
            self._store.place,
            self.request.config.finish_timeout_s,
            self.how_to_send(self._journal.directory),
        )


def open_run(request: RunRequest, tracker: Any) -> TrackioHandle:
    """Open the run of `tracker`, the `TrackioTracker`.

    Raises:
        TrackerUnavailableError: The directory or the server cannot be used.
    """
    if os.environ.get("TRACKIO_SPACE_ID"):
        raise ConfigError(f"TRACKIO_SPACE_ID is set: {SPACE}")
    since = tracker.came_here
    url, token = _server(request)
    project = request.config.project or _DEFAULT_PROJECT
    run_id = request.plan.run_id or new_id()
    if url is None:
        store, client = _local_store(project, request), None
    else:
        client = _client(url, token, request.deadline)
        store = _server_store(url, client, project)
    stored = _find(store, run_id, since, request)
    run = _new_run(request, project, run_id, store, stored, url, client)
    if run.id != request.plan.run_id:
        request = replace(request, plan=replace(request.plan, run_id=run.id))
    if request.plan.primary and url is None:
        logger.info("Trackio: run %s is kept in %s: trackio show --project %s", run.name, store.place, project)
    try:
        return TrackioHandle(request, tracker, run, store, stored)
    except BaseException:
        run.stop(time.monotonic())
        raise


def _new_run(
    request: RunRequest, project: str, run_id: str, store: Any, stored: Any, url: str | None, client: Any
) -> Any:
    from flyteplugins_tracking.trackers.trackio.run import run_class

    config, options, is_primary = request.config, request.config.options, request.plan.primary
    own = {} if stored is None else {k: v for k, v in stored.config.items() if not k.startswith("_")}
    run = run_class()(
        url=url,
        project=project,
        client=client,
        name=stored.name if stored is not None else config.name or run_id,
        run_id=run_id,
        group=config.group or request.plan.group or (stored and stored.config.get("_Group")),
        config={**own, **_told(config), **run_config(request)} if is_primary else own,
        server_base_url=url,
        existing_runs=[],
        initial_last_step=-1,  # steps are counted by us
        webhook_url=options.get("webhook_url"),
        webhook_min_level=options.get("webhook_min_level"),
        **_monitors(request),
    )
    for key in ("_Created", "_Username"):
        if stored is not None and stored.config.get(key):
            run.config[key] = stored.config[key]
    # A config that Trackio sends with a row replaces the one that is there: it is the primary's alone to send.
    run._config_logged = not is_primary or store.shows_config
    return run


def _told(config: TrackingConfig) -> dict[str, Any]:
    """What Trackio has no place for."""
    told = {"tags": None if config.tags is None else list(config.tags), "notes": config.notes}
    return {name: value for name, value in told.items() if value is not None}


def _monitors(request: RunRequest) -> dict[str, Any]:
    """Which of the system's metrics are logged: those of a node once, and as Trackio decides unless that is said."""
    from trackio.apple_gpu import apple_gpu_available
    from trackio.cpu import cpu_available
    from trackio.gpu import gpu_available

    options, info = request.config.options, request.info
    is_first = request.config.run_mode != "shared" or info is None or info.local_rank in (0, None)
    cpu, gpu = options.get("auto_log_cpu"), options.get("auto_log_gpu")
    return {
        "auto_log_cpu": is_first and (cpu_available() if cpu is None else cpu),
        "cpu_log_interval": options.get("cpu_log_interval") or 10.0,
        "auto_log_gpu": is_first and (gpu_available() or apple_gpu_available() if gpu is None else gpu),
        "gpu_log_interval": options.get("gpu_log_interval") or 10.0,
    }


def _find(store: Any, run_id: str, since: float, request: RunRequest) -> Any:
    """The run where it is there; on ranks other than its primary, wait for that one to have opened it."""
    while True:
        stored, failure = None, None
        try:
            stored = store.find(run_id, since)
        except Exception as error:
            failure = error
        if stored is not None or (failure is None and (request.plan.primary or not store.shows_config)):
            return stored
        if time.monotonic() + _POLL_S > request.deadline:
            if failure is not None:
                raise TrackerUnavailableError(_cannot_write(store.place, failure)) from failure
            raise TrackerUnavailableError(
                f"Trackio: run {run_id} was not found in {store.place} within init_timeout_s="
                f"{request.config.init_timeout_s:g}: its primary rank has not opened it there. With several nodes, set "
                "TRACKIO_DIR to a directory that they all share, or log to a server (server_url=), or have a run for "
                "each node (rank_scope='worker')."
            )
        time.sleep(_POLL_S)


def _local_store(project: str, request: RunRequest) -> Any:
    from trackio import utils
    from trackio.fragments import local_inbox_dir
    from trackio.sqlite_storage import SQLiteStorage

    from flyteplugins_tracking.trackers.trackio.store import Database, Inbox

    kept_as = utils.canonical_project_name(project)
    if kept_as != project and request.plan.primary:
        logger.warning("Trackio: project %r is kept as %r, with all that has this name", project, kept_as)
    try:
        SQLiteStorage.validate_project_name(project)
        os.makedirs(utils.TRACKIO_DIR, exist_ok=True)
        if utils.get_storage_mode() == "jsonl":
            inbox = local_inbox_dir()
            inbox.mkdir(exist_ok=True)
            return Inbox(Database(SQLiteStorage.get_project_db_path(project)), inbox)
        path = SQLiteStorage.init_db(project) if request.plan.primary else SQLiteStorage.get_project_db_path(project)
        return Database(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise TrackerUnavailableError(_cannot_write(str(utils.TRACKIO_DIR), error)) from error


def _cannot_write(place: str, error: Exception) -> str:
    return (
        f"Trackio cannot keep runs in {place}: {error}. Set TRACKIO_DIR to a directory that can be written, or log to "
        "a server (server_url=)."
    )


def _server_store(url: str, client: Any, project: str) -> Any:
    from flyteplugins_tracking.trackers.trackio.store import Server

    return Server(url, client, project)


def _server(request: RunRequest) -> tuple[str | None, str | None]:
    """The server's address, and the token that it wants."""
    variable = os.environ.get("TRACKIO_SERVER_URL")
    url = request.config.options.get("server_url") or variable
    if not url:
        return None, None
    check_address(url)
    address, _ = without_token(url)
    of_variable = without_token(variable or "")
    token = request.read_secret() or (of_variable[1] if of_variable[0] == address else None)
    token = token or os.environ.get("TRACKIO_WRITE_TOKEN")
    if not token:
        raise TrackerUnavailableError(
            f"{address} wants a write token: pass secret=..., or set TRACKIO_WRITE_TOKEN. `trackio show` prints it."
        )
    return address, token


def _client(url: str, token: str | None, deadline: float) -> Any:
    """A client of the server, which is there and takes the token."""
    import httpx
    from trackio.remote_client import RemoteClient

    try:
        timeout_s = max(0.5, min(_REQUEST_S, (deadline - time.monotonic()) / 3))
        told = httpx.get(f"{url}/version", timeout=timeout_s)
        if not told.is_success or "api_version" not in told.json():
            raise ValueError("what is there is no Trackio server")
        client = RemoteClient(url, write_token=token, httpx_kwargs={"timeout": timeout_s})
        access = client.predict(api_name="/get_run_mutation_status")
    except Exception as error:
        raise TrackerUnavailableError(
            f"The Trackio server at {url} cannot be used: {error}. Check server_url=, TRACKIO_SERVER_URL and the "
            "network, and that `trackio show --host 0.0.0.0` runs there."
        ) from error
    if not access.get("allowed"):
        raise TrackerUnavailableError(
            f"The Trackio server at {url} does not take the write token: check secret= or TRACKIO_WRITE_TOKEN. "
            "`trackio show` prints it."
        )
    return client


def _status(exit_code: int) -> str:
    if exit_code == 0:
        return "finished"
    return "killed" if exit_code in (TERMINATED, _INTERRUPTED) else "failed"


def _make_current(run: Any, come: Callable[[], None]) -> Any:
    """Have `trackio.log` and its like log to `run`. Returns what undoes that, and then calls `come`."""
    import trackio
    from trackio import context_vars as variables

    _have_frameworks_join()
    before = {
        variable: variable.get()
        for variable in (variables.current_run, variables.current_project, variables.current_server)
    }
    config_before = trackio.config
    variables.current_run.set(run)
    variables.current_project.set(run.project)
    variables.current_server.set(run.url)
    trackio.config = run.config

    def restore() -> None:
        come()
        if variables.current_run.get() is run:
            for variable, value in before.items():
                variable.set(value)
        if trackio.config is run.config:
            trackio.config = config_before

    return restore


@functools.cache
def _have_frameworks_join() -> None:
    """They open and finish Trackio runs by themselves: where one of ours is current, that is the run that they get."""
    import trackio
    from trackio.context_vars import current_run

    from flyteplugins_tracking.trackers.trackio.run import run_class

    init, finish, ours = trackio.init, trackio.finish, run_class()

    @functools.wraps(init)
    def join(*args: Any, **kwargs: Any) -> Any:
        run = current_run.get()
        if not isinstance(run, ours):
            return init(*args, **kwargs)
        logger.info("Trackio: trackio.init() gives run %s, which is open", run.id)
        run.config.update(kwargs.get("config") or {})
        return run

    @functools.wraps(finish)
    def leave() -> None:
        if not isinstance(current_run.get(), ours):
            finish()

    trackio.init, trackio.finish = join, leave
