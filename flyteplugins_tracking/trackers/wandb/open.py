"""Open a W&B run, or attach to a neighbour's; and open it again. The vendor's package is imported here."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.peers.role import Place
from flyteplugins_tracking.trackers.wandb.options import HOST, api_of, check_id, imposed_id
from flyteplugins_tracking.trackers.wandb.run import WandbHandle, directory, global_run, without_reports
from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)
# Runs are opened again at any time, by any thread. Reentrant: by a signal's handler too.
_opening = threading.RLock()
_NOT_ONLINE = ("offline", "disabled", "dryrun")
# In place of vendor's defaults that lose rows, in seconds. What the user or a variable sets goes before.
_SAFER = {
    # 60: longer than a run's end is waited for, so that a server that is back would not be noticed. And 20 tries.
    "x_file_stream_retry_wait_max_seconds": 8,
    "x_graphql_retry_wait_max_seconds": 8,
    "x_graphql_retry_max": 10_000,
    "x_file_transfer_retry_wait_max_seconds": 8,
    "x_file_transfer_retry_max": 10_000,
    # 15: what SIGKILL keeps from the local file. wandb-core outlives the process long enough to write once more.
    "x_transaction_log_flush_interval": 0.1,
}
# What wandb.init takes beyond its deadline.
_VENDOR_GRACE_S = 0.5
# How long a run that was ended by a signal may take to open again, before it goes on offline.
_REOPENING_S = 5.0
# What wandb.init waits for the server to say whose key it is.
_VIEWER_S = 5.0


def open_run(request: RunRequest) -> Handle:
    """See `Tracker.open`."""
    check_id(request.plan.run_id)
    drop_unusable_service()
    reopen = functools.partial(_reopen, request)
    place, open_own = Place.of(request), functools.partial(_open_own, request)
    if request.config.run_mode != "shared" and not place.has_peers:
        before = global_run()
        return WandbHandle(open_own(), before, request, reopen)
    # Loaded by those that share a run, and not by all that are decorated.
    from flyteplugins_tracking.trackers.wandb import shared

    if place.role == "host":
        return shared.open_for_neighbours(request, open_own, reopen)
    if place.role == "alone":
        return shared.open_alone(request, open_own, reopen)
    is_disabled = _mode(request) == "disabled"
    try:
        return shared.attach(request, is_disabled)
    except TrackerUnavailableError as unavailable:
        if is_disabled:
            return shared.open_alone(request, open_own, reopen)
        error = unavailable
    return shared.open_alone(request, lambda: _degraded(request, error), reopen)


def _open_own(request: RunRequest) -> Any:
    try:
        run = _init(request)
    except TrackerUnavailableError as unavailable:
        if request.config.if_unavailable == "raise":
            _restart_service()  # wandb-core keeps the run's id, and would refuse it when the user tries again
        run = _degraded(request, unavailable)
    if isinstance(request.config.config, str) and request.plan.primary:
        run.config.update(dict(request.facts), allow_val_change=True)
    return run


def _degraded(request: RunRequest, unavailable: TrackerUnavailableError) -> Any:
    if request.config.if_unavailable == "raise":
        raise unavailable
    run = _init_offline(request)
    logger.warning(
        "%s This run is logged offline. Send it when W&B is there: wandb sync %s", unavailable, directory(run)
    )
    return run


def _resuming(request: RunRequest, run: Any) -> RunRequest:
    """To go on with `run`: where it is, whatever the variables say by now."""
    config = request.config
    options = {k: v for k, v in config.options.items() if k not in ("resume", "resume_from", "fork_from")}
    entity = run.entity or options.get("entity")
    return replace(
        request,
        plan=replace(request.plan, run_id=run.id),
        config=replace(
            config, project=run.project or config.project, options={**options, "entity": entity, "reinit": "create_new"}
        ),
        deadline=time.monotonic() + _REOPENING_S,
    )


def _init(request: RunRequest, mode: str | None = None) -> Any:
    import wandb

    try:
        arguments = _init_arguments(request, mode)
        if not _is_online(arguments):
            return wandb.init(**arguments)
        with _opening, _viewer_known(request.deadline):
            settings = arguments["settings"]
            # What the user has set over our deadline counts too.
            longer_s = settings.init_timeout - request.config.init_timeout_s
            settings.init_timeout = max(1.0, request.deadline + longer_s - time.monotonic() - _VENDOR_GRACE_S)
            return wandb.init(**arguments)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError, ConnectionError, TimeoutError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise TrackerUnavailableError(
            f"W&B cannot be used: {cause}. Check WANDB_BASE_URL, the API key and the network; or log offline with "
            "WANDB_MODE=offline or if_unavailable='degrade'."
        ) from error
    except OSError as error:
        raise TrackerUnavailableError(
            f"W&B cannot write its local files: {error}. Make room there, or set WANDB_DIR to another directory."
        ) from error


def _reopen(request: RunRequest, run: Any, offline: bool) -> Any:
    """Open a run again that a signal has ended, or wandb-core's end; offline where W&B has not answered in time."""
    request = _resuming(request, run)
    drop_unusable_service()
    with _opening, nullcontext() if run.id == imposed_id() else _outside_sweep():
        if not offline:
            with contextlib.suppress(TrackerUnavailableError):
                return _init(request)
        return _init_offline(request)


@contextlib.contextmanager
def _outside_sweep() -> Iterator[None]:
    """Have `wandb.init` take the id, project and entity that it is given, also while a trial of a sweep runs."""
    from wandb.sdk import wandb_setup

    setup = wandb_setup.singleton()
    settings, parameters = setup.settings, setup._sweep_config
    trial = settings.sweep_id, settings.sweep_param_path
    settings.sweep_id = settings.sweep_param_path = setup._sweep_config = None
    try:
        yield
    finally:
        (settings.sweep_id, settings.sweep_param_path), setup._sweep_config = trial, parameters


def _init_offline(request: RunRequest) -> Any:
    """Open the run offline after an attempt online. wandb-core keeps that one's id, and refuses it."""
    if not _restart_service() and request.plan.run_id is not None:
        run_id = f"{request.plan.run_id}-{os.urandom(3).hex()}"
        logger.warning("W&B: run %s goes on offline as %s: other runs are open here", request.plan.run_id, run_id)
        request = replace(request, plan=replace(request.plan, run_id=run_id))
    return _init(request, mode="offline")


def _restart_service() -> bool:
    """Start wandb-core anew, unless a run is open in it. What it has not sent is in the local files."""
    from wandb.sdk import wandb_setup

    setup = wandb_setup.singleton()
    try:
        connection = setup._connection
        if connection is None:
            return True
        is_alive = connection._proc._process.poll() is None
        if is_alive and any(not run._is_finished for run in setup._active_runs):
            return False
        connection._finalizer.close()
        connection._proc._process.kill()
        # As its own teardown, but for the message, which would only fail.
        connection._torn_down = True
        connection._cleanup()
        connection._proc.join()
    except (AttributeError, TypeError):  # another version's, or another process's
        return False
    os.environ.pop("WANDB_SERVICE", None)
    setup._connection = None
    return True


def _is_online(arguments: Mapping[str, Any]) -> bool:
    return (arguments.get("mode") or _effective(arguments["settings"]).mode) not in _NOT_ONLINE


@contextlib.contextmanager
def _viewer_known(deadline: float) -> Iterator[None]:
    """Ask whose key it is once, and before `wandb.init`, which asks a silent server for 5 s again and again.

    Where the deadline is too near for it, nobody asks: it is for a message and for the account's defaults.
    """
    from wandb.sdk import wandb_setup

    setup = wandb_setup.singleton()
    if getattr(setup, "_connection", None) is None:
        with without_reports():
            setup.ensure_service()
    try:
        is_time = deadline - time.monotonic() > 2 * _VIEWER_S
        who, session = setup._resolve_identity() if is_time else None, setup._session_identity
    except AttributeError:  # another version's
        yield
        return

    def known() -> Any:
        setup._session_identity = session if who else None
        return who

    setup._resolve_identity = known
    try:
        yield
    finally:
        vars(setup).pop("_resolve_identity", None)


def _init_arguments(request: RunRequest, mode: str | None = None) -> dict[str, Any]:
    """What `wandb.init` is called with. `WANDB_*` variables go before what we would add, not before the user.

    Raises:
        TrackerUnavailableError: The run would be online, and there is no key.
    """
    plan, config = request.plan, request.config
    mode = mode or config.options.get("mode")
    arguments = {
        **{name: value for name, value in config.options.items() if name != HOST},
        "mode": mode,
        "settings": _settings(mode, request),
        "project": config.project,
        **(_metadata(request) if plan.primary else {}),
        **_id_arguments(request),
        "group": config.group or (None if os.environ.get("WANDB_RUN_GROUP") else plan.group),
    }
    _place(arguments, request)
    if arguments.get("dir") is not None:
        arguments["dir"] = os.fspath(arguments["dir"])  # which downloads a FlyteDirectory
    if _has_open_run():
        arguments.setdefault("reinit", "create_new")
    return {name: value for name, value in arguments.items() if value is not None}


def _has_open_run() -> bool:
    """Whether `wandb.init` would give another's run: it has a list of its own beside `wandb.run`."""
    from wandb.sdk import wandb_setup

    return global_run() is not None or getattr(wandb_setup.singleton(), "most_recent_active_run", None) is not None


def _place(arguments: dict[str, Any], request: RunRequest) -> None:
    """Make `arguments` those of one client among several of a run, if it is that."""
    place, plan, settings = Place.of(request), request.plan, arguments["settings"]
    if place.role == "guest" and request.info is not None:  # that has not found its host
        settings.x_sync_dir_suffix = f"rank-{request.info.rank}"
    elif place.has_peers and not plan.primary:
        # Nodes may share a file system, and start in the same second.
        settings.x_sync_dir_suffix = plan.label or ""
    if not plan.primary and place.has_peers:
        _leave_to_primary(arguments)
    if not place.has_peers or not _is_online(arguments):
        return
    arguments["mode"] = "shared"
    settings.x_label = settings.x_label or plan.label
    settings.x_primary = settings.x_update_finish_state = plan.primary
    if not plan.primary:
        # It would send the config back that it has found, over the one of the primary.
        for name in ("resume", "resume_from", "fork_from"):
            arguments.pop(name, None)


def _leave_to_primary(arguments: dict[str, Any]) -> None:
    """Say nothing about the run itself, by a variable either: it would take the place of what the primary says."""
    for name in ("group", "job_type"):
        arguments.pop(name, None)
    # None would be as if it were not set.
    for name in ("run_group", "run_job_type", "run_name", "run_notes"):
        setattr(arguments["settings"], name, "")
    arguments["settings"].run_tags = ()


def _is_joined(request: RunRequest) -> bool:
    """Whether the run is that of the task that has called this one."""
    return request.info is None and not request.plan.primary


def _metadata(request: RunRequest) -> dict[str, Any]:
    """What the primary alone passes."""
    config = request.config
    values = config.config if isinstance(config.config, str) else {**request.facts, **config.config}
    return {"name": config.name, "tags": config.tags, "notes": config.notes, "config": values}


def _id_arguments(request: RunRequest) -> dict[str, Any]:
    """The id, to be resumed: after a restart or a retry the same run goes on and keeps its rows."""
    options = request.config.options
    if request.plan.run_id is None or "resume_from" in options:
        return {}
    if request.plan.run_id == imposed_id():
        return {} if "resume" in options or "WANDB_RESUME" in os.environ else {"resume": "allow"}
    if {"resume", "fork_from"} & options.keys() or "WANDB_RESUME" in os.environ:
        return {"id": request.plan.run_id}
    return {"id": request.plan.run_id, "resume": "allow"}


def _settings(mode: str | None, request: RunRequest) -> Any:
    """The user's settings, the deadlines where they set none, and the key. A copy: `wandb.init` writes into it."""
    settings = _given_settings(request)
    effective = _effective(settings)
    for name, value in _SAFER.items():
        if name not in effective.model_fields_set:
            setattr(settings, name, value)
    if (mode or effective.mode) not in _NOT_ONLINE:
        _authenticate(settings, effective, request)
    return settings


def _given_settings(request: RunRequest) -> Any:
    import wandb

    settings = wandb.Settings(
        init_timeout=request.config.init_timeout_s,
        finish_timeout=request.config.finish_timeout_s,
        finish_timeout_raises=True,
    )
    given = request.config.options.get("settings")
    if isinstance(given, Mapping):
        settings.update_from_dict(dict(given))
    elif given is not None:
        settings.update_from_settings(given)
    host = request.config.options.get(HOST)
    if _is_joined(request) and host:
        settings.base_url = host  # the server that the run is on
        return settings
    if host and "base_url" not in settings.model_fields_set and not os.environ.get("WANDB_BASE_URL"):
        server = api_of(host)
        if server is not None:
            settings.base_url = server
    return settings


def _mode(request: RunRequest) -> str:
    """The mode that is asked for, by an argument, a setting or a variable."""
    mode: str = request.config.options.get("mode") or _effective(_given_settings(request)).mode
    return mode


def _effective(settings: Any) -> Any:
    """`settings` over those of the session: the environment's and the files'."""
    from wandb.sdk import wandb_setup

    effective = wandb_setup.singleton().settings.model_copy()
    effective.update_from_settings(settings)
    return effective


def _authenticate(settings: Any, effective: Any, request: RunRequest) -> None:
    """Put the user's secret into `settings`, or make sure that W&B finds a key rather than prompt on a rank."""
    host = effective.base_url
    key = request.read_secret()
    if key:
        settings.api_key = key.strip()  # a trailing line end would be refused, with the key in the text
        # As wandb.init does, which then asks whose key it is.
        _use_key(settings.api_key, host, effective.app_url)
    elif not request.may_prompt and not has_credentials(host):
        raise TrackerUnavailableError(
            "W&B: there is no API key for this process. Run `wandb login`, set WANDB_API_KEY, or pass secret= to "
            "tracking_init (under flytekit, secret_requests= to the task too); or log offline with "
            "WANDB_MODE=offline or if_unavailable='degrade'."
        )


def _use_key(key: str, host: str, app_url: str | None) -> None:
    with contextlib.suppress(ImportError):
        from wandb.sdk.lib import wbauth

        auth = wbauth.AuthApiKey(host=wbauth.HostUrl(host, app_url=app_url), api_key=key)
        wbauth.use_explicit_auth(auth, source="tracking_init")


def has_credentials(host: str) -> bool:
    """Whether `wandb.init` will find a key. `wandb.login(host=)` would ask the server and write to the user's files."""
    try:
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:
        return True  # then wandb.init tells
    return authenticate_session(host=host, source="tracking_init", prompt=False) is not None


def drop_unusable_service() -> None:
    """Forget a wandb-core that has died, and the parent's (WANDB_SERVICE): a run in it ends when the parent's does."""
    from wandb.sdk import wandb_setup

    setup = wandb_setup.singleton()
    process = getattr(getattr(getattr(setup, "_connection", None), "_proc", None), "_process", None)
    if process is not None and process.poll() is not None:
        _restart_service()
    if getattr(setup, "_connection", None) is None:
        os.environ.pop("WANDB_SERVICE", None)
