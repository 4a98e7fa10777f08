"""The undocumented names of Pluto's client (`pluto-ml`). No other module uses them.

`PARTS` lists each name with its use, and the feature that is lost without it. The functions below it use them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flyteplugins_tracking._util.files import link_or_copy, own_file_in
from flyteplugins_tracking.trackers.vendor_parts import Part, VendorParts

logger = logging.getLogger(__name__)

# The data type of queued rows that are requests, to be posted as they are.
POST = "flyteplugins_tracking.post"

_KEYS = "a step that logs a new key waits for the service"
_SYSTEM_METRICS = "metrics of the system"
_CONSOLE = "the console's lines"
_STORE = "pluto.sync.store"
_PROCESS = "pluto.sync.process"
PARTS = VendorParts(
    "Pluto",
    "pluto-ml==0.0.29",
    [
        Part("pluto.op:login", "keeps the client from writing the API key to a file and from asking for one"),
        Part("pluto.op:Op.log", "writes a row, with the time at which it was logged"),
        Part("pluto.op:Op.close", "ends the run in this process and leaves its status"),
        Part("pluto.op:Op.finish", "ends the run with a status"),
        Part("pluto.op:Op._init_sync_manager", "makes a queue for each rank"),
        Part("op._use_sync_process", "makes the client put rows into the queue"),
        Part("op._sync_manager", "holds the queue"),
        Part("op._monitor", "stops the client's threads at the run's end"),
        Part("op._queue", "wakes the client's thread, so that the run's end does not wait for it"),
        Part("op._status_update_error", "says whether the service has taken the run's status"),
        Part("op._iface", "sends new keys through the queue", _KEYS),
        Part(
            "op._latest_metrics", "shows the last values in the task's report", "the last values in the task's report"
        ),
        Part("monitor._stop_event", "stops the client's monitor"),
        Part("settings._auth", "holds the API key"),
        Part("settings._op_id", "holds the service's number of the run"),
        Part("settings._op_name", "holds the run's name"),
        Part("settings._sys", "describes the machine"),
        Part("settings.url_resume", "is where the service says whether it has the run"),
        Part("settings.url_ingest", "is where the service says the run's last step"),
        Part("settings.url_meta", "is where new keys are registered"),
        Part("manager._started", "keeps the client from starting its own uploader"),
        Part("manager.store", "holds the rows that are not sent yet"),
        Part("manager.settings", "holds the service's addresses for our uploader"),
        Part("manager.db_path", "is the queue's file"),
        Part("manager.run_id", "is the run's name in the queue"),
        Part("pluto:System", "describes the machine", _SYSTEM_METRICS),
        Part("pluto.api:make_compat_monitor_v1", "gives the first metrics of the system", _SYSTEM_METRICS),
        Part("pluto.log:setup_logger", "captures the console", _CONSOLE),
        Part("pluto.log:flush_console_buffers", "sends the console's last lines", "the console's last lines"),
        Part("pluto.util:get_char", "writes the project's name as the service does", "characters are not replaced"),
        Part(f"{_STORE}:SyncStore.reset_failed_to_pending", "sends again what a killed uploader was sending"),
        Part(f"{_STORE}:SyncStore.mark_completed", "takes sent rows out of the queue"),
        Part(f"{_STORE}:SyncStore.cleanup_completed", "keeps the queue small", "the queue's file grows with the run"),
        Part(f"{_STORE}:SyncStore.heartbeat", "is left out, since it writes to the disk with each row"),
        Part(f"{_PROCESS}:SyncProcessManager.enqueue_data", "queues a request"),
        Part(f"{_PROCESS}:SyncProcessManager.enqueue_system_metrics", "queues metrics of the system"),
        Part(f"{_PROCESS}:SyncProcessManager.close", "closes the queue"),
        Part(f"{_PROCESS}:_sync_batch", "sends a part of the queue"),
        Part(f"{_PROCESS}:_SyncUploader._get_headers", "identifies the run of a request"),
        Part(
            f"{_PROCESS}:_SyncUploader._post_with_retry", "sends a request, which our uploader sends until it is taken"
        ),
        Part(f"{_PROCESS}:_SyncUploader.upload_metrics_batch", "sends rows"),
        Part(f"{_PROCESS}:_SyncUploader.upload_data_batch", "sends requests other than rows and files"),
    ],
)
# The codes of the queue's rows (`RecordType`), and of how far they are (`SyncStatus`).
METRIC, SYSTEM = 0, 5
_COMPLETED, _ABANDONED = 2, 4
_FOREVER = 1 << 30
_FILE_COLUMNS = (
    *("local_path", "file_name", "file_ext", "file_type", "file_size", "log_name", "timestamp_ms"),
    *("step", "caption", "annotations", "sample_index", "created_at"),
)
# What has been logged first is sent first: `created_at` says when.
_COPY_ROWS = """
    INSERT INTO main.sync_queue (run_id, record_type, payload_json, timestamp_ms, step, created_at)
    SELECT ?, record_type, payload_json, timestamp_ms, step, created_at FROM other.sync_queue
    WHERE status != ? ORDER BY id
"""
_ADD_FILE = f"""
    INSERT INTO main.file_uploads (run_id, {", ".join(_FILE_COLUMNS)}) VALUES (?{", ?" * len(_FILE_COLUMNS)})
"""  # noqa: S608 our own names
# How long a statement waits for another process, in seconds.
_BUSY_S = 5.0


# Before the run is opened.


def project_name(name: str) -> str:
    """Return the project's name as the client sends it."""
    if not PARTS.has("pluto.util:get_char"):
        return name
    from pluto.util import get_char

    return str(get_char(name))


def set_key(settings: Any, key: str) -> None:
    """Give the client the API key, and have it skip its own login for this run.

    The login would write the key to a file on each rank, and prompt for one on ranks without a terminal.
    """
    settings._auth = key
    settings._flyteplugins_key_known = True
    _skip_login_of_known_keys()


def key_of(settings: Any) -> str | None:
    """Return the API key that the settings hold."""
    key: str | None = settings._auth
    return key


def _skip_login_of_known_keys() -> None:
    import pluto.op

    vendors = pluto.op.login
    if getattr(vendors, "_is_flyteplugins", False):
        return

    def login(settings: Any = None, retry: bool = False) -> Any:
        return None if getattr(settings, "_flyteplugins_key_known", False) else vendors(settings, retry)

    login._is_flyteplugins = True  # type: ignore[attr-defined]
    pluto.op.login = login


def request_headers(settings: Any) -> dict[str, str]:
    """Return the headers of the client's own requests."""
    return {
        "Authorization": f"Bearer {settings._auth}",
        "Content-Type": "application/json",
        "X-Run-Id": str(settings._op_id),
        "X-Run-Name": str(settings._op_name),
        "X-Project-Name": settings.project,
    }


def leave_to_us(settings: Any, *, describes_machine: bool) -> None:
    """Have `pluto.init` start no uploader, no console capture and no system metrics: `complete` starts ours."""
    settings._flyteplugins_asked = settings.disable_console, settings.disable_system_metrics
    settings.sync_process_enabled, settings.disable_console, settings.disable_system_metrics = False, True, True
    is_known = describes_machine and PARTS.has("pluto:System")
    settings._sys = _system(settings) if is_known else _UnknownMachine()


def machine_of(settings: Any) -> Any:
    """Return the client's description of this machine."""
    return settings._sys.get_info()


def asked_for(settings: Any) -> tuple[bool, bool]:
    """Return the user's `disable_console` and `disable_system_metrics`, from before `leave_to_us`."""
    disable_console, disable_system_metrics = settings._flyteplugins_asked
    return disable_console, disable_system_metrics


def _system(settings: Any) -> Any:
    from pluto import System

    return System(settings)


class _UnknownMachine:
    """Stands for `pluto.System` on ranks that send no metrics of the system: it takes half a second to make."""

    def get_info(self) -> dict[str, Any]:
        return {}

    def monitor(self) -> dict[str, Any]:
        return {}


# The open run.


def check_run(op: Any) -> None:
    """Refuse a run object that lacks a required name.

    Raises:
        TrackerNotInstalledError: It does.
    """
    PARTS.require_of("op", op)
    PARTS.require_of("monitor", op._monitor)
    PARTS.require_of("settings", op.settings)


def start_queue(op: Any, database: str) -> Any:
    """Give the run a queue in the file `database`, without the client's uploader.

    Returns:
        The settings for our uploader: plain values. The batch size is not among them.
    """
    op.settings.sync_process_enabled = op._use_sync_process = True
    op.settings.sync_process_db_path = database
    op._init_sync_manager()
    manager = op._sync_manager
    PARTS.require_of("manager", manager)
    manager._started = True
    manager.store.heartbeat = _do_nothing
    if PARTS.has("op._iface", op):
        op._iface._update_meta = functools.partial(register_keys, op)
    return {name: value for name, value in manager.settings.items() if name != "_config"}


def on_cancel(op: Any, function: Callable[[Callable[[], object]], object]) -> None:
    """Call `function` once when the run is cancelled at the service, with what the client does by itself: it exits.

    Without it, the client ends the process. Its monitor asks the service every few seconds.
    """
    interface: Any = getattr(op, "_iface", None)
    trigger = getattr(op.settings, "url_trigger", None)
    post = getattr(interface, "_post_v1", None)
    if post is None or trigger is None:
        PARTS.lose("a run that is cancelled at the service ends its process", "no op._iface._post_v1")
        return
    asked: list[bool] = []

    def post_and_look(url: Any, *args: Any, **kwargs: Any) -> Any:
        answer = post(url, *args, **kwargs)
        if url != trigger or not hasattr(answer, "json") or answer.json().get("status") != "CANCELLED":
            return answer
        if not asked:
            asked.append(True)
            function(lambda: os._exit(signal.SIGINT.value))
        return None  # with the answer, the client would exit

    interface._post_v1 = post_and_look


def _do_nothing(*_: Any, **__: Any) -> None:
    """The heartbeat shows the client's uploader that the rank is alive. Our uploader asks the system."""


def register_keys(op: Any, num: Sequence[str] | None = None, df: Mapping[str, Sequence[str]] | None = None) -> None:
    """Register new keys through the queue. The client itself would have the step wait for the service."""
    for kind, names in [("METRIC", num), *((name.upper(), of_kind) for name, of_kind in (df or {}).items())]:
        if names:
            body = {"runId": op.settings._op_id, "logType": kind, "logName": list(names)}
            post(op, op.settings.url_meta, body)


def post(op: Any, url: str, body: Mapping[str, Any]) -> None:
    """Queue a request that our uploader posts as it is."""
    if op._sync_manager is not None:
        op._sync_manager.enqueue_data(url, POST, dict(body), int(time.time() * 1000))


def post_notes(op: Any, notes: str) -> None:
    """Set the run's notes. The service takes them; the client has no call for that."""
    post(op, f"{op.settings.url_api}/api/runs/notes/update", {"runId": op.settings._op_id, "notes": notes[:1000]})


def send_system_metrics(op: Any) -> None:
    """Send the metrics of the system from now on."""
    if not PARTS.has("pluto.api:make_compat_monitor_v1") or isinstance(op.settings._sys, _UnknownMachine):
        return
    from pluto.api import make_compat_monitor_v1

    metrics = make_compat_monitor_v1(op.settings._sys.monitor())
    register_keys(op, num=list(metrics))
    op._sync_manager.enqueue_system_metrics(metrics, int(time.time() * 1000))
    op.settings.disable_system_metrics = False  # the client's monitor, which runs, sends from now on


def capture_console(op: Any) -> None:
    """Send the console's lines from now on."""
    if not PARTS.has("pluto.log:setup_logger"):
        return
    from pluto.log import setup_logger

    op.settings.disable_console = False
    setup_logger(op.settings, logging.getLogger("pluto"), logging.getLogger("console"), op._sync_manager)


def latest_metrics(op: Any) -> dict[str, Any]:
    """Return the last values that were logged."""
    return dict(op._latest_metrics) if PARTS.has("op._latest_metrics", op) else {}


# The end of the run.


def stop_threads(op: Any, exit_code: int) -> None:
    """Stop the client's threads, and flush the console's lines into the queue."""
    if not op.settings.disable_console and PARTS.has("pluto.log:flush_console_buffers"):
        from pluto.log import flush_console_buffers

        flush_console_buffers()
    op.settings.x_thread_join_timeout_seconds = 1
    op._monitor._stop_event.set()
    op._queue.put(({}, 0, None))  # wakes a thread that looks at the event once a second
    op._monitor.stop(exit_code)


def take_queue(op: Any) -> Any:
    """Take the queue from the run, so that the client does not wait for it. Our uploader sends the rest.

    Returns:
        The queue, to be closed.
    """
    manager = op._sync_manager
    op._sync_manager = op._monitor.op._sync_manager = None
    return manager


def end(op: Any, exit_code: int | None) -> bool:
    """End the run in this process.

    Args:
        op: The run.
        exit_code: The exit code for the service; None to leave the run's status as it is.

    Returns:
        Whether the service has taken the status.
    """
    if exit_code is None:
        type(op).close(op)
    else:
        type(op).finish(op, exit_code)
    return op._status_update_error is None


# The uploader's process.


def open_store(database: str, parent_pid: int) -> Any:
    """Open the queue of the process `parent_pid`."""
    from pluto.sync.store import SyncStore

    store = SyncStore(database, parent_pid=parent_pid)
    begin_anew(store)
    return store


def begin_anew(store: Any) -> None:
    """Have the rows be sent that an uploader has begun to send, and has not finished: it may have been killed."""
    store.reset_failed_to_pending()


def uploader_class() -> Any:
    """Return the class of the client's uploader."""
    from pluto.sync.process import _SyncUploader

    return _SyncUploader


def send_batch(store: Any, uploader: Any, log: logging.Logger, rows: int, files: int) -> int:
    """Send a part of the queue once. Returns how much was sent."""
    from pluto.sync.process import _sync_batch

    sent: int = _sync_batch(store, uploader, log, _FOREVER, rows, files)
    return sent


def clean(store: Any, older_than_s: float) -> None:
    """Remove sent rows from the queue's file."""
    if PARTS.has(f"{_STORE}:SyncStore.cleanup_completed"):
        store.cleanup_completed(older_than_seconds=older_than_s)


# The queue's tables.


def count_unsent(connection: sqlite3.Connection) -> int:
    """Count the rows and files of a queue that are not sent yet."""
    rows = connection.execute("SELECT COUNT(*) FROM sync_queue WHERE status != ?", (_COMPLETED,))
    files = connection.execute("SELECT COUNT(*) FROM file_uploads WHERE status NOT IN (?, ?)", (_COMPLETED, _ABANDONED))
    return int(rows.fetchone()[0] + files.fetchone()[0])


def unsent_rows(database: str) -> list[tuple[int, str, int, int | None]]:
    """Return the rows that are not sent: kind, payload as JSON, time in milliseconds, step."""
    query = "SELECT record_type, payload_json, timestamp_ms, step FROM sync_queue WHERE status != ? ORDER BY id"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return list(connection.execute(query, (_COMPLETED,)))


def last_step_in(database: str) -> int:
    """Return the highest step of the rows in a queue; 0 if there is none."""
    query = "SELECT MAX(step) FROM sync_queue WHERE record_type = ?"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(database)}?mode=rw", uri=True)) as connection:
            return int(connection.execute(query, (METRIC,)).fetchone()[0] or 0)
    except sqlite3.Error:  # it was just removed, or its rank was killed before it was made
        return 0


def move_queue(op: Any, database: str, written_in: str, directory: str) -> int:
    """Copy what a queue has not sent to the queue of `op`, with its times and steps, to be sent before later rows.

    Args:
        op: The run.
        database: The other queue's file.
        written_in: The other queue's directory when its rank wrote to it.
        directory: The directory of this queue. The other one's files are linked into it.

    Returns:
        How many rows of metrics there were.
    """
    manager = op._sync_manager
    if manager is None or not os.path.exists(database):
        return 0
    with contextlib.closing(sqlite3.connect(manager.db_path, timeout=_BUSY_S, isolation_level=None)) as connection:
        connection.execute("ATTACH DATABASE ? AS other", (database,))
        tables = "SELECT COUNT(*) FROM other.sqlite_master WHERE name IN ('sync_queue', 'file_uploads')"
        if connection.execute(tables).fetchone()[0] < 2:  # its rank was killed before they were made
            return 0
        connection.execute("BEGIN IMMEDIATE")
        query = "SELECT COUNT(*) FROM other.sync_queue WHERE status != ? AND record_type = ?"
        count = int(connection.execute(query, (_COMPLETED, METRIC)).fetchone()[0])
        connection.execute(_COPY_ROWS, (manager.run_id, _COMPLETED))
        _copy_files(connection, manager.run_id, (os.path.dirname(database), written_in, directory))
        connection.execute("COMMIT")
        return count


def _copy_files(connection: sqlite3.Connection, run_id: str, places: tuple[str, str, str]) -> None:
    query = f"SELECT {', '.join(_FILE_COLUMNS)} FROM other.file_uploads WHERE status NOT IN (?, ?) ORDER BY id"  # noqa: S608
    for path, *columns in list(connection.execute(query, (_COMPLETED, _ABANDONED))):
        linked = _linked(path, *places)
        if linked is None:
            logger.warning("Pluto: %s is not sent: the run's directory does not have the file", path)
        else:
            connection.execute(_ADD_FILE, (run_id, linked, *columns))


def _linked(path: str, other: str, written_in: str, directory: str) -> str | None:
    """Return where a file of another queue is from now on: its queue may be removed; None if there is no such file."""
    inside = os.path.relpath(path, written_in)
    source = own_file_in(Path(other), inside)  # the client has copied the files there, and makes no links
    if source is None or source.is_symlink():
        return None
    target = os.path.join(directory, os.path.basename(other), inside)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    link_or_copy(source, target)
    return target
