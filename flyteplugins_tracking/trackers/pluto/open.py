"""Open a Pluto run within the deadline, with a directory of this rank's own for the client's files."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from flyteplugins_tracking._util.plain import finite
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers import client
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.outbox import AwayError, may_pass, until
from flyteplugins_tracking.trackers.pluto import stored_key, vendor
from flyteplugins_tracking.trackers.pluto.sink import REQUEST_S, Service
from flyteplugins_tracking.trackers.pluto.vendor import Queue

logger = logging.getLogger(__name__)

_PASSED_ON = ("fork_run_id", "fork_step", "inherit_config", "inherit_tags")


class UnavailableError(AwayError):
    """The service cannot be used now."""

    fix = "Check PLUTO_API_KEY, the PLUTO_URL_* variables and the network."


def open_op(request: RunRequest) -> tuple[Any, Queue]:
    """Create the run, or attach to it.

    Returns:
        The client's run object, and its queue. In the client's mode "noop", nothing comes to that.

    Raises:
        UnavailableError: The server does not answer in time, or refuses the key.
        TrackerUnavailableError: There is no key, or no room for the client's files.
        TrackerNotInstalledError: This version of the client cannot be used.
    """
    vendor.require()
    settings = _settings(request)
    queue = Queue(settings.dir, request.measures_node)
    settings.disable_system_metrics |= settings.mode == "noop"  # the client's monitor needs a server
    if settings.mode == "noop":
        return _init(request, settings), queue
    try:
        vendor.prepare(settings, _key(settings, request), queue)
        _await_service(settings, request)
        os.makedirs(settings.dir, exist_ok=True)
        op = _init_in_time(request, settings)
        vendor.check_run(op)
        vendor.silence_log_files(settings.dir)
    except BaseException as error:
        remove_directory(settings.dir)
        if isinstance(error, OSError):
            raise TrackerUnavailableError(
                f"Pluto cannot write its local files: {error}. Make room there, or set PLUTO_DIR to another directory.",
                is_outage=not isinstance(error, PermissionError),
            ) from error
        raise
    if request.plan.ends_run and request.config.notes is not None:  # the client has no call for that
        queue.post("notes/update", {"notes": request.config.notes[:1000]})
    return op, queue


def _settings(request: RunRequest) -> Any:
    """Return the client's settings: from its variables, the user and us."""
    import pluto

    options = request.config.options
    settings = pluto.setup(dict(options.get("settings") or {}))
    settings.dir = _own_directory(request, options.get("dir") or settings.dir)
    if request.config.project:
        settings.project = vendor.clean(request.config.project)
    if not request.plan.primary and "x_log_level" not in (options.get("settings") or {}):
        settings.x_log_level = max(logging.WARNING, settings.x_log_level)  # one rank prints the run's address
    settings.compat = dict(settings.compat)
    settings.meta = []
    settings.x_sigterm_status_enabled = False  # the lifecycle sends the status
    asked = getattr(settings, "disable_system_metrics", False)  # before 0.0.28, there is no such setting
    settings.disable_system_metrics = asked or not request.measures_node
    settings.disable_console |= bool(request.earlier)  # that of `send`
    settings.x_file_stream_timeout_seconds = min(
        settings.x_file_stream_timeout_seconds, max(1.0, request.deadline - time.monotonic()), REQUEST_S
    )
    return settings


def _own_directory(request: RunRequest, parent: Any) -> str:
    """Return a directory that no other rank and no other attempt uses."""
    info = request.info
    rank, attempt = (info.rank, info.restart_count) if info else (0, 0)
    name = vendor.name_of_directory(str(request.plan.run_id), rank, attempt)
    return os.path.join(os.path.abspath(os.path.expanduser(os.fspath(parent))), vendor.FOLDER, name)


def _key(settings: Any, request: RunRequest) -> str | None:
    """Return the key: the user's secret, a variable, or the one that `pluto login` has stored."""
    key = request.read_secret() or vendor.key_of(settings) or _stored_key()
    if not key and not request.may_prompt:
        raise client.missing_key_error("Pluto", "Run `pluto login`, set PLUTO_API_KEY")
    if not key:
        return None
    key = key.strip()  # the service refuses a trailing line end, and shows the key in the error
    if not key.isascii() or not key.isprintable() or " " in key:
        raise TrackerUnavailableError(
            "Pluto: the API key has a space, or a character that is not printable ASCII. Check where it comes from.",
            is_outage=False,
        )
    return key


def _stored_key() -> str | None:
    """Return the key that `pluto login` has stored."""
    if sys.platform != "darwin":
        return stored_key()[1]
    import keyring

    with contextlib.suppress(Exception):  # no backend
        return keyring.get_password("pluto", "pluto")
    return None


def _await_service(settings: Any, request: RunRequest) -> None:
    """Wait until the service answers. Other ranks than the primary wait until that one has made the run.

    The rank that comes first would give the run its name.

    Raises:
        UnavailableError: The service does not answer, or refuses the key.
    """
    service = Service(settings, request.deadline)
    limit = f"at {settings.url_api} within init_timeout_s={request.config.init_timeout_s:g}"
    body = json.dumps({"externalId": request.plan.run_id, "projectName": settings.project})

    def is_there() -> bool:
        try:
            answer = service.post("/api/runs/resume", body)
            status = answer.status_code
            if status < 300:
                int(answer.json()["runId"])
        except (ValueError, KeyError, TypeError):
            raise UnavailableError(f"it does not answer as Pluto does: check the address, {limit}") from None
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}, {limit}") from None
        _check_status(status, limit)
        if status == 404 and not request.plan.ends_run:
            raise UnavailableError(f"the primary rank has not created the run, {limit}")
        return True

    until(request.deadline, is_there)


def _check_status(status: int, limit: str) -> None:
    """Raise an HTTP status that is neither a success nor that of a run which is not there."""
    if status in (401, 403):
        raise UnavailableError(f"the service refuses the API key, {limit}", is_outage=False)
    if status >= 300 and status != 404:
        in_trouble = may_pass(status) or status == vendor.UNPROCESSABLE
        raise UnavailableError(f"HTTP {status}, {limit}", is_outage=in_trouble)


def _init_in_time(request: RunRequest, settings: Any) -> Any:
    """Call `_init` in a thread. A run that opens after the deadline is ended again.

    Raises:
        UnavailableError: The run was not open before the deadline.
    """
    outcome: Future[Any] = Future()

    def open_run() -> None:
        try:
            outcome.set_result(_init(request, settings))
        except BaseException as error:  # for the thread that waits
            outcome.set_exception(error)

    opening = Thread(target=open_run, name="flyteplugins_tracking.pluto", daemon=True)

    def end(exit_code: int | None, limit_s: float) -> None:
        """End the run, now or when it is open: nobody waits for it."""
        outcome.add_done_callback(lambda _: _end_unwanted(outcome, request, settings, exit_code))
        opening.join(limit_s)

    opening.start()
    with client.ended_if_interrupted(request, end):
        if not wait([outcome], max(0.0, request.deadline - time.monotonic())).done:
            end(1 if request.config.if_unavailable == "raise" else None, 0.0)
            limit = f"init_timeout_s={request.config.init_timeout_s:g}"
            raise UnavailableError(f"{settings.url_api} has not answered within {limit}")
        error = outcome.exception()
        # The client has RuntimeErrors for the service's answers.
        if isinstance(error, (RuntimeError, ConnectionError, json.JSONDecodeError)):
            status = vendor.status_of_error(error)
            raise UnavailableError(first_line(error), is_outage=status is None or may_pass(status)) from error
        return outcome.result()


def _end_unwanted(outcome: Future[Any], request: RunRequest, settings: Any, exit_code: int | None) -> None:
    if outcome.exception() is None:
        end_op(outcome.result(), request, exit_code)
        remove_directory(settings.dir)


def end_op(op: Any, request: RunRequest, exit_code: int | None) -> None:
    """End a run that no handle ends: close it only, if `exit_code` is None or if another rank ends it."""
    if exit_code is None or not request.plan.ends_run:
        type(op).close(op)
    else:
        # The client's own codes, and not what the handle makes of its methods.
        type(op).finish(op, signal.SIGTERM if client.status_of(exit_code) == "killed" else exit_code)


def _init(request: RunRequest, settings: Any) -> Any:
    """Call `pluto.init`."""
    options = request.config.options
    arguments = {name: value for name, value in options.items() if name in _PASSED_ON and value is not None}
    # The client's reports on itself: without a network, the process's end waits for them.
    os.environ.setdefault("PLUTO_DISABLE_TELEMETRY", "1")
    op = vendor.init(
        dir=settings.dir,
        settings=settings,
        run_id=request.plan.run_id,
        resume=True,
        **(_metadata(request) if request.plan.ends_run else {"name": request.plan.run_id}),
        **arguments,
    )
    atexit.unregister(op.finish)
    return op


def _metadata(request: RunRequest) -> dict[str, Any]:
    """Return the arguments that only the primary rank passes."""
    config, tags, group = request.config, list(request.config.tags or ()), request.group
    if group and not any(tag.startswith("group:") for tag in tags):  # the service takes one group
        tags.append(f"group:{group}")
    return {"name": config.name or request.plan.run_id, "config": finite(client.run_config(request)), "tags": tags}


def remove_directory(directory: str) -> None:
    """Remove the directory of a client's files, and its parent if that is empty then."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(directory))
