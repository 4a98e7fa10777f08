"""Open a Trackio run, in files or on a server."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import new_id, run_config
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.trackio import SPACE, check_address, vendor, without_token
from flyteplugins_tracking.trackers.trackio.run import TrackioHandle, cannot_write

logger = logging.getLogger(__name__)

_DEFAULT_PROJECT = "default"
_POLL_S = 0.1
# The longest time for one request to a server, in seconds.
_REQUEST_S = 10.0


def open_run(request: RunRequest, tracker: Any) -> TrackioHandle:
    """Open the run of `tracker`, the `TrackioTracker`.

    Raises:
        TrackerUnavailableError: The directory or the server cannot be used.
    """
    vendor.PARTS.require()
    if os.environ.get("TRACKIO_SPACE_ID"):
        raise ConfigError(f"TRACKIO_SPACE_ID is set: {SPACE}")
    since = tracker.started_at
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
    config, options, is_primary = request.config, request.config.options, request.plan.primary
    stored_config = {} if stored is None else {k: v for k, v in stored.config.items() if not k.startswith("_")}
    run = vendor.run_class()(
        url=url,
        project=project,
        client=client,
        name=stored.name if stored is not None else config.name or run_id,
        run_id=run_id,
        group=config.group or request.plan.group or (stored and stored.config.get("_Group")),
        config={**stored_config, **_tags_and_notes(config), **run_config(request)} if is_primary else stored_config,
        server_base_url=url,
        existing_runs=[],
        initial_last_step=-1,  # the handle counts the steps
        webhook_url=options.get("webhook_url"),
        webhook_min_level=options.get("webhook_min_level"),
        **_monitors(request),
    )
    run.check()
    for key in ("_Created", "_Username"):
        if stored is not None and stored.config.get(key):
            run.config[key] = stored.config[key]
    if not is_primary or store.shows_config:
        vendor.leave_config_to_primary(run)
    return run


def _tags_and_notes(config: TrackingConfig) -> dict[str, Any]:
    """Return tags and notes as a part of the config: Trackio has no other place for them."""
    values = {"tags": None if config.tags is None else list(config.tags), "notes": config.notes}
    return {name: value for name, value in values.items() if value is not None}


def _monitors(request: RunRequest) -> dict[str, Any]:
    """Return the arguments for metrics of the system: one rank of a node logs them, by default if Trackio would."""
    options = request.config.options
    is_first = request.config.run_mode != "shared" or request.leads_node
    cpu, gpu = options.get("auto_log_cpu"), options.get("auto_log_gpu")
    return {
        "auto_log_cpu": is_first and (vendor.has_cpu_metrics() if cpu is None else cpu),
        "cpu_log_interval": options.get("cpu_log_interval") or 10.0,
        "auto_log_gpu": is_first and (vendor.has_gpu_metrics() if gpu is None else gpu),
        "gpu_log_interval": options.get("gpu_log_interval") or 10.0,
    }


def _find(store: Any, run_id: str, since: float, request: RunRequest) -> Any:
    """Return the run if it exists. On other ranks than the primary, wait until that one has opened it."""
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
                raise TrackerUnavailableError(cannot_write(store.place, failure)) from failure
            raise TrackerUnavailableError(
                f"Trackio: run {run_id} was not found in {store.place} within init_timeout_s="
                f"{request.config.init_timeout_s:g}: its primary rank has not opened it there. With several nodes, set "
                "TRACKIO_DIR to a directory that they all share, or log to a server (server_url=), or have a run for "
                "each node (rank_scope='worker')."
            )
        time.sleep(_POLL_S)


def _local_store(project: str, request: RunRequest) -> Any:
    from flyteplugins_tracking.trackers.trackio.store import Database, Inbox

    kept_as = vendor.name_in_files(project)
    if kept_as != project and request.plan.primary:
        logger.warning("Trackio: project %r is kept as %r, together with other projects of this name", project, kept_as)
    try:
        vendor.check_project(project)
        os.makedirs(vendor.directory(), exist_ok=True)
        inbox = vendor.inbox()
        if inbox is None:
            return Database(vendor.database(project, create=request.plan.primary))
        inbox.mkdir(exist_ok=True)
        return Inbox(Database(vendor.database(project, create=False)), inbox)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise TrackerUnavailableError(cannot_write(str(vendor.directory()), error)) from error


def _server_store(url: str, client: Any, project: str) -> Any:
    from flyteplugins_tracking.trackers.trackio.store import Server

    return Server(url, client, project)


def _server(request: RunRequest) -> tuple[str | None, str | None]:
    """Return the server's address and the write token; None twice to log to files."""
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
    """Return a client of the server.

    Raises:
        TrackerUnavailableError: The server does not answer, or does not take the token.
    """
    import httpx

    try:
        timeout_s = max(0.5, min(_REQUEST_S, (deadline - time.monotonic()) / 3))
        answer = httpx.get(f"{url}/version", timeout=timeout_s)
        if not answer.is_success or "api_version" not in answer.json():
            raise ValueError("it does not answer as a Trackio server does")
        client = vendor.remote_client(url, token, timeout_s)
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
