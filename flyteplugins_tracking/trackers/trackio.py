"""Trackio: runs in files of this machine, or on a server of one's own.

A run's key in Trackio is its id, which we give, so that ranks need not look for a run that another one has made. Its
name is only what Trackio shows. Trackio knows no status: it is in the run's config.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.entries import RunRequest
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.policy import Page
from flyteplugins_tracking.signals import TERMINATED
from flyteplugins_tracking.trackers.base import Handle, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, new_id, run_config

if TYPE_CHECKING:
    from flyteplugins_tracking.findings import Examination
    from flyteplugins_tracking.trackers.base import Feature

logger = logging.getLogger(__name__)

# The parameters of trackio.init that the decorator does not take by name. A test compares.
INIT_ARGUMENTS = frozenset(
    {
        "auto_log_cpu",
        "auto_log_gpu",
        "bucket_id",
        "cpu_log_interval",
        "dataset_id",
        "embed",
        "gpu_log_interval",
        "private",
        "resume",
        "server_url",
        "settings",
        "space_id",
        "webhook_min_level",
        "webhook_url",
    }
)
_SPACE = (
    "a Hugging Face Space is not logged to: several ranks would make it at once, and rows wait for it to be built. Log "
    "to files, and publish them: trackio sync --project ... --space-id ..."
)
# What of them is refused, whatever its value, and what is refused but for one value.
_REFUSED = dict.fromkeys(("space_id", "bucket_id", "dataset_id", "private"), _SPACE)
_ONLY = {
    "embed": (False, "no dashboard is started by a training: run `trackio show`"),
    "resume": ("allow", "a run goes on where its id is there, and another id= is another run"),
}
# Trackio does nothing with it, and for W&B's it would be an error here.
_UNUSED = "settings"
# What the status is told by: no key of the user's config.
_STATUS, _EXIT_CODE = "status", "exit_code"
# https://github.com/gradio-app/trackio, SQLiteStorage.validate_project_name. A test compares.
_RESERVED_PREFIX = "registry-"
_RESERVED_SUFFIXES = (
    "_system",
    "_configs",
    "_traces",
    "_artifacts",
    "_artifact_versions",
    "_artifact_aliases",
    "_run_artifact_links",
    "_external_run_artifact_links",
)
# What its database takes for a step, which others are to come behind.
_MOST_STEPS = 2**62
_DEFAULT_PROJECT = "default"
_INTERRUPTED = 130
_POLL_S = 0.1
# How long one request to a server may take, unless what is left for opening is less.
_REQUEST_S = 10.0
# What is left of finish_timeout_s for the status, behind the rows.
_STATUS_SHARE = 0.1


class TrackioTracker(Tracker):
    """Opens Trackio runs."""

    name = "trackio"
    title = "Trackio"
    package = "trackio"
    distribution = '"flyteplugins-tracking[trackio]"'
    arguments = INIT_ARGUMENTS - {_UNUSED}
    lacks: Mapping[Feature, str] = MappingProxyType(
        {
            "sweeps": "it has none",
            "config file": "trackio.init reads none",
            "allow_config": "a run has one config, and who writes it last replaces all of it",
            "download_logs": "the files of its runs are those of the whole project",
        }
    )

    def check(self, config: TrackingConfig) -> None:
        """See `Tracker.check`."""
        for name, value in config.options.items():
            wanted, reason = _ONLY.get(name, (None, _REFUSED.get(name)))
            if reason is not None and value is not None and value != wanted:
                raise ConfigError(f"{name}={value!r} cannot be had with Trackio: {reason}")
        _check_server(config.options.get("server_url"))
        _check_project(config.project)
        if config.id is not None and "," in config.id:
            raise ConfigError(f"id={config.id!r}: Trackio's pages take a comma for the end of an id")
        for key in config.config if isinstance(config.config, Mapping) else ():
            if key.startswith("_") or key in (_STATUS, _EXIT_CODE):
                whose = "Trackio's own" if key.startswith("_") else "where the end of the run is told"
                raise ConfigError(f"config= has the key {key!r}, which is {whose}")

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        """See `Tracker.page`."""
        url = config.options.get("server_url") or os.environ.get("TRACKIO_SERVER_URL")
        if not url:
            return None
        return _page(_without_token(url)[0], config.project, page.id if page and page.kind == "run" else None)

    def pass_on(self, run: Any) -> Mapping[str, Any] | None:
        """See `Tracker.pass_on`. A task in another pod has other files."""
        if not isinstance(getattr(run, "url", None), str):
            return None
        return {"id": run.id, "name": run.name, "project": run.project, "server_url": run.url}

    def examine(self) -> Examination:
        """See `Tracker.examine`."""
        from flyteplugins_tracking.trackers._trackio_examine import examine

        return examine()

    def open(self, request: RunRequest) -> Handle:
        """See `Tracker.open`."""
        from flyteplugins_tracking.trackers.local import open_or_keep

        return open_or_keep(request, self, lambda: _open(request))


class TrackioHandle(ClientHandle):
    """An open run of Trackio's."""

    def __init__(self, request: RunRequest, run: Any, store: Any, resumed: Any) -> None:
        super().__init__(request, TRACKER.title)
        self.run, self._store = run, store
        is_retry = request.plan.primary or self._writers is None or self._writers.is_retry
        last_step = None if resumed is None or not (store.tells_when or is_retry) else resumed.last_step
        self._next_step = 0 if last_step is None else last_step + 1
        self._summary: dict[str, Any] = {}
        self._journal: Any = None
        self._was_told = False
        run.resumed = resumed is not None and (request.plan.primary or last_step is not None)
        run.tracking = self
        if request.plan.primary:
            self._tell_status("running", None, request.deadline)
        self._restore = _make_current(run)

    @property
    def url(self) -> str | None:
        """See `Handle.url`."""
        return _page(self.run.url, self.run.project, self.id) if self.run.url else None

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
        from flyteplugins_tracking.trackers.local import how_to_send

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
        config.pop(_EXIT_CODE, None)
        config.update({_STATUS: status} if exit_code is None else {_STATUS: status, _EXIT_CODE: exit_code})
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
        from flyteplugins_tracking.trackers.local import Journal

        self._journal = self._journal or Journal(self.request, TRACKER, self.id)
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


TRACKER = TrackioTracker()


def _open(request: RunRequest) -> TrackioHandle:
    if os.environ.get("TRACKIO_SPACE_ID"):
        raise ConfigError(f"TRACKIO_SPACE_ID is set: {_SPACE}")
    since = _came_here
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
        return TrackioHandle(request, run, store, stored)
    except BaseException:
        run.stop(time.monotonic())
        raise


def _new_run(
    request: RunRequest, project: str, run_id: str, store: Any, stored: Any, url: str | None, client: Any
) -> Any:
    from flyteplugins_tracking.trackers._trackio_run import run_class

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


# When this process may first have logged, or has last ended a run: rows before that are an earlier attempt's, and
# rows since then may be those that other ranks have just logged.
_came_here = time.time()


def _come() -> None:
    global _came_here
    _came_here = time.time()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_come)  # Elastic forks workers anew for each attempt


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

    from flyteplugins_tracking.trackers._trackio_store import Database, Inbox

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
    from flyteplugins_tracking.trackers._trackio_store import Server

    return Server(url, client, project)


def _server(request: RunRequest) -> tuple[str | None, str | None]:
    """The server's address, and the token that it wants."""
    variable = os.environ.get("TRACKIO_SERVER_URL")
    url = request.config.options.get("server_url") or variable
    if not url:
        return None, None
    _check_address(url)
    address, _ = _without_token(url)
    of_variable = _without_token(variable or "")
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


def _make_current(run: Any) -> Any:
    """Have `trackio.log` and its like log to `run`. Returns what undoes that."""
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
        _come()
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

    from flyteplugins_tracking.trackers._trackio_run import run_class

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


def _page(address: str, project: str | None, run_id: str | None) -> str:
    """https://huggingface.co/docs/trackio: what the dashboard reads of its address."""
    if project is None:
        return address
    query = {"project": project, **({} if run_id is None else {"run_ids": run_id})}
    return f"{address}/?{urlencode(query, safe='{}', quote_via=quote)}"


def _without_token(url: str) -> tuple[str, str | None]:
    """The address that may be shown, and what Trackio puts behind it as its write token."""
    parts = urlsplit(url.strip())
    query = dict(parse_qsl(parts.query))
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), query.get("write_token")


def _check_address(url: object) -> None:
    if not isinstance(url, str) or not url.startswith(("https://", "http://")) or not urlsplit(url).netloc:
        raise ConfigError(
            "server_url= or TRACKIO_SERVER_URL is no address: write it as server_url='https://trackio.example.com'"
        )


def _check_server(url: object) -> None:
    if url is None:
        return
    _check_address(url)
    if "write_token" in str(url) or "@" in urlsplit(str(url)).netloc:
        raise ConfigError(
            "server_url= holds a token, which would be pickled with the task: pass secret=..., or set "
            "TRACKIO_WRITE_TOKEN or TRACKIO_SERVER_URL where the task runs"
        )


def _check_project(project: str | None) -> None:
    if project is None:
        return
    kept_as = "".join(c for c in project if c.isalnum() or c in "-_")
    if kept_as.startswith(_RESERVED_PREFIX) or any(kept_as.endswith(s) and kept_as != s for s in _RESERVED_SUFFIXES):
        raise ConfigError(f"project={project!r}: Trackio needs this name for its own files of another project")
