"""Open a Trackio run, in files or on a server."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import new_id, run_config
from flyteplugins_tracking.trackers.config import OWN, own_values
from flyteplugins_tracking.trackers.outbox import AwayError, until
from flyteplugins_tracking.trackers.trackio import (
    SPACE,
    check_address,
    default_directory,
    vendor,
    without_token,
)
from flyteplugins_tracking.trackers.trackio.run import TrackioHandle, cannot_write, is_outage
from flyteplugins_tracking.trackers.trackio.store import Database, Server, Store, Stored

_DEFAULT_PROJECT = "default"
_PASSED_ON = ("webhook_url", "webhook_min_level", "cpu_log_interval", "gpu_log_interval")
# The longest time for one request to a server, in seconds.
_REQUEST_S = 10.0


def open_run(request: RunRequest, tracker: Tracker) -> TrackioHandle:
    """Open the run, or continue it.

    Raises:
        TrackerUnavailableError: There is no token, or no primary rank.
        AwayError: The server or the directory cannot be used.
        ConfigError: The project or the place cannot be used.
    """
    vendor.require()
    if os.environ.get("TRACKIO_SPACE_ID"):
        raise ConfigError(f"TRACKIO_SPACE_ID is set: {SPACE}")
    url, token = _server(request)
    if url is None and os.environ.get("TRACKIO_STORAGE_MODE", "").strip().lower() == "jsonl":
        raise ConfigError(
            "TRACKIO_STORAGE_MODE=jsonl is set, and runs are kept in databases here: unset it. If TRACKIO_DIR is on a "
            "network file system, log to a server (server_url=) or to a local disk"
        )
    project = request.config.project or _DEFAULT_PROJECT
    vendor.check_project(project)
    request = replace(request, plan=replace(request.plan, run_id=request.plan.run_id or new_id()))
    client = None if url is None else _client(url, token, request.deadline)
    store = _local_store(project) if url is None else Server(url, client, project)
    stored = _find(store, request)
    run = _new_run(request, project, stored, url, client)
    try:
        return TrackioHandle(request, tracker, run, store, stored)
    except BaseException:
        vendor.finish(run)
        raise


def _new_run(request: RunRequest, project: str, stored: Stored | None, url: str | None, client: Any) -> Any:
    config, options, is_primary = request.config, request.config.options, request.plan.primary
    known = {} if stored is None else stored.config
    given = run_config(request)
    # Trackio has no other place for these.
    own = {"tags": None if config.tags is None else list(config.tags), "notes": config.notes} if is_primary else {}
    own = {**own_values(known), **own_values(given), **{key: value for key, value in own.items() if value is not None}}
    given.update({OWN: own} if own else {})
    cpu, gpu = options.get("auto_log_cpu"), options.get("auto_log_gpu")
    run = vendor.run_class()(
        url=url,
        project=project,
        client=client,
        name=stored.name if stored is not None else config.name or request.plan.run_id,
        run_id=request.plan.run_id,
        group=request.group or known.get("_Group"),
        config={**{k: v for k, v in known.items() if not k.startswith("_")}, **(given if is_primary else {})},
        server_base_url=url,
        existing_runs=[],
        initial_last_step=-1,  # the handle counts the steps
        auto_log_cpu=request.measures_node and (find_spec("psutil") is not None if cpu is None else cpu),
        auto_log_gpu=request.measures_node and gpu in (None, True),
        **{name: options[name] for name in _PASSED_ON if options.get(name) is not None},
    )
    vendor.take_over(run)
    run.config.update({key: known[key] for key in ("_Created", "_Username") if known.get(key)})
    return run


def _find(store: Store, request: RunRequest) -> Stored | None:
    """Return the run if it exists. On other ranks than the primary, wait until that one has opened it."""
    run_id = str(request.plan.run_id)

    def find() -> list[Stored | None]:
        try:
            stored = store.find(run_id)
        except Exception as error:
            raise cannot_write(store.place, error) from error
        is_awaited = not request.plan.ends_run and store.shows_config
        return [stored] if stored is not None or not is_awaited else []

    if found := until(request.deadline, find):
        return found[0]
    raise TrackerUnavailableError(
        f"Trackio: run {run_id} was not found in {store.place} within init_timeout_s="
        f"{request.config.init_timeout_s:g}: its primary rank has not opened it there. With several nodes, set "
        "TRACKIO_DIR to a directory that they all share, or log to a server (server_url=), or have a run for "
        "each node (rank_scope='worker').",
        is_outage=isinstance(store, Server),
    )


def _local_store(project: str) -> Store:
    directory = default_directory()
    try:
        os.makedirs(directory, exist_ok=True)
        return Database(vendor.database(project))
    except Exception as error:
        raise cannot_write(directory, error) from error


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
            f"{address} wants a write token: pass secret=..., or set TRACKIO_WRITE_TOKEN. `trackio show` prints it.",
            is_outage=False,
        )
    return address, token


def _client(url: str, token: str | None, deadline: float) -> Any:
    """Return a client of the server.

    Raises:
        AwayError: The server does not answer, or does not take the token.
    """
    import httpx

    timeout_s = max(0.5, min(_REQUEST_S, (deadline - time.monotonic()) / 3))

    def ask() -> tuple[Any, Any]:
        answer = httpx.get(f"{url}/version", timeout=timeout_s).raise_for_status()
        if "api_version" not in answer.json():
            raise ValueError("it does not answer as a Trackio server does")
        client = vendor.remote_client(url, token, timeout_s)
        return client, client.predict(api_name="/get_run_mutation_status")

    try:
        # `timeout_s` is for each part of an answer: one that drips would last for ever.
        client, access = threads.call_within(3 * timeout_s, ask)
    except Exception as error:
        text = "Check server_url=, TRACKIO_SERVER_URL, the network, and that `trackio show --host 0.0.0.0` runs there"
        is_away = is_outage(error) and not isinstance(error, httpx.InvalidURL)
        raise AwayError(f"the server at {url} does not answer: {error}. {text}", is_outage=is_away) from error
    if not access.get("allowed"):
        text = "check secret= or TRACKIO_WRITE_TOKEN. `trackio show` prints it"
        raise AwayError(f"the server at {url} does not take the write token: {text}", is_outage=False)
    return client
