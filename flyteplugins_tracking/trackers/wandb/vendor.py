"""The undocumented modules, classes and attributes of the `wandb` package. No other module uses them.

Another version of wandb may lack any of them. Each function here says what it is for and what happens then. There are
two cases. An optional feature is switched off, with one warning. A feature that the user asked for raises a
`TrackerNotInstalledError` that names the versions this file was tested with. tests/unit/test_wandb_vendor.py calls
every function with the installed wandb.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers.vendor_parts import CHANGED, VendorParts

# How long `wandb.init` may wait for the server to say whose key it is.
_IDENTITY_S = 5.0
# How long wandb-core may take to write the files of runs that have ended.
_LAST_RECORDS_S = 1.0
# The same, at the end of a process whose runs were offline: it waits for the disk alone.
_LAST_RECORDS_AT_EXIT_S = 10.0
# The process that ends its wandb-core itself: see `end_service_with_process`.
_ends_with = 0
_NO_STOP_BUTTON = "W&B's Stop button interrupts the rank that has the run, and no other"
_ONE_WRITER = "runs that several nodes write to"
# All names show only when they are used: the functions say what for. Of what older versions lack, here is the first
# version that has it.
PARTS = VendorParts("W&B", "wandb==0.31.0", later={_ONE_WRITER: "0.22", _NO_STOP_BUTTON: "0.26"})
_optional, _required = PARTS.optional, PARTS.required


# The session: wandb's object for this process


def session() -> Any:
    """Wandb's object for this process, with its settings and its wandb-core. Required by every run."""
    with _required("this version of flyteplugins-tracking"):
        setup = importlib.import_module("wandb.sdk.wandb_setup")
        return setup.singleton() or setup._setup(start_service=False)  # None before 0.20, if there is none yet


def has_active_run() -> bool:
    """Whether `wandb.init` could return a run that is open already. Without it, only `wandb.run` is looked at."""
    with _optional("a run that was opened with reinit='create_new' may be returned again"):
        return session().most_recent_active_run is not None
    return False


@contextlib.contextmanager
def outside_sweep() -> Iterator[None]:
    """Have `wandb.init` use the id, project and entity that it is given while a trial of a sweep runs.

    Required to open a trial's run again.
    """
    with _required("runs inside a sweep's trial"):
        current = session()
        settings, config = current.settings, current._sweep_config
        trial = settings.sweep_id, settings.sweep_param_path
        settings.sweep_id = settings.sweep_param_path = current._sweep_config = None
    try:
        yield
    finally:
        (settings.sweep_id, settings.sweep_param_path), current._sweep_config = trial, config


@contextlib.contextmanager
def identity_resolved_once(deadline: float) -> Iterator[None]:
    """Ask the server whose key it is once, before `wandb.init`: that asks a silent server for 5 s again and again.

    If the deadline is too near, nobody asks: the answer is for a message and for the account's defaults. Without it,
    `wandb.init` takes longer while the server is silent.
    """
    current = session()
    if not hasattr(current, "_resolve_identity"):
        yield  # before 0.28, wandb.init asks once
        return
    with _optional("wandb.init may exceed init_timeout_s while the server does not answer"):
        if current._connection is None:
            with without_error_reports():
                current.ensure_service()
        has_time = deadline - time.monotonic() > 2 * _IDENTITY_S
        identity, known = current._resolve_identity() if has_time else None, current._session_identity

        def resolved() -> Any:
            current._session_identity = known if identity else None
            return identity

        current._resolve_identity = resolved
    try:
        yield
    finally:
        vars(current).pop("_resolve_identity", None)


@contextlib.contextmanager
def without_error_reports() -> Iterator[None]:
    """Keep wandb from sending reports about its own errors, unless the user has set WANDB_ERROR_REPORTING.

    Without it, the end of the process is up to 10 s later while the server does not answer.
    """
    if "WANDB_ERROR_REPORTING" in os.environ:
        yield
        return
    with _optional("the process may end 10 s later while the server does not answer"):
        if find_spec("wandb.analytics.opentelemetry") is not None:  # the variable is enough before 0.28
            reports = importlib.import_module("wandb.analytics.opentelemetry").opentelemetry_proxy
            getattr(reports, "disable", lambda: None)()  # from 0.30 on
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        yield
    finally:
        os.environ.pop("WANDB_ERROR_REPORTING", None)


# wandb-core: the helper process that writes and sends


def restart_service(limit_s: float = _LAST_RECORDS_S) -> bool:
    """Stop wandb-core, unless a run is open in it. The next run starts another. Unsent rows are in the local files.

    Without it, a run that continues offline gets another id.

    Args:
        limit_s: Seconds that it may take to write the files of runs that have ended.

    Returns:
        Whether this process has no wandb-core any more.
    """
    current = session()
    with _optional("wandb-core cannot be restarted, and a run that continues offline gets another id"):
        connection = current._connection
        if connection is not None:
            if connection._proc is None:
                return False  # another process's
            if _is_alive(connection) and any(not run._is_finished for run in current._active_runs):
                return False
            _end(connection, limit_s)
        os.environ.pop("WANDB_SERVICE", None)
        current._connection = None
        return True
    return False


def _process_of(connection: Any) -> Any:
    """The process of wandb-core: `_internal_proc` before 0.21."""
    return getattr(connection._proc, "_process", None) or connection._proc._internal_proc


def _is_alive(connection: Any) -> bool:
    return bool(_process_of(connection).poll() is None)


def _end(connection: Any, limit_s: float) -> None:
    """End wandb-core, which writes the last records of a run's file after `finish` has returned.

    It also waits for what it cannot send now, so it gets a limit.
    """
    process = _process_of(connection)
    if not hasattr(connection, "_finalizer"):  # before 0.28: its own end, which has no limit
        threading.Thread(target=_tear_down, args=(connection,), daemon=True).start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        process.kill()
        return
    connection._finalizer.close()
    if _is_alive(connection):
        with contextlib.suppress(Exception):  # its socket may be closed
            request = importlib.import_module("wandb.proto.wandb_server_pb2").ServerRequest()
            request.inform_teardown.exit_code = 0
            connection._asyncer.run(lambda: connection._client.publish(request))
            process.wait(limit_s)
    process.kill()
    # As the connection's own teardown does.
    connection._torn_down = True
    connection._cleanup()
    connection._proc.join()


def _tear_down(connection: Any) -> None:
    with contextlib.suppress(Exception):  # wandb-core was killed
        connection.teardown(0)


def end_service_with_process() -> None:
    """Have wandb-core write the last records before a process of multiprocessing ends. Called when a run has ended.

    Such a process calls no function of `atexit`, where wandb waits for it: an offline run could lose its last rows.
    """
    global _ends_with
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or _ends_with == os.getpid():
        return
    _ends_with = os.getpid()
    importlib.import_module("multiprocessing.util").Finalize(
        None, restart_service, (_LAST_RECORDS_AT_EXIT_S,), exitpriority=0
    )


def drop_unusable_service() -> None:
    """Forget a wandb-core that has died, and the parent's (WANDB_SERVICE): runs in that end when the parent's do.

    Without it, a run cannot be opened after wandb-core has died.
    """
    current = session()
    with _optional("a wandb-core that has died is not replaced"):
        connection = current._connection
        if connection is not None and connection._proc is not None and not _is_alive(connection):
            restart_service()
        if current._connection is None:
            os.environ.pop("WANDB_SERVICE", None)


def service_address() -> str:
    """The address of this process's wandb-core, as WANDB_SERVICE has it. Required by run_mode='shared'."""
    with _required("run_mode='shared'"):
        process = getattr(session()._connection, "_proc", None)
        value = getattr(getattr(process, "token", None), "env_value", None)
        return str(value or os.environ.get("WANDB_SERVICE", ""))  # before 0.26, the variable alone


def has_service_died(timeout_s: float = 1.0) -> bool:
    """Whether this process's wandb-core has ended. Its connections end a moment before it does.

    Without it, the leader of a node does not replace a wandb-core that its followers cannot reach.
    """
    with _optional("a wandb-core that has died is not replaced"):
        connection = session()._connection
        if connection is None or connection._proc is None:
            return False
        process = _process_of(connection)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.poll() is not None
    return False


@contextlib.contextmanager
def service_variable(address: str) -> Iterator[None]:
    """Set WANDB_SERVICE for the body only: a child that is started later would take this wandb-core for its own."""
    previous = os.environ.get("WANDB_SERVICE")
    os.environ["WANDB_SERVICE"] = address
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop("WANDB_SERVICE", None)
        else:
            os.environ["WANDB_SERVICE"] = previous


def attach(address: str, run_id: str) -> tuple[Any, Any]:
    """Attach to a run in another process's wandb-core. Required by run_mode='shared'.

    This process's own runs, now and later, have a wandb-core of their own: the other one ends with its process.

    Returns:
        The run, and the connection to that wandb-core.
    """
    current = session()
    with _required("run_mode='shared'"):
        wandb: Any = importlib.import_module("wandb")
        own_connection, current._connection = current._connection, None
    try:
        with service_variable(address), without_error_reports():
            run = wandb.attach(run_id)
    finally:
        connection, current._connection = current._connection, own_connection
    return run, connection


def detach(run: Any, connection: Any) -> None:
    """Release what an attached run holds in this process. Without it, that is released when the process ends."""
    # Errors are dropped: the wandb-core may have died.
    with contextlib.suppress(Exception), _optional("an attached run keeps its connection until the process ends"):
        run._wl.remove_active_run(run)
        run._unregister_telemetry_import_hooks(run.id)
        if hasattr(connection, "_finalizer"):  # before 0.28, it ends with the process
            connection._finalizer.close()
            connection._asyncer.run(connection._client.close)


# Errors


def service_gone(run: Any) -> tuple[type[BaseException], ...]:
    """The errors of a run's methods when wandb-core has died or was stopped. Evaluated when one was raised.

    Without it, only a `ConnectionError` is recognized.
    """
    closed, abandoned = (_loaded("wandb.sdk.mailbox", f"{name}Error") for name in ("MailboxClosed", "HandleAbandoned"))
    # wandb raises a ValueError in a thread that has got the id of the client's own, ended thread.
    ended = ValueError if _is_client_ended(run) else None
    return tuple(
        error for error in (ConnectionError, closed, abandoned, _torn_down_error(), ended) if error is not None
    )


def _is_client_ended(run: Any) -> bool:
    """Whether `wandb.teardown` has ended the run's client."""
    return bool(getattr(getattr(_interface(run), "_asyncer", None), "_joined", False))


def _torn_down_error() -> Any:
    """The error after `wandb.teardown`, which has sent all rows. `wandb.agent` calls it before each trial."""
    return getattr(sys.modules.get("wandb.sdk.lib.asyncio_manager"), "AlreadyJoinedError", None)  # from 0.21 on


def _loaded(module: str, name: str) -> Any:
    loaded = sys.modules.get(module)
    if loaded is not None and not hasattr(loaded, name):
        PARTS.lose("some deaths of wandb-core are not recognized, and raise in the training", f"no {module}.{name}")
    return getattr(loaded, name, None)


def was_torn_down(run: Any, error: BaseException, timeout_s: float) -> bool:
    """Whether `wandb.teardown` was the cause of a run's error, and has sent all rows. Waits while another thread does.

    The connection is closed before wandb-core has sent all. Without it, a run that is opened again just then may get
    rows of both at one time.
    """
    kind = _torn_down_error()
    if (kind is not None and isinstance(error, kind)) or _is_client_ended(run):
        return True
    with _optional("rows that a thread logs during wandb.teardown may be in another order"):
        connection = run._wl._connection
        if connection is None or connection._proc is None or not connection._torn_down:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            return bool(_process_of(connection).wait(timeout_s) == 0)
    return False


# Runs

# The methods that end the run. `_finish` is what wandb's hooks call.
ENDINGS = ("finish", "_finish")
# What the run's summary and config call when they change, and when the summary is read.
CALLBACKS = ("_summary_update_callback", "_config_callback", "_summary_get_current_summary_callback")


def _interface(run: Any) -> Any:
    """What hands records to wandb-core: an attribute of the run's `_backend` before 0.26."""
    interface = getattr(run, "_interface", None)
    return getattr(getattr(run, "_backend", None), "interface", None) if interface is None else interface


def finish_within(timeout_s: float, run: Any, finish: Callable[[], object]) -> None:
    """Call `finish`, which ends the run. wandb before 0.27 knows no limit: it gets ours, and wandb-core is stopped.

    Raises:
        TimeoutError: The limit has passed. What was not sent is in the local files.
    """
    if _has_setting("finish_timeout"):
        finish()
        return
    errors: list[BaseException] = []

    def ended() -> None:
        try:
            finish()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ended, daemon=True, name="flyteplugins-tracking-finish")
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        set_finished(run)
        restart_service()
        raise TimeoutError(f"the run was not sent within {timeout_s:g} s")
    if errors:
        raise errors[0]


def row_method(kind: Any) -> Callable[..., Any] | None:
    """The method through which `run.watch` adds values to the next row. Without it, they may get into another's row."""
    with _optional("what run.watch records may be in the row of another rank"):
        method: Callable[..., Any] = kind._log
        return method
    return None


def report_changes(run: Any) -> None:
    """Have the run's summary and config call the methods of `run` when they change, also those kept from before.

    Without it, they change the run unseen: after an early end these changes are lost.
    """
    if getattr(run, "disabled", False):
        return
    with _optional("changes of the summary and the config after an early end of the run are lost"):
        run.summary._set_update_callback(run._summary_update_callback)
        read = run._summary_get_current_summary_callback
        object.__setattr__(run.summary, "_get_current_summary_callback", lambda: read() or {})
        run.config._set_callback(run._config_callback)


def is_finished(run: Any) -> bool:
    """Whether the run has ended. Without it, a run counts as open."""
    return bool(getattr(run, "_is_finished", False))


def set_finished(run: Any) -> None:
    """Mark a run as ended that has no wandb-core any more, so that wandb does not end it again."""
    run._is_finished = True


def take_over_state(run: Any, reopened: Any) -> None:
    """Give `run` the state of the newly opened `reopened`, and its place among wandb's runs.

    Required to log after an early end of the run.
    """
    with _required("opening a run again after a signal"):
        reopened._wl.remove_active_run(reopened)
        share_state(run, reopened)


def share_state(run: Any, attached: Any) -> None:
    """Give `run` the state of another run object, and a place among wandb's runs. Required as `take_over_state` is."""
    with _required("opening a run again after a signal"):
        run.__dict__ = attached.__dict__
        attached._wl.add_active_run(run)


def set_resumed(run: Any, is_retry: bool) -> None:
    """Correct `run.resumed`: W&B calls a run resumed that another node has just created. Without it, that stays."""
    with _optional("run.resumed may be True for a new run of several nodes"):
        run._settings.resumed = is_retry or (run.resumed and run._starting_step > 0)


def is_only_run(run: Any) -> bool:
    """Whether this process has no other run open. Without it, a run is not rewound: a refusal ends wandb-core."""
    with _optional("rollback='rewind' keeps all rows"):
        return all(other is run or other._is_finished for other in session()._active_runs)
    return False


def settings_of(run: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Some of the run's settings, those that are set. Required by run_mode='shared'."""
    with _required("run_mode='shared'"):
        settings = run._settings
    values = {name: getattr(settings, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def update_settings(run: Any, settings: Mapping[str, Any]) -> None:
    """Set some of the run's settings. Required by run_mode='shared'."""
    with _required("run_mode='shared'"):
        run._settings.update_from_dict(dict(settings))


def set_config(run: Any, config: Any) -> None:
    """Set the values in `run.config` without sending them. Without it, `run.config` lacks them on this rank."""
    with _optional("run.config is empty on ranks that have not opened the run"):
        run._config._update(config, allow_val_change=True, ignore_locked=True)


def on_config_change(run: Any, function: Callable[..., object]) -> None:
    """Call `function` instead of sending when `run.config` changes. Without it, the change is sent."""
    with _optional("a task can change the config of its parent's run"):
        run.config._set_callback(function)


def replace_config_class(run: Any, subclass: Callable[[Any], type]) -> None:
    """Make `run.config` an object of `subclass(its class)`. Without it, every rank can change the config."""
    with _optional("every rank can change the config of a shared run"):
        object.__setattr__(run._config, "__class__", subclass(type(run._config)))


def flush(run: Any, timeout_s: float) -> None:
    """Return when wandb-core has read what was logged: it answers in the order in which it reads.

    Without it, the last rows of a rank that is killed may be lost.
    """
    # Errors are dropped: a timeout, or wandb-core has died.
    with contextlib.suppress(Exception), _optional("the last rows of a rank that is killed may be lost"):
        _interface(run).deliver_get_summary().wait_or(timeout=timeout_s)


# Rows, and the records of wandb-core's file

_LOSS = "rows that wandb-core had not sent when it was killed are not sent by the next attempt"


def on_rows(run: Any, keep: Callable[[str, int | None, bool | None], object], is_only: bool = False) -> None:
    """Call `keep` with each row as soon as wandb-core has it. Without it, such rows are not sent again.

    Args:
        run: The open run.
        keep: Takes a row: its values as the members of a JSON object, the step and `commit` that were given.
        is_only: Whether wandb-core shall not get the row, since it has died.
    """
    with _optional(_LOSS):
        interface = _interface(run)
        publish = type(interface)._publish_partial_history
        lock = threading.RLock()  # threads log: the rows that are kept have the order of those that wandb-core gets

        def published(row: Any) -> None:
            with lock:
                if not is_only:
                    publish(interface, row)
                values = ",".join([f"{quoted(item.key)}:{item.value_json or json_of(item)}" for item in row.item])
                is_complete = row.action.flush if row.HasField("action") else None
                keep(values, row.step.num if row.HasField("step") else None, is_complete)

        interface._publish_partial_history = published


def json_of(item: Any) -> str:
    """Return the value of an item of a row as JSON."""
    if item.value_json:
        return str(item.value_json)
    kind = item.WhichOneof("value") if "value" in item.DESCRIPTOR.oneofs_by_name else None
    return item.json if kind == "json" else json.dumps(getattr(item, kind) if kind and kind != "none" else None)


def parse_record(data: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a record of a `.wandb` file."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type") or ""
    return kind, getattr(record, kind, None)


class Stored(NamedTuple):
    """The state of a run at the service."""

    state: str
    rows: int
    last_step: int


def stored_run(path: str, server: str, timeout_s: float = 10.0) -> Stored | None:
    """Return what the service has of the run `entity/project/id`; None if it does not have the run, or does not say."""
    wandb: Any = importlib.import_module("wandb")
    try:
        run = wandb.Api({"base_url": _as_set_up(server)}, timeout=timeout_s).run(path)
        return Stored(run.state, int(run.historyLineCount or 0), int(run.lastHistoryStep))
    except (wandb.errors.CommError, ValueError, OSError, *CHANGED):
        return None


def description(record: Any) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that make the run of a run record again."""
    return {
        "name": record.display_name or None,
        "group": record.run_group or None,
        "job_type": record.job_type or None,
        "tags": list(record.tags) or None,
        "notes": record.notes or None,
        "config": config_of(record.config),
    }


def config_of(record: Any) -> dict[str, Any]:
    """Return the values of a config record, without wandb's own."""
    return {item.key: json.loads(item.value_json) for item in record.update if item.key[:1] not in ("", "_")}


def open_to_send(place: Any, described: Mapping[str, Any], directory: str) -> Any:
    """Open a run to send what another process has left of it. Does not change what the service knows of it.

    Args:
        place: The run's server, entity, project and id.
        described: Arguments of `wandb.init`, for a service that does not have the run.
        directory: Where wandb keeps its files meanwhile.
    """
    wandb: Any = importlib.import_module("wandb")
    settings = wandb.Settings(base_url=_as_set_up(place.server), console="off", silent=True)
    for name in ("x_disable_meta", "x_disable_stats", "x_disable_machine_info", "disable_git", "disable_code"):
        set_default(settings, settings, name, True)
    with without_error_reports():
        return wandb.init(
            id=place.run_id,
            project=place.project or None,
            entity=place.entity or None,
            resume="allow",
            mode="online",
            dir=directory,
            settings=settings,
            **described,
        )


def default_settings() -> Any:
    """The settings that come from the environment and the files."""
    return session().settings


def _as_set_up(server: str) -> str:
    """Return the address with the password that this process is set up with, which no file of ours has."""
    address = str(default_settings().base_url)
    return address if without_credentials(address) == server else server


def directory_of_runs(settings: Any, directory: str | None) -> str:
    """The directory in which `wandb.init` will make the run's directory."""
    if directory is not None:
        settings = settings.model_copy()
        settings.root_dir = directory
    return str(settings.wandb_dir)


# The global run: `wandb.run`


def global_run() -> Any:
    """Return `wandb.run`; None in a forked child that has inherited it.

    Without the id of the process that has opened it, a child takes the parent's run for its own.
    """
    run: Any = importlib.import_module("wandb").run
    is_inherited = run is not None and getattr(run, "_init_pid", os.getpid()) != os.getpid()
    return None if is_inherited else run


def set_global_run(run: Any) -> None:
    """Set `wandb.run` and `wandb.log`, which frameworks use; None unsets them. `reinit="create_new"` leaves them.

    Without it, frameworks do not find the run.
    """
    with _optional("wandb.run and wandb.log are not the run of the decorated function"):
        if run is None:
            importlib.import_module("wandb.sdk.lib.module").unset_globals()
        else:
            importlib.import_module("wandb.sdk.wandb_init")._set_global_run(run)


# Settings


@functools.cache
def _has_setting(name: str) -> bool:
    return name in importlib.import_module("wandb").Settings.model_fields


def new_settings(**values: Any) -> Any:
    """Return a `wandb.Settings` with those of the values that it has a setting for. Required by every run."""
    with _required("this version of flyteplugins-tracking"):
        known = {name: value for name, value in values.items() if _has_setting(name)}
    return importlib.import_module("wandb").Settings(**known)


def effective_settings(settings: Any) -> Any:
    """`settings` over those of the session, which come from the environment and the files. Required by every run."""
    current = session()
    with _required("this version of flyteplugins-tracking"):
        effective = current.settings.model_copy()
        effective.update_from_settings(settings)
        return effective


def merge_settings(settings: Any, user_settings: Any) -> None:
    """Put the user's settings, a mapping or a `wandb.Settings`, over `settings`. Required by `settings=`."""
    if isinstance(user_settings, Mapping):
        settings.update_from_dict(dict(user_settings))
    elif user_settings is not None:
        settings.update_from_settings(user_settings)


def is_set(settings: Any, name: str) -> bool:
    """Whether this setting is set explicitly. Without it, nothing counts as set."""
    return name in getattr(settings, "model_fields_set", ())


def set_default(settings: Any, effective: Any, name: str, value: Any) -> None:
    """Set one of wandb's undocumented settings, unless the user has. Without it, wandb's own default applies."""
    if is_set(effective, name) or not _has_setting(name):
        return
    with contextlib.suppress(ValueError):  # pydantic's, for a type that it does not know
        setattr(settings, name, value)


def set_required(settings: Any, **values: Any) -> None:
    """Set undocumented settings. Required by runs with several writers, whose rows or files would mix otherwise."""
    with _required(_ONE_WRITER):
        for name, value in values.items():
            try:
                setattr(settings, name, value)
            except ValueError as error:  # pydantic's, for a name or a type that it does not know
                raise AttributeError(f"no setting {name}") from error


def on_stop_request(settings: Any, function: Callable[[Callable[[], object]], object], *, has_others: bool) -> None:
    """Call `function` when somebody has pressed the run's Stop button, with what wandb does by itself: Ctrl-C.

    The user's own `stop_fn` takes precedence. Without it, wandb interrupts the rank that has the run, and no other.

    Args:
        settings: Those of the run.
        function: Takes what wandb does by itself.
        has_others: Whether the job has other ranks, which are not interrupted without it.
    """
    if not has_others and not _has_setting("stop_fn"):
        return
    with _optional(_NO_STOP_BUTTON):
        if settings.stop_fn is None:
            interrupt = importlib.import_module("wandb.sdk.lib.interrupt").interrupt_main
            settings.stop_fn = lambda: function(interrupt)


# Credentials


def use_key(key: str, host: str, app_url: str | None) -> None:
    """Have the session use this key, as `wandb.init` does later. Without it, nobody asks early whose key it is."""
    if find_spec("wandb.sdk.lib.wbauth") is None:  # before 0.24, the setting api_key is enough
        return
    with _optional("the account's defaults may not apply"):
        wbauth = importlib.import_module("wandb.sdk.lib.wbauth")
        auth = wbauth.AuthApiKey(host=wbauth.HostUrl(host, app_url=app_url), api_key=key)
        wbauth.use_explicit_auth(auth, source="tracking_init")


def has_credentials(host: str) -> bool:
    """Whether `wandb.init` will find a key. `wandb.login(host=)` would ask the server and write to the user's files.

    Without it, `wandb.init` reports a missing key itself.
    """
    with _optional("a missing API key is reported by wandb itself"):
        auth = find_spec("wandb.sdk.lib.wbauth") and importlib.import_module("wandb.sdk.lib.wbauth")
        if not auth or "prompt" not in inspect.signature(auth.authenticate_session).parameters:  # before 0.30
            return bool(importlib.import_module("wandb").api.api_key)
        return auth.authenticate_session(host=host, source="tracking_init", prompt=False) is not None
    return True


def default_server(otherwise: str) -> str:
    """The server that the installed wandb uses by default, which has changed. Reads the file: an import has effects.

    Without it, `otherwise`.
    """
    spec = find_spec("wandb")
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError), open(os.path.join(folder, "sdk", "lib", "urls.py")) as file:
            match = re.search(r'^DEFAULT_BASE_URL = "(.+)"$', file.read(), re.MULTILINE)
            if match:
                return match[1]
    return otherwise
