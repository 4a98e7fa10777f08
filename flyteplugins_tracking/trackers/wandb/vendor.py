"""The undocumented modules, classes and attributes of the `wandb` package. No other module uses them.

Another version of wandb may lack any of them. Each function here says what it is for and what happens then. There are
two cases. An optional feature is switched off, with one warning. A feature that the user asked for raises a
`TrackerNotInstalledError` that names the version in `PARTS`, which was tested.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.files import is_own_file, read_own
from flyteplugins_tracking._util.fork import OwnLock, PerProcess, register
from flyteplugins_tracking._util.text import causes, first_line, without_credentials
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.outbox import may_pass
from flyteplugins_tracking.trackers.vendor_parts import CHANGED, VendorParts

logger = logging.getLogger(__name__)

# Held while a run is opened, which happens at any time, in any thread. Reentrant: a signal's handler opens runs too.
opening = register(OwnLock())

# How long wandb-core may take to write the files of runs that have ended.
_LAST_RECORDS_S = 1.0
# How long wandb-core may take to end once it was asked to, before it is asked again; and then, before it is killed.
_ENDING_S = (5.0, 30.0)
PARTS = VendorParts("W&B", "wandb", "wandb==0.31.0")
_MAY_BE_CUT = "an upload that takes longer than kill_after_s less 5 s is cut at the run's end"
# How long wandb-core may take to say how far it is, and to write the files of a run whose end is cut, in seconds.
_ANSWER_S, _CUT_S = 1.0, 0.5
_optional, _required = PARTS.optional, PARTS.required
# The run's attribute that holds its connection.
_CONNECTION = "_flyteplugins_tracking_connection"
# How many rows are asked for where the last one is wanted; and where all are, with the first question and at most.
_SAMPLES, _PAGE, _LONGEST_PAGE = 500, 1_000, 10_000
# How much of a file is read at once, in bytes.
_PART = 1 << 20
# Settings of a client that tries again for ever. wandb's 60 s between tries are longer than the wait for an end, and
# it gives up after 20 of them: the rows would not be sent after an outage.
PATIENT = {
    **{f"x_{what}_retry_wait_max_seconds": 8 for what in ("file_stream", "graphql", "file_transfer")},
    **{f"x_{what}_retry_max": 10_000 for what in ("graphql", "file_transfer")},
}
# The functions of the module `wandb` that are methods of `wandb.run`.
_GLOBALS = (
    *("config", "summary", "log", "save", "use_artifact", "log_artifact", "define_metric", "alert", "watch", "unwatch"),
    *("mark_preempting", "log_model", "use_model", "link_model"),
)


# The session: wandb's object for this process


def session() -> Any:
    """Wandb's object for this process, with its settings and its wandb-core. Required by every run.

    Raises:
        ConfigError: Another user could choose the server that gets the key.
    """
    _check_settings_files()
    with _required():
        return importlib.import_module("wandb.sdk.wandb_setup").singleton()


@functools.cache
def _check_settings_files() -> None:
    """Refuse a settings file of another user in the directory of runs: wandb reads it, or waits if it is a FIFO."""
    folder = Path(os.environ.get("WANDB_DIR") or os.curdir).expanduser()
    for path in (folder / name / "settings" for name in (".wandb", "wandb")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if any(owner not in (0, os.geteuid()) for owner in (path.lstat().st_uid, path.stat().st_uid)):
                raise ConfigError(
                    f"W&B: {path.resolve()} belongs to another user, and W&B's client would take its server from it, "
                    "which gets the API key. Remove it, or set WANDB_DIR to a directory that only you can write to."
                )


def open_runs() -> list[Any]:
    """The runs that this process has open. Without it, a run that a user has open beside `wandb.run` may be ended."""
    with _optional("a run that was opened with reinit='create_new' may be returned again"):
        return [run for run in session()._active_runs if not run._is_finished]
    return []


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
def without_viewer() -> Iterator[None]:
    """Keep `wandb.init` from asking whose key it is, which takes 5 s each time while the server is silent.

    The answer is for a message and for the account's defaults.
    """
    settings = session().settings
    before = getattr(settings, "x_disable_viewer", None)
    set_default(settings, settings, "x_disable_viewer", True)
    try:
        yield
    finally:
        if before is not None:
            settings.x_disable_viewer = before


def disable_error_reports() -> None:
    """Have wandb send no reports about its own errors, unless the user has set WANDB_ERROR_REPORTING.

    Without it, the end of the process is up to 10 s later while the server does not answer.
    """
    if "WANDB_ERROR_REPORTING" in os.environ:
        return
    with _optional("the process may end 10 s later while the server does not answer"):
        if find_spec("wandb.analytics.opentelemetry") is not None:  # the variable is enough before 0.28
            reports = importlib.import_module("wandb.analytics.opentelemetry").opentelemetry_proxy
            getattr(reports, "disable", lambda: None)()  # from 0.30 on
    # Otherwise wandb warns of a change after it has read the variables.
    known_variables()["WANDB_ERROR_REPORTING"] = os.environ["WANDB_ERROR_REPORTING"] = "false"


def known_variables() -> dict[str, str]:
    """The variables as wandb has read them, once. Without it, it may warn of changes that the user has not made."""
    current = session()
    return (current.settings and getattr(current, "_settings_environ", None)) or {}


# wandb-core: the helper process that writes and sends


def restart_service(limit_s: float = _LAST_RECORDS_S, exit_code: int = 1) -> bool:
    """Stop wandb-core, unless a run is open in it. The next run starts another. Unsent rows are in the local files.

    Without it, a run that continues offline gets another id.

    Args:
        limit_s: Seconds that it may take to write the files of runs that have ended, and to send what it can.
        exit_code: The status of a run whose opening has failed: W&B may have it already.

    Returns:
        Whether this process has no wandb-core any more.
    """
    current = session()
    with _optional("wandb-core cannot be restarted, and a run that continues offline gets another id"):
        connection = current._connection
        if connection is not None:
            if connection._proc is None:
                return False  # another process's
            process = connection._proc._process
            if process.poll() is None and open_runs():
                return False
            _end_within(limit_s, lambda: connection.teardown(exit_code))
            process.kill()
        os.environ.pop("WANDB_SERVICE", None)
        current._connection = None
        return True
    return False


def kill_service() -> None:
    """Stop wandb-core, whatever it has open: the next run starts another. Without it, what it has open stays so."""
    with _optional("a run that could not be opened is not sent by this process any more"):
        connection = session()._connection
        if connection is not None and connection._proc is not None:
            connection._proc._process.kill()
            _exit_code_of(connection, _ANSWER_S)
            restart_service()


def end_interrupted(run_id: str | None, before: list[Any], exit_code: int, limit_s: float) -> None:
    """End the run of a `wandb.init` that was interrupted: wandb would end it as a success when the process ends.

    Without it, that is what happens if another run is open in this process.

    Args:
        run_id: The run's id; None if W&B was to make one.
        before: The runs that were open before.
        exit_code: The status.
        limit_s: Seconds that it may take.
    """
    opened = [run for run in open_runs() if run not in before]
    for run in opened:
        finish = importlib.import_module("wandb").sdk.wandb_run.Run.finish  # not the handle's
        _end_within(limit_s, functools.partial(finish, run, exit_code))
    if opened or restart_service(limit_s, exit_code) or run_id is None:
        return
    with _optional("a run whose opening is interrupted while another one is open may be shown as finished"):
        connection = session()._connection
        kind = importlib.import_module("wandb.sdk.interface.interface_sock").InterfaceSock
        interface = kind(connection._asyncer, connection._client, stream_id=run_id)
        _end_within(limit_s, lambda: interface.deliver_exit(exit_code).wait_or(timeout=limit_s))


def _end_within(limit_s: float, end: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # W&B does not answer, or wandb-core was killed
        threads.call_within(limit_s, end)


def ask_again_at_exit() -> None:
    """Have wandb ask its wandb-core again, when the process ends, to end too. Called when wandb-core may have started.

    wandb asks once, closes the connection, and waits without a limit. If wandb-core has an answer to send just then, as
    that to a call which has timed out, wandb-core cannot send it, and closes the connection without reading the request
    (`processOutgoingData` in its core/pkg/server/connection.go). Without it, the process may hang at its end.
    """
    with _optional("the process may hang at its end"):
        connection = session()._connection
        if connection is not None and connection._proc is not None and "teardown" not in vars(connection):
            connection.teardown = functools.partial(_tear_down_surely, connection, connection.teardown)


def _tear_down_surely(connection: Any, tear_down: Callable[[int], int | None], exit_code: int) -> int | None:
    exit_code = int(exit_code) & 0xFF  # that of `sys.exit(True)`, or of a larger number, would raise
    process = connection._proc._process
    wait: Callable[..., int] = process.wait

    def wait_and_ask_again(timeout: float | None = None) -> int:
        if timeout is not None:  # another thread looks whether it lives
            return wait(timeout)
        for limit_s in _ENDING_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return wait(limit_s)
            try:
                _ask_to_end(connection, exit_code)
            except Exception:  # it listens no more, so it is ending: it may have other processes' rows to send
                return wait()
        process.kill()
        wait()
        logger.warning("W&B: wandb-core was killed: it did not end %g s after it was asked to", sum(_ENDING_S))
        return 0  # `wandb.teardown` ends the process with another one

    process.wait = wait_and_ask_again
    return tear_down(exit_code)


def _ask_to_end(connection: Any, exit_code: int) -> None:
    messages = importlib.import_module("wandb.proto.wandb_server_pb2")
    client = connection._proc.token.connect(asyncer=connection._asyncer)
    request = messages.ServerRequest(inform_teardown=messages.ServerInformTeardownRequest(exit_code=exit_code))
    connection._asyncer.run(lambda: client.publish(request))


def drop_unusable_service() -> None:
    """Forget a wandb-core that has died, and the parent's (WANDB_SERVICE): runs in that end when the parent's do.

    Without it, a run cannot be opened after wandb-core has died.
    """
    with _optional("a wandb-core that has died is not replaced"):
        if _exit_code_of(session()._connection, 0) is not None:
            restart_service()
        if session()._connection is None:
            os.environ.pop("WANDB_SERVICE", None)


def _exit_code_of(connection: Any, timeout_s: float) -> int | None:
    """The exit code of this process's wandb-core; None if it has none, or it has not ended."""
    if connection is None or connection._proc is None:
        return None
    process = connection._proc._process
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    code: int | None = process.poll()
    return code


# Errors


def service_gone(run: Any, error: BaseException | None) -> tuple[type[BaseException], ...]:
    """The errors of a run's methods when wandb-core has died or was stopped. Evaluated when `error` was raised.

    Without it, only a `ConnectionError` is recognized.
    """
    modules = [type(one).__module__ for one in causes(error)]
    # The second: after `wandb.teardown`, which has sent all rows. `wandb.agent` calls it before each trial. In a thread
    # that has got the id of the client's own, ended thread, wandb raises a ValueError.
    is_gone = any(one.startswith(("wandb.sdk.mailbox", "wandb.sdk.lib.asyncio_manager")) for one in modules) or (
        isinstance(error, ValueError) and _exit_code_of(_connection_of(run), 0) is not None
    )
    # A wandb-core that has answered lives: in W&B's shared mode, it refuses to say the run's step.
    has_answered = type(error).__name__ == "ServerResponseError"
    return (ConnectionError, type(error)) if error is not None and is_gone and not has_answered else (ConnectionError,)


def _connection_of(run: Any) -> Any:
    """The connection of the run: `wandb.teardown` and a death have the session forget it."""
    return vars(run).get(_CONNECTION) or getattr(getattr(run, "_wl", None), "_connection", None)


def was_torn_down(run: Any, timeout_s: float) -> bool:
    """Whether `wandb.teardown` was the cause of a run's error, and has sent all rows. Waits while another thread does.

    The connection is closed before wandb-core has sent all. Without it, a run that is opened just then to send what is
    kept may get rows of both at one time.
    """
    with _optional("rows that a thread logs during wandb.teardown may be in another order"):
        return _exit_code_of(_connection_of(run), timeout_s) == 0
    return False


# What the texts of wandb's errors have: the status of an answer, what W&B says in others, and that a request was tried
# again until the time was over.
_STATUS = re.compile(r"returned error (\d{3})")
_CONFLICT = re.compile(r"(?:HTTP|error) 409\b")
_REFUSED = re.compile(r"permission denied|not found|unauthori[sz]ed|forbidden", re.IGNORECASE)
_REFUSED_ROWS = re.compile(r'"filestream: fatal error: (?:.*?: (\d{3}) )?')
_TRIED_AGAIN = re.compile(r"while retrying|giving up after|timed out|deadline", re.IGNORECASE)
# The largest log of a run that could not be opened, in bytes.
_LONGEST_LOG = 1 << 26


def is_outage(error: BaseException) -> bool:
    """Whether an error of `wandb.init` or `wandb.Api` is of an outage: see `TrackerUnavailableError`.

    wandb tries again until the time is over in an outage. What it gives up at once is an answer that no other try can
    change. It raises an AuthenticationError also if the server does not answer.
    """
    text, wandb = str(error), importlib.import_module("wandb")
    if status := _STATUS.search(text):
        return may_pass(int(status[1]))
    if _TRIED_AGAIN.search(text) or any(isinstance(one, (TimeoutError, ConnectionError)) for one in causes(error)):
        return True
    return not isinstance(error, wandb.errors.CommError) and not _REFUSED.search(text)


@functools.cache
def tolerate_outages() -> None:
    """Have W&B's check of a key raise in no outage: the first `log_artifact` of a run makes it.

    Without it, that call raises, after 20 s.
    """
    with _optional("the first log_artifact in an outage raises"):
        module: Any = importlib.import_module("wandb.sdk.wandb_login")
        check = module._verify_login

        def verify(*args: Any, **kwargs: Any) -> None:
            try:
                check(*args, **kwargs)
            except importlib.import_module("wandb").errors.Error as error:
                if not is_outage(error):
                    raise

        module._verify_login = verify


def is_deleted(error: BaseException) -> bool:
    """Whether W&B refuses to open a run that was deleted. Its client repeats that request until the time is over."""
    return bool(_CONFLICT.search(str(error)))


def is_own_run(directory: Path) -> bool:
    """Whether this process has made the directory of a run. A log has the process's id before the place in the code."""
    with contextlib.suppress(OSError):
        return f":{os.getpid()} [".encode() in read_own(directory / "logs" / "debug.log", _LONGEST_LOG)
    return False


def add_status(error: BaseException, directories: Iterable[Path]) -> None:
    """Add the HTTP status to the error of a `wandb.init`, unless it says that. Without it, it is taken for a refusal.

    wandb-core tells its log alone when it creates a run: the error is a text of the server's, or "<no message>".

    Args:
        error: The error.
        directories: Those of runs that this process could not open.
    """
    text = str(error)
    if _STATUS.search(text) or _TRIED_AGAIN.search(text):
        return
    for directory in directories:
        with contextlib.suppress(OSError):
            log = read_own(directory / "logs" / "debug-internal.log", _LONGEST_LOG).decode(errors="replace")
            if found := _STATUS.findall(log):
                status = f"the server has returned error {found[-1]}"
                error.args = (status if text == "<no message>" else f"{text} ({status})",)


def refusal_of_rows(directory: Path, unread: str = "") -> str:
    """Why wandb-core has given up sending the rows of a run; empty if it has not. It tells its log alone.

    Without it, a run may count as sent whose rows the server has refused, as it does when a key is revoked.

    Args:
        directory: The run's.
        unread: What to return if the log cannot be read.
    """
    with contextlib.suppress(OSError):
        log = read_own(directory / "logs" / "debug-internal.log", _LONGEST_LOG).decode(errors="replace")
        if found := _REFUSED_ROWS.search(log):
            return f"the server has refused its rows{(found[1] and f' with error {found[1]}') or ''}"
        return ""
    return unread


# Runs


def init(**arguments: Any) -> Any:
    """Call W&B's own `wandb.init`, in spite of `client.join_calls`."""
    return inspect.unwrap(importlib.import_module("wandb").init)(**arguments)


def parse_config(config: Any, exclude: Any = None, include: Any = None) -> Mapping[str, Any]:
    """Return the `config=` of `wandb.init` as a mapping. It may be the path of a file."""
    helper: Any = importlib.import_module("wandb").helper
    values: Mapping[str, Any] = helper.parse_config(config, exclude=exclude, include=include)
    return values


def syncs_tensorboard() -> bool:
    """Whether W&B logs what is written for TensorBoard."""
    return bool(importlib.import_module("wandb").patched["tensorboard"])


def sync_tensorboard() -> None:
    """Log what is written for TensorBoard to `wandb.run`, as `wandb.init(sync_tensorboard=True)` does."""
    wandb: Any = importlib.import_module("wandb")
    if not syncs_tensorboard():
        wandb.tensorboard.patch()


def monitor_gym() -> None:
    """Log videos of Gym's environments to `wandb.run`, as `wandb.init(monitor_gym=True)` does."""
    if not importlib.import_module("wandb").patched["gym"]:
        importlib.import_module("wandb.integration.gym").monitor()


def interface_of(run: Any) -> Any:
    """What hands records to wandb-core: an attribute of the run's `_backend` before 0.26."""
    interface = getattr(run, "_interface", None)
    return run._backend.interface if interface is None else interface


class Progress(NamedTuple):
    """How far wandb-core has come with a run.

    Attributes:
        uploaded: The bytes of files that it has sent.
        total: The bytes of these files.
        doing: What it does now, such as "uploading artifact weights": at most 10 of these.
        is_troubled: Whether one of these has failed, and is to be tried again.
    """

    uploaded: int
    total: int
    doing: tuple[str, ...]
    is_troubled: bool


def progress_of(run: Any) -> Progress | None:
    """Return how far wandb-core has come; None if it does not say. Without it, a long upload may be cut at the end."""
    with contextlib.suppress(Exception), _optional(_MAY_BE_CUT):  # it has just ended the run, or has died
        result = interface_of(run).deliver_poll_exit().wait_or(timeout=_ANSWER_S)
        found = result.response.poll_exit_response
        operations = found.operation_stats.operations
        return Progress(
            found.pusher_stats.uploaded_bytes,
            found.pusher_stats.total_bytes,
            tuple(one.desc for one in operations),
            any(one.error_status for one in operations),
        )
    return None


def update_config(run: Any, values: Mapping[str, Any]) -> None:
    """Change the config of a run, at any time."""
    kind: Any = type(run.config)
    getattr(kind, "__wrapped__", kind).update(run.config, values, allow_val_change=True)


def forget(run: Any, keys: Collection[str]) -> None:
    """Remove keys from the summary that an earlier attempt has set."""
    for key in set(keys).intersection(run.summary.keys()):
        del run.summary[key]


def finish_while(lasts: Callable[[], bool], run: Any, exit_code: int, finish: Callable[[], object]) -> None:
    """Call `finish`, which ends the run, in a thread, as long as `lasts` returns True. Then stop wandb-core.

    It may send a status when it is stopped: the run's own one, but that of a success, which is not sent whole.

    Raises:
        TimeoutError: It was stopped. What was not sent is in the local files.
    """
    errors: list[Exception] = []

    def call() -> None:
        try:
            finish()
        except Exception as error:
            errors.append(error)

    is_done = False
    try:
        is_done = threads.run_while(lasts, call)
    finally:
        if not is_done:  # also after an exception out of a signal's handler
            set_finished(run)
            restart_service(_CUT_S, exit_code or 1)
    if not is_done:
        raise TimeoutError("the run was not sent in time")
    if errors:
        raise errors[0]


def is_finished(run: Any) -> bool:
    """Whether the run has ended. Without it, a run counts as open."""
    return bool(getattr(run, "_is_finished", False))


def set_finished(run: Any) -> None:
    """Mark a run as ended that has no wandb-core any more, so that wandb does not end it again.

    Without it, a `wandb.init` after this run may return it.
    """
    run._is_finished = True
    vars(run)["_cached_public_api"] = None  # it asks by way of wandb-core
    with _optional("wandb.init may return a run whose wandb-core has died"):
        runs = session()._active_runs
        runs[:] = [other for other in runs if other is not run]


def let_go(run: Any, limit_s: float) -> None:
    """Close an open run in wandb-core, and do not end it: another process has it.

    Without it, this process cannot open the run again, and W&B shows it as running as long as this process lives.
    """
    with _optional("a run that another process has taken over cannot be opened again"):
        _end_within(limit_s, lambda: _connection_of(run).inform_finish(run.id))
    set_finished(run)


def take_late_calls(run: Any, is_late: Callable[[], bool]) -> None:
    """Have a run that has ended, or will, take the calls of a thread of which `is_late` is true, instead of raising."""
    kind: Any = type(run)

    def is_finished(run: Any) -> bool:
        return bool(vars(run)["_is_finished"]) and not is_late()

    ended = property(is_finished, lambda run, value: vars(run).update(_is_finished=value))
    run.__class__ = type(kind.__name__, (kind,), {"_is_finished": ended, "__module__": kind.__module__})


def set_resumed(run: Any, is_resumed: bool) -> None:
    """Correct `run.resumed`: W&B calls a run resumed that another rank has just created. Without it, that stays."""
    with _optional("run.resumed may be True for a new run of several ranks"):
        run._settings.resumed = is_resumed


def replace_sync_command(run: Any, command: Callable[[], str]) -> None:
    """Have the last lines of an offline run name `command` and not `wandb sync`, which does not know all rows."""
    with _optional("the last lines of an offline run name wandb sync; use flyteplugins-tracking send"):
        show, replaced = run._printer.display, f"wandb sync {run.settings.sync_dir}"

        def display(text: Any, **options: Any) -> None:
            lines = [text] if isinstance(text, str) else text
            show([line.replace(replaced, command()) if replaced in line else line for line in lines], **options)

        run._printer.display = display


def set_config(run: Any, config: Any) -> None:
    """Set the values in `run.config` without sending them. Without it, `run.config` lacks them on this rank."""
    with _optional("run.config lacks the values of another writer"):
        run.config._update(config, allow_val_change=True, ignore_locked=True)


def flush(run: Any, timeout_s: float) -> None:
    """Return when wandb-core has read what was logged: it answers in the order in which it reads."""
    with contextlib.suppress(Exception):  # it is too slow, or has died: who ends the run notices that
        threads.call_within(timeout_s, lambda: interface_of(run).deliver_get_summary().wait_or(timeout=timeout_s))


# Rows, and the records of wandb-core's file


@functools.cache
def _messages() -> Any:
    return importlib.import_module("wandb.proto.wandb_internal_pb2")


def on_records(run: Any, publish: Callable[..., Any], deliver: Callable[..., Any]) -> None:
    """Have all that a run's client gives to wandb-core go through two functions, which get the client's own one first.

    Without it, nothing is kept.

    Args:
        run: The open run.
        publish: Gives a record to wandb-core.
        deliver: Gives it one that is answered.
    """
    vars(run)[_CONNECTION] = _connection_of(run)  # the session may get another one while this run is open
    with _optional("rows that are not sent at a kill are lost"):
        interface = interface_of(run)
        first, second = interface._publish, interface._deliver
        interface._publish = functools.partial(publish, first)
        interface._deliver = functools.partial(deliver, second)


def forward(run: Any, data: bytes) -> None:
    """Give the wandb-core of an open run a serialized record of the file of another process."""
    with _optional(
        "of a run that is sent while it is logged, W&B gets no summary, definition and config set after init"
    ):
        record = _messages().Record()
        record.ParseFromString(data)
        for field in ("num", "control", "uuid", "_info"):
            record.ClearField(field)
        interface_of(run)._publish(record)


def forward_summary(run: Any, update: Iterable[Any], remove: Iterable[Any] = ()) -> None:
    """Give the wandb-core of an open run items of the summary records of another process."""
    record = _messages().Record()
    record.summary.update.extend(update)
    record.summary.remove.extend(remove)
    if record.summary.ByteSize():
        forward(run, record.SerializeToString())


def removal_of(keys: Iterable[str]) -> bytes:
    """Return the serialized record that removes keys from a run's summary."""
    record = _messages().Record()
    for key in keys:
        record.summary.remove.add().key = key
    return bytes(record.SerializeToString())


def leave_console_alone() -> str:
    """Have no run take what this process prints, from now on. Returns a setting, with which runs take consoles."""
    with _optional("of a run that is sent while it is logged, W&B gets no console"):
        kind = importlib.import_module("wandb.sdk.wandb_run").Run
        assert callable(kind._redirect)
        kind._redirect = lambda *_, **__: None
        return "wrap"
    return "off"


class KeptArtifact(NamedTuple):
    """An artifact that was logged.

    Attributes:
        name: Its name.
        record: What wandb-core gets.
        is_whole: Whether this disk has all its files.
        was_copied: Whether these are copies of the client's, which it removes when W&B has them. With
            `policy="immutable"`, it makes none.
    """

    name: str
    record: Any
    is_whole: bool
    was_copied: bool

    @classmethod
    def of(cls, data: bytes) -> KeptArtifact:
        """Read an artifact that was serialized."""
        record = _messages().ArtifactRecord()
        record.ParseFromString(data)
        manifest, copies = record.manifest, Path(_staging_directory())
        is_whole = was_copied = True
        if manifest.manifest_file_path:  # it lists the files of an artifact with many. wandb-core removes it first
            listing = copies / "artifact_manifests" / Path(manifest.manifest_file_path).name
            is_whole, was_copied = is_own_file(listing), False
            manifest.manifest_file_path = str(listing)
        for entry in (entry for entry in manifest.contents if entry.local_path):
            path = Path(entry.local_path)
            if path.parent.parts[-2:] == copies.parts[-2:]:  # the job's WANDB_DATA_DIR may have been another one
                path = copies / path.name
            is_whole = is_whole and is_own_file(path)
            was_copied = was_copied and path.parent == copies
            entry.local_path = str(path)
        return cls(record.name, record, is_whole, was_copied)

    def send(self, run: Any) -> Any:
        """Give it to the wandb-core of an open run. Returns what `was_sent` takes.

        The record may be a stranger's, and name any file of this user. So one that has not the digest of the record is
        taken for a copy that is gone: W&B may have it.
        """
        request = _messages().LogArtifactRequest(artifact=self.record)
        request.artifact.run_id, request.staging_dir = run.id, _staging_directory()
        for entry in (entry for entry in request.artifact.manifest.contents if entry.local_path):
            path, copies = Path(entry.local_path), Path(request.staging_dir)
            if path.parent != copies and not (is_own_file(path) and _md5(path) == entry.digest):
                entry.local_path = str(copies / path.name)
        return interface_of(run)._deliver_artifact(request)


def was_sent(sending: Any) -> bool:
    """Wait until W&B has an artifact, or wandb-core has failed to send it. W&B knows those that it has."""
    return not sending.wait_or(timeout=None).response.log_artifact_response.error_message


def _staging_directory() -> str:
    return os.path.realpath(str(importlib.import_module("wandb.sdk.artifacts.staging").get_staging_dir()))


def parse_row(data: bytes) -> Any:
    """Return a row that was serialized."""
    row = _messages().PartialHistoryRequest()
    row.ParseFromString(data)
    return row


def item_of(key: str, value: Any) -> Any:
    """Return a value of a row."""
    return _messages().HistoryItem(key=key, value_json=json.dumps(value))


def log_row(run: Any, items: Iterable[Any], step: int, *, waits: bool) -> None:
    """Give the wandb-core of an open run a row, at a step if that is not below 0.

    Args:
        run: The run.
        items: The row's values.
        step: Its step.
        waits: Whether to wait until wandb-core has it, which raises if that has died. Rows stay in their order.
    """
    record = _messages().Record()
    row = record.request.partial_history
    row.item.extend(items)
    row.action.flush = True
    if step >= 0:
        row.step.num = step
    interface_of(run)._publish(record, **({} if waits else unawaited(run)))


def unawaited(run: Any) -> dict[str, bool]:
    """Return the argument with which a run's client hands a record to its thread, and does not wait for that.

    Without it, it waits, which takes most of the time of a `log`.
    """
    publish: Any = type(interface_of(run))._publish
    # Before Python 3.10.7, asyncio breaks a connection that two records wait for.
    may_go_on = "nowait" in (publish.__kwdefaults__ or ()) and sys.version_info >= (3, 10, 7)
    return {"nowait": True} if may_go_on else {}


def json_of(item: Any) -> str:
    """Return the value of an item of a row as JSON."""
    if item.value_json:
        return str(item.value_json)
    kind = item.WhichOneof("value") if "value" in item.DESCRIPTOR.oneofs_by_name else None
    return item.json if kind == "json" else json.dumps(getattr(item, kind) if kind and kind != "none" else None)


def parse_record(data: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a record of a `.wandb` file."""
    record = _messages().Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type") or ""
    return kind, getattr(record, kind, None)


class Stored(NamedTuple):
    """The state of a run at the service; without arguments, of one that is not there."""

    state: str = ""
    rows: int = 0
    last_step: int = -1
    config: Mapping[str, Any] = {}
    summary: Mapping[str, Any] = {}
    run: Any = None

    @property
    def last_at(self) -> float | None:
        """When its last row was logged, in seconds since the epoch; None if it does not say."""
        at = self.summary.get("_timestamp")
        return float(at) if isinstance(at, (int, float)) else None

    @property
    def plain_summary(self) -> dict[str, Any]:
        """The summary as values of JSON, without the client's own but the time of the last row."""
        plain = json.loads(json.dumps(dict(self.summary), default=dict))
        return {key: value for key, value in plain.items() if key[:1] != "_" or key == "_timestamp"}

    def time_at(self, step: int) -> float | None:
        """Return when the row at a step was logged; None if there is none."""
        found = self.run.scan_history(keys=["_timestamp"], min_step=step, max_step=step + 1)
        return next((row["_timestamp"] for row in found), None)

    def times(self, since: int) -> Iterator[float]:
        """Yield when the rows from a step on were logged: that tells rows apart, whatever their steps are."""
        return chain.from_iterable(self.values_backwards("_timestamp", since))

    def values(self, column: str, *beside: str) -> list[Any]:
        """Return values of a column in the order of their steps: at most 500, with the last one.

        Args:
            column: The column.
            beside: Other columns that a row must have too.
        """
        rows = self.run.history(keys=[column, *beside], samples=_SAMPLES, pandas=False)
        return [row[column] for row in sorted(rows, key=lambda row: int(row["_step"]))]

    def lacks(self, files: Mapping[str, Path | None], *, has_later: bool = False) -> list[str]:
        """Return which of these files it has not got, or with other bytes.

        Args:
            files: Where each file is on this disk, by its name; None if it is not there any more.
            has_later: Whether a later attempt has logged since: then its file stays if that is the newer one.
        """
        names = list(files)
        parts = [names[start : start + _SAMPLES] for start in range(0, len(names), _SAMPLES)]
        found = {file.name: file for part in parts for file in self.run.files(part, per_page=_SAMPLES)}
        return [name for name, path in files.items() if name not in found or _differs(found[name], path, has_later)]

    def values_backwards(self, column: str, since: int) -> Iterator[list[Any]]:
        """Yield the values of a column in the last rows of the run, then in those before them, back to a step.

        The first rows are as many as the service gives at once. Each time after that there are eight times as many.
        """
        end, size = self.last_step + 1, _PAGE
        while end > since:
            begin = max(since, end - size)
            found = self.run.scan_history(
                keys=[column], min_step=begin, max_step=end, page_size=min(size, _LONGEST_PAGE)
            )
            yield [row[column] for row in found]
            end, size = begin, 8 * size


def _differs(stored: Any, path: Path | None, has_later: bool) -> bool:
    """Whether a file at the service has other bytes than one here. A service may not say which bytes it has."""
    if path is None or not stored.md5:
        return False
    at = str(stored.updated_at or "")[:19]
    if has_later and at and datetime.fromisoformat(f"{at}+00:00").timestamp() > path.stat().st_mtime:
        return False
    return bool(stored.md5 != _md5(path))


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return b64encode(digest.digest()).decode()


class Reader:
    """Reads what the service has of the run at an `attempts.Place`. Only the first time asks whose key it is, too."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._api: Any = None

    def stored(self, timeout_s: float = 10.0) -> Stored | None:
        """Return what the service has of the run; None if it does not have it.

        Raises:
            TrackerUnavailableError: It does not say; it is no outage if it does not take the key.
        """
        wandb: Any = importlib.import_module("wandb")
        place = self._place

        def ask() -> Stored:
            if self._api is None:
                named = {"entity": place.entity} if place.entity else {}
                settings = {"base_url": _as_set_up(place.server), **named}
                self._api = wandb.Api(settings, timeout=timeout_s, api_key=keys.get(place.server))
            self._api.flush()
            run = self._api.run(place.path)
            last_step = (run.historyKeys or {}).get("lastStep", -1)  # `lastHistoryStep` asks for it once more
            return Stored(run.state, int(run.historyLineCount or 0), int(last_step), dict(run.config), run.summary, run)

        try:
            return threads.call_within(timeout_s, ask)  # the client has no limit for its repetitions
        except (wandb.errors.Error, ValueError, OSError, *CHANGED) as error:
            if "Could not find run" in str(error):
                return None
            if _is_refusal(error):
                raise TrackerUnavailableError(
                    f"the server refuses the API key ({first_line(error)}). Set WANDB_API_KEY to one that may use the "
                    "project, or run `wandb login`",
                    is_outage=False,
                ) from error
            text = f"W&B does not say whether there is run {place.run_id}: {first_line(error)}"
            raise TrackerUnavailableError(text, is_outage=is_outage(error)) from error
        finally:
            ask_again_at_exit()


def _is_refusal(error: BaseException) -> bool:
    """Whether the service has refused the key. Without it, it is asked again."""
    answers = [getattr(one, "response", None) for one in causes(error)]
    # The second is of `requests`, before 0.28.
    return any(getattr(answer, name, 0) in (401, 403) for answer in answers for name in ("http_status", "status_code"))


def stored_run(place: Any) -> Stored | None:
    """Return what the service has of the run at an `attempts.Place`; None if it does not have it, or does not say."""
    with contextlib.suppress(TrackerUnavailableError):
        return Reader(place).stored()
    return None


def open_to_send(place: Any, described: Mapping[str, Any], directory: str, more: Mapping[str, Any]) -> Any:
    """Open a run to send what another process has left of it. Does not change what the service knows of it.

    Args:
        place: The run's server, entity, project and id.
        described: Arguments of `wandb.init`, for a service that does not have the run.
        directory: Where wandb keeps its files meanwhile.
        more: More settings. Those of a run with several writers have an `x_label`: it is opened in W&B's shared mode.
    """
    names = ("x_disable_meta", "x_disable_stats", "x_disable_machine_info", "disable_git", "disable_code", "silent")
    server, quiet = _as_set_up(place.server), dict.fromkeys(names, True)
    own = {"base_url": server, "console": "off", "api_key": keys.get(place.server), "reinit": "create_new"}
    settings = new_settings(**{**own, **quiet, **more})
    disable_error_reports()
    run = init(
        id=place.run_id,
        project=place.project or None,
        entity=place.entity or None,
        resume="allow",
        mode="shared" if "x_label" in more else "online",
        dir=directory,
        settings=settings,
        **described,
    )
    ask_again_at_exit()
    return run


def _as_set_up(server: str) -> str:
    """Return the address with the password that this process is set up with, which no file of the library has."""
    address = str(session().settings.base_url)
    return address if without_credentials(address) == server else server


# The global run: `wandb.run`


class _Inherited(PerProcess):
    """The run that a forked child has inherited as `wandb.run`."""

    def __init__(self) -> None:
        self.run: Any = None

    def after_fork_in_child(self) -> None:
        self.run = getattr(sys.modules.get("wandb"), "run", None)


_inherited = register(_Inherited())


def global_run() -> Any:
    """Return `wandb.run`; None in a forked child that has inherited it, and cannot end it."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is _inherited.run else run


def set_global_run(run: Any) -> None:
    """Set `wandb.run` and `wandb.log`, which frameworks use; None unsets them. `reinit="create_new"` leaves them.

    Without it, they stay those of a run that has ended.
    """
    wandb: Any = importlib.import_module("wandb")
    if run is None:
        with _optional("wandb.log refers to a run that has ended"):
            importlib.import_module("wandb.sdk.lib.module").unset_globals()
        return
    for name in _GLOBALS:
        if hasattr(run, name):
            setattr(wandb, name, getattr(run, name))
    wandb.run = run


# Settings


@functools.cache
def has_setting(name: str) -> bool:
    """Whether this version has a setting."""
    return name in importlib.import_module("wandb").Settings.model_fields


def new_settings(**values: Any) -> Any:
    """Return a `wandb.Settings` with those of the values that it has a setting for. Required by every run."""
    with _required():
        known = {name: value for name, value in values.items() if has_setting(name)}
    return importlib.import_module("wandb").Settings(**known)


def effective_settings(settings: Any) -> Any:
    """`settings` over those of the session, which come from the environment and the files. Required by every run."""
    with _required():
        effective = session().settings.model_copy()
        effective.update_from_settings(settings)
        return effective


def set_default(settings: Any, effective: Any, name: str, value: Any) -> None:
    """Set one of wandb's undocumented settings, unless the user has. Without it, wandb's own default applies."""
    if name in effective.model_fields_set or not has_setting(name):
        return
    with contextlib.suppress(ValueError):  # pydantic's, for a type that it does not know
        setattr(settings, name, value)


def set_required(settings: Any, **values: Any) -> None:
    """Set undocumented settings. Required by runs with several writers, whose rows or files would mix otherwise."""
    with _required("runs that several ranks or jobs write to"):
        for name, value in values.items():
            if not has_setting(name):
                raise AttributeError(f"no setting {name}")
            setattr(settings, name, value)


def on_stop_request(settings: Any, effective: Any, function: Callable[[], object]) -> None:
    """Call `function` when somebody has pressed the run's Stop button, or wandb-core has given up sending.

    The user's own `stop_fn` takes precedence. Without it, before 0.26, wandb interrupts the rank that has the run, and
    no other.

    Args:
        settings: Those of the run.
        effective: They, over those of the session.
        function: The function.
    """
    if has_setting("stop_fn") and settings.stop_fn is None:
        settings.stop_fn = function
        set_default(settings, effective, "stop_on_fatal_error", True)  # since 0.27


# Credentials

# The keys that users have passed to this process, by the server.
keys: dict[str, str] = {}


def has_credentials(host: str) -> bool:
    """Whether `wandb.init` will find a key. `wandb.login(host=)` would ask the server and write to the user's files.

    Without it, `wandb.init` itself says that a key is missing.
    """
    with _optional("wandb itself says that an API key is missing"):
        auth = find_spec("wandb.sdk.lib.wbauth") and importlib.import_module("wandb.sdk.lib.wbauth")
        if not auth or "prompt" not in inspect.signature(auth.authenticate_session).parameters:  # before 0.30
            return bool(importlib.import_module("wandb").api.api_key)
        return auth.authenticate_session(host=host, source="tracking_init", prompt=False) is not None
    return True
