"""Open a W&B run. `wandb` is imported here, on ranks that have a run."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.secrets import masked
from flyteplugins_tracking._util.text import first_line, without_credentials
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers import client
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.config import OWN
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.wandb import inner, outbox, roles, vendor
from flyteplugins_tracking.trackers.wandb.attempts import Place, await_count, directories_of
from flyteplugins_tracking.trackers.wandb.names import (
    HOST,
    api_of,
    check_characters,
    drop_empty_variables,
    forced_run_id,
    given_settings,
)
from flyteplugins_tracking.trackers.wandb.run import HANDLE, WandbHandle
from flyteplugins_tracking.trackers.wandb.sender import send_earlier
from flyteplugins_tracking.trackers.wandb.shared import SharedHandle, config_of

logger = logging.getLogger(__name__)
_OFFLINE = "log offline with WANDB_MODE=offline"
_DEGRADED = f"{_OFFLINE} or if_unavailable='degrade'"
_NOT_ONLINE = ("offline", "disabled", "dryrun")
# wandb's own values lose rows. Times are in seconds. What the user or a variable sets takes precedence.
_SAFER_SETTINGS = {
    **vendor.PATIENT,
    # wandb's 15 is the time whose rows SIGKILL keeps from the local file. wandb-core outlives the process long enough
    # to write once more.
    "x_transaction_log_flush_interval": 0.1,
}
# How often rows are sent if the next attempt could not send them, in seconds: wandb's 15 s is what a kill would lose.
_PROMPT_S = 2.0
# How long `wandb.init` may run beyond its own timeout, and how long it asks whose key it is.
_INIT_GRACE_S, _VIEWER_S = 0.5, 10.0
# How long after it wants a stop wandb-core may say why, in its log.
_LOG_S = 0.5
# How long W&B may take to say how many rows a run has.
_COUNT_S = 2.0


@contextmanager
def _settings_checked() -> Iterator[None]:
    """Raise W&B's refusal of a value as the library's error, which names the value.

    Raises:
        ConfigError: W&B does not accept an argument or a variable.
    """
    try:
        yield
    except Exception as error:
        kind = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
        if kind == "wandb.UsageError":
            raise ConfigError(f"W&B does not accept this: {masked(str(error))}") from None
        if kind == "pydantic_core.ValidationError":
            details: Any = error
            refused = (f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in details.errors())
            text = masked("; ".join(refused))
            raise ConfigError(f"W&B does not accept a value of settings=, or of a WANDB_ variable: {text}") from None
        raise


@_settings_checked()
def open_run(request: RunRequest) -> Handle:
    """Open this rank's run: an own one, or one that ranks share.

    Raises:
        TrackerUnavailableError: W&B, or a key for it, is not there.
        ConfigError: W&B does not accept an argument or a variable.
    """
    drop_empty_variables()
    vendor.disable_error_reports()
    inner.join_clients_calls()
    check_characters("run id", request.plan.run_id, "an id")
    vendor.drop_unusable_service()
    _warn_of_open_run(request)
    before = vendor.global_run()
    end = functools.partial(vendor.end_interrupted, request.plan.run_id, vendor.open_runs())
    with client.ended_if_interrupted(request, end):
        if request.config.run_mode != "shared" and not request.has_other_writers:
            return WandbHandle(_open_here(request), before, request)
        barrier = WriterBarrier.of_ranks(request, "W&B")
        run = _open_here(request)
        if request.has_other_writers:
            had_rows = bool(run.resumed) and run.starting_step > 0
            is_resumed = request.restart_count > 0 or had_rows if barrier is None else barrier.has_resumed(had_rows)
            vendor.set_resumed(run, is_resumed)
        return SharedHandle(run, before, request, barrier)


def _warn_of_open_run(request: RunRequest) -> None:
    """Tell about a run that the script has opened before the function, which gets none of the function's rows."""
    run = vendor.global_run()
    is_scripts = run is not None and not run.disabled and HANDLE not in vars(run) and not vendor.is_finished(run)
    if is_scripts and request.plan.primary:
        logger.warning(
            "W&B: run %s was opened before the decorated function, which has a run of its own, and wandb.log() in the "
            "function goes to that. For one run, remove wandb.init(), or call it in the function: there it returns the "
            "function's run, and adds its config",
            run.id,
        )


def _open_here(request: RunRequest) -> Any:
    """Open the run with W&B's client, in this process.

    Raises:
        TrackerUnavailableError: It cannot be opened, and not be logged offline: see `degrades`.
    """
    # A trial of a sweep has one run, whatever id is asked for. Of the ranks of a trial, the first one has it.
    has_trials_run = request.plan.first or forced_run_id() in (None, request.plan.run_id)
    try:
        with nullcontext() if has_trials_run else vendor.outside_sweep():
            run = _init(request)
    except TrackerUnavailableError as unavailable:
        # wandb-core keeps the run's id, and would refuse it offline, or when the user tries again.
        has_id = not vendor.restart_service()
        if not client.degrades(request, unavailable):
            raise
        run = _init(_with_another_id(request) if has_id else request, is_automatic=True)
        logger.warning(
            "%s This run is logged offline, in %s.%s The next attempt that finds it sends it. To send it when W&B is "
            "available, run: %s",
            unavailable.reason,
            outbox.run_directory(run),
            client.LOST_WITH_POD if _dies_with_pod(request) else "",
            how_to_send(outbox.directory_to_send(request, run)),
        )
    return run


def _init(request: RunRequest, *, is_automatic: bool = False) -> Any:
    """Open the run; offline if `is_automatic`, since W&B cannot be used."""
    import wandb

    try:
        mode = "offline" if is_automatic else request.config.options.get("mode")
        settings = _given_settings(request)
        effective = vendor.effective_settings(settings)
        is_online = (mode or effective.mode) not in _NOT_ONLINE
        _add_defaults(settings, effective, request)
        if is_online:
            _authenticate(settings, effective, request)
        arguments = _init_arguments(request, mode, settings, is_online)
        if is_online:
            return _init_online(request, arguments, effective)
        run = vendor.init(**arguments)
        outbox.open_outbox(request, run, is_automatic)
        return run
    except wandb.errors.UsageError:  # of an argument
        raise
    except (wandb.errors.Error, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
            text = "Free space in that directory, or set WANDB_DIR to another one."
            raise TrackerUnavailableError(
                f"W&B cannot write its local files: {error}. {text}", is_outage=False
            ) from error
        text, is_outage = "Check WANDB_BASE_URL, the API key and the network.", vendor.is_outage(error)
        raise TrackerUnavailableError(
            f"W&B cannot be used: {first_line(error)}. {text}",
            _DEGRADED if is_outage else _OFFLINE,
            is_outage=is_outage,
        ) from error
    finally:
        vendor.ask_again_at_exit()


def _init_online(request: RunRequest, arguments: dict[str, Any], effective: Any) -> Any:
    if arguments.get("dir") is not None:
        effective.root_dir = arguments["dir"]
    directory, place = Path(effective.wandb_dir), _place(arguments, effective)
    found = roles.look_up(request, place)
    if found is not None:
        _keep_earlier_console(arguments["settings"], effective)
    if request.config.has_roles and not request.plan.ends_run and found is not None:
        arguments["config"] = roles.config_beside(request, found, arguments["config"])
    left_s = request.deadline - time.monotonic() - _INIT_GRACE_S
    viewer_s = _VIEWER_S if left_s > 2 * _VIEWER_S else 0
    with vendor.opening.lock, nullcontext() if viewer_s else vendor.without_viewer():
        settings = arguments["settings"]
        left_s -= viewer_s
        # If the user's settings have a longer timeout than our argument, the difference is added.
        settings.init_timeout = max(1.0, left_s + settings.init_timeout - request.config.init_timeout_s)
        if place.run_id and not request.has_other_writers:
            await_count(directories_of(directory, place.run_id), request.deadline - _COUNT_S)
        elif request.config.has_roles and any(run.id == place.run_id for run in vendor.open_runs()):
            text = "this process has it open, and W&B has one writer of a run in each: start a process for each role"
            raise ConfigError(f"W&B: run {place.run_id} cannot be opened here: {text}")
        with _failing_completely(request, directory, place.run_id):
            run = vendor.init(**arguments)
        vendor.tolerate_outages()
        outbox.open_outbox(request, run, found=found)
        send_earlier(request, run)
        return run


@contextmanager
def _failing_completely(request: RunRequest, directory: Path, run_id: str) -> Iterator[None]:
    """If a `wandb.init` fails, say the server's status; remove its directory, if the run goes on in another one."""
    before = set(directory.glob("run-*"))
    try:
        yield
    except BaseException as error:
        # Other processes may open runs here too.
        made = [path for path in set(directory.glob(f"run-*-{run_id}*")) - before if vendor.is_own_run(path)]
        vendor.add_status(error, made)
        if request.config.if_unavailable == "degrade" and vendor.is_outage(error):
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
        raise


def _place(arguments: Mapping[str, Any], settings: Any) -> Place:
    """Return which run is to be opened. Its id is empty if W&B makes one."""
    entity, project = (str(arguments.get(name) or getattr(settings, name) or "") for name in ("entity", "project"))
    return Place(without_credentials(settings.base_url), entity, project, str(arguments.get("id") or ""))


def _with_another_id(request: RunRequest) -> RunRequest:
    """Return the request for a run that continues offline while wandb-core, with other runs, still has its id."""
    if request.plan.run_id is None:
        return request
    run_id = f"{request.plan.run_id}-{os.urandom(3).hex()}"
    text = "W&B: run %s continues offline with the id %s, because other runs are open in this process"
    logger.warning(text, request.plan.run_id, run_id)
    return replace(request, plan=replace(request.plan, run_id=run_id))


def _init_arguments(request: RunRequest, mode: str | None, settings: Any, is_online: bool) -> dict[str, Any]:
    """Return the arguments for `wandb.init`: the user's, else those of `WANDB_*` variables, else the library's."""
    plan, config = request.plan, request.config
    arguments = {
        **{name: value for name, value in config.options.items() if name != HOST},
        "mode": mode,
        "settings": settings,
        "project": config.project,
        **_id_arguments(request),
    }
    if plan.primary:
        arguments["config"] = config_of(request)
    elif config.roles is not None:  # the primary may look for the run when another rank has made it
        arguments["config"] = {OWN: client.run_config(request)[OWN]}
    if plan.ends_run:
        group = config.group or (None if os.environ.get("WANDB_RUN_GROUP") else plan.group)
        arguments |= {"name": config.name, "tags": config.tags, "notes": config.notes, "group": group}
    else:  # who ends the run describes it. Empty text: with None, wandb would use the variable
        arguments.pop("job_type", None)
        empty = dict.fromkeys(("run_group", "run_job_type", "run_name", "run_notes"), "")
        # The last: ranks and jobs may share a file system, and start in the same second.
        vendor.set_required(settings, **empty, run_tags=(), x_sync_dir_suffix=plan.label or "")
    if request.has_other_writers and is_online:
        arguments["mode"] = "shared"
        label = getattr(settings, "x_label", None) or plan.label or roles.name_of(request)
        vendor.set_required(settings, x_label=label, x_primary=plan.ends_run, x_update_finish_state=plan.ends_run)
        # With these, another writer would send the config that it has found back to W&B, over the primary's.
        for name in () if plan.ends_run else ("resume", "resume_from", "fork_from"):
            arguments.pop(name, None)
    if arguments.get("dir") is not None:
        arguments["dir"] = os.fspath(arguments["dir"])  # this downloads a FlyteDirectory
    may_be_returned = arguments.get("reinit") in (None, False, "default", "return_previous")
    if may_be_returned and (vendor.global_run() is not None or vendor.open_runs()):
        # wandb.init would return that run instead of a new one.
        arguments["reinit"] = "create_new"
    return {name: value for name, value in arguments.items() if value is not None}


def _id_arguments(request: RunRequest) -> dict[str, Any]:
    """Return the arguments that resume the run by its id: after a restart or a retry it keeps its rows."""
    options, run_id = request.config.options, request.plan.run_id
    if run_id is None or "resume_from" in options:
        return {}
    is_chosen = {"resume", "fork_from"} & options.keys() or "WANDB_RESUME" in os.environ
    # W&B warns of an id in a trial, which has its own.
    return {**({} if run_id == forced_run_id() else {"id": run_id}), **({} if is_chosen else {"resume": "allow"})}


def _add_defaults(settings: Any, effective: Any, request: RunRequest) -> None:
    """Set what wandb's own defaults would lose or hide, unless the user has set it."""
    for name, value in _SAFER_SETTINGS.items():
        vendor.set_default(settings, effective, name, value)
    # The second: a role that ends must see by then that the owner has started again.
    if _dies_with_pod(request) or request.config.roles is not None:
        vendor.set_default(settings, effective, "x_file_stream_transmit_interval", _PROMPT_S)
    if request.restart_count:
        _keep_earlier_console(settings, effective)
    if request.info is not None and request.config.run_mode == "shared" and not request.measures_node:
        vendor.set_default(settings, effective, "x_disable_stats", True)
    stop = _stopping(request, is_wanted_without_rows=getattr(effective, "stop_on_fatal_error", False))
    vendor.on_stop_request(settings, effective, stop)


def _keep_earlier_console(settings: Any, effective: Any) -> None:
    """Have the console be in a file with a name of its own: `output.log` takes the place of an earlier attempt's."""
    vendor.set_default(settings, effective, "console_multipart", True)


def _stopping(request: RunRequest, *, is_wanted_without_rows: bool) -> Callable[[], None]:
    """Return what W&B calls when a user has pressed the Stop button, and also when it has given up sending rows.

    A run that has ended meanwhile has nothing to stop.
    """

    def stop() -> None:
        time.sleep(_LOG_S)
        for run in vendor.open_runs():
            if run.settings.stop_fn is not stop:
                continue
            directory = outbox.run_directory(run)
            refusal = vendor.refusal_of_rows(directory, "wandb-core's log cannot be read")
            if is_wanted_without_rows or not refusal:
                main = threading.main_thread().ident or 0
                request.ask_to_stop(functools.partial(signal.pthread_kill, main, signal.SIGINT))  # as Ctrl-C does
            else:
                text = "W&B: run %s: %s. What it logs is kept in %s. To send it when the function has ended, run: %s"
                logger.warning(text, run.id, refusal, directory, how_to_send(outbox.directory_to_send(request, run)))

    return stop


def _dies_with_pod(request: RunRequest) -> bool:
    """Whether the next attempt cannot see this one's files: in a Flyte pod, unless the user has chosen their place."""
    is_chosen = "WANDB_DIR" in os.environ or request.config.options.get("dir") is not None
    return client.dies_with_pod(request) and not is_chosen


def _given_settings(request: RunRequest) -> Any:
    settings = vendor.new_settings(
        init_timeout=request.config.init_timeout_s,
        finish_timeout_raises=True,  # if the user has set a limit of W&B's own: ours is `ending.EndLimit`
    )
    settings.update_from_dict(given_settings(request.config.options))
    host, is_joined = request.config.options.get(HOST), request.info is None and not request.plan.primary
    # A run that is joined is at the server of the task that has called this one, whatever is set up here.
    is_set_up = "base_url" in settings.model_fields_set or os.environ.get("WANDB_BASE_URL")
    if host and (is_joined or not is_set_up) and (server := api_of(host)) is not None:
        settings.base_url = server
    return settings


def _authenticate(settings: Any, effective: Any, request: RunRequest) -> None:
    """Put the user's secret into `settings`, or make sure that W&B finds a key: it must not prompt on a rank."""
    host = effective.base_url
    key = request.read_secret() or settings.api_key  # a script's own, under `run`
    if key:
        settings.api_key = key.strip()  # W&B refuses a key with a line end, and prints it in its message
        vendor.keys[without_credentials(host)] = key.strip()
    elif not request.may_prompt and not vendor.has_credentials(host):
        raise client.missing_key_error("W&B", "Run `wandb login`, set WANDB_API_KEY", _OFFLINE)
