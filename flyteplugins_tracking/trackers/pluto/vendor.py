"""The undocumented names of Pluto's client (`pluto-ml`). No other module uses them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import is_own_directory
from flyteplugins_tracking._util.plain import finite
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking.trackers.journal import Line
from flyteplugins_tracking.trackers.vendor_parts import VendorParts

logger = logging.getLogger(__name__)

# The directory of the client's files, and the calls in our journal that say what the client has prepared.
FOLDER = ".pluto"
POST, ENTRIES, FILE = "pluto/post", "pluto/entries", "pluto/file"
# What may be posted to the service's API for runs.
POSTS = ("config/update", "tags/update", "notes/update", "logName/add")

PARTS = VendorParts("Pluto", "pluto", "pluto-ml==0.0.29")


# Before the run is opened.


def require() -> None:
    """Look up the names without which no run can be opened.

    Raises:
        TrackerNotInstalledError: The installed version lacks one of them.
    """
    PARTS.require("pluto.op", "login", "Op._init_sync_manager")


def prepare(settings: Any, key: str | None, queue: Queue) -> None:
    """Give the client the API key and our queue, and have it skip its own login for this run.

    The login would write the key to a file on each rank, and prompt for one on ranks without a terminal.
    """
    if key:
        settings._auth = key
    settings._flyteplugins_queue = queue
    settings.sync_process_enabled = True
    settings.x_thread_join_timeout_seconds = 1
    settings.sync_process_db_path = os.devnull  # the client would warn if its queue were on a network file system
    _take_over_client()


def silence_log_files(directory: str) -> None:
    """Have the client's log files report no full disk: it captures what is printed, and would log that, without end."""
    for name in ("pluto", "console"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.FileHandler) and handler.baseFilename.startswith(directory):
                handler.handleError = lambda record: None  # type: ignore[method-assign]  # noqa: ARG005


def name_of_directory(run_id: str, rank: int, attempt: int) -> str:
    """Return a name for the directory of a client's files that no other rank and no other attempt has."""
    return f"{run_id}-rank-{rank}-attempt-{attempt}-{secrets.token_hex(3)}"


def is_clients_directory(directory: str, run_id: str) -> bool:
    """Whether a path that a journal names is that of the directory of a client's files, of a run.

    Its files are sent, and then removed. So it must be no other directory of this user.
    """
    name = re.escape(run_id) + r"-rank-\d+-attempt-\d+-[0-9a-f]{6}"
    path = Path(directory)
    return bool(path.parent.name == FOLDER and re.fullmatch(name, path.name)) and is_own_directory(path)


def key_of(settings: Any) -> str | None:
    """Return the API key that the settings hold."""
    key: str | None = settings._auth
    return key


@functools.cache
def _take_over_client() -> None:
    import pluto.op

    login, make_queue = pluto.op.login, pluto.op.Op._init_sync_manager

    def our_login(settings: Any = None, retry: bool = False) -> Any:
        is_known = hasattr(settings, "_flyteplugins_queue") and settings._auth
        return None if is_known else login(settings, retry)

    def our_queue(op: Any) -> None:
        queue = getattr(op.settings, "_flyteplugins_queue", None)
        if queue is None:
            make_queue(op)
        else:
            op._sync_manager, queue.op = queue, op

    pluto.op.login, pluto.op.Op._init_sync_manager = our_login, our_queue


def clean(name: str) -> str:
    """Return a key, or a project's name, as the client sends it."""
    if not (name.isascii() and name.isprintable()):
        with PARTS.optional("keys with unusual characters are lost: the service rejects them"):
            from pluto.util import get_char

            return str(get_char(name))
    return name


def init(**arguments: Any) -> Any:
    """Call the client's own `pluto.init`, in spite of `client.join_calls`."""
    import pluto

    return inspect.unwrap(pluto.init)(**arguments)


def status_of_end(code: Any = None) -> int:
    """Return the exit code for which the client's `finish(code)` stands."""
    return TERMINATED if code in (signal.SIGINT, signal.SIGTERM) else int(code or 0)


# The service's answer to what it cannot read, and also when it is in trouble.
UNPROCESSABLE = 422


def status_of_error(error: BaseException) -> int | None:
    """Return the HTTP status because of which the client has raised this; None if there was no answer."""
    status: int | None = getattr(error.__cause__, "status_code", None)
    return status


def request_headers(settings: Any) -> dict[str, str]:
    """Return the headers of the client's own requests."""
    return {
        "Authorization": f"Bearer {settings._auth}",
        "X-Run-Id": str(settings._op_id),
        "X-Run-Name": str(settings._op_name),
        "X-Project-Name": settings.project,
    }


# The open run.


def check_run(op: Any) -> None:
    """Refuse a run object that lacks a required name.

    Raises:
        TrackerNotInstalledError: It does.
    """
    PARTS.require(op, "_sync_manager", "_iface")
    PARTS.require(op.settings, "_auth", "_op_id", "_op_name")


class Queue:
    """Takes the place of the client's queue: what the client has prepared becomes lines.

    The client has a process that sends its queue. It retries only for a while, ends by the SIGTERM that a launcher
    sends to all processes of a job, and has the API key and the config on its command line.

    Attributes:
        op: The run, as soon as it exists.
        directory: The directory of the client's files.
    """

    def __init__(self, directory: str, sends_system_metrics: bool) -> None:
        self.op: Any = None
        self.directory = directory
        self._sends_system_metrics = sends_system_metrics
        self._samples = 0
        self._waiting: list[Line] = []  # from the opening of the run
        self._put: Callable[[Line], object] = self._waiting.append

    def connect(self, put: Callable[[Line], object]) -> None:
        """Have lines go to `put` from now on, with those that have waited for it."""
        if self.op is not None:
            self.op._sync_manager = self  # which the client takes off when it is closed
        self._put = put
        while self._waiting:
            put(self._waiting.pop(0))

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Have a request sent to a path of the service's API for runs."""
        self._put({"call": POST, "args": [path, body], "kwargs": {}})

    # The client calls these.

    def start(self) -> None:
        self.op._iface._update_meta = self._register  # the client itself would have the step wait for the service

    def stop(self, *_: Any, **__: Any) -> bool:
        return True

    def close(self) -> None: ...

    def enqueue_metrics(self, metrics: Mapping[str, Any], timestamp_ms: int, step: int) -> None:
        self._put({"row": metrics, "step": step, "time": timestamp_ms / 1000})

    def enqueue_metrics_batch(self, items: Sequence[tuple[Mapping[str, Any], int, int]]) -> None:
        for item in items:
            self.enqueue_metrics(*item)

    def enqueue_system_metrics(self, metrics: Mapping[str, Any], timestamp_ms: int) -> None:
        if self._sends_system_metrics:
            self._samples += 1
            self._put_entries("metrics", [{"time": timestamp_ms, "step": self._samples, "data": metrics}])

    def enqueue_data(
        self, log_name: str, data_type: str, data_dict: Any, timestamp_ms: int, step: int | None = None
    ) -> None:
        self._put_entries("data", [data_entry(log_name, data_type, data_dict, timestamp_ms, step)])

    def enqueue_console_log(self, message: str, log_type: str, timestamp_ms: int, line_number: int) -> None:
        self.enqueue_console_batch([(message, log_type, timestamp_ms, line_number)])

    def enqueue_console_batch(self, lines: Sequence[tuple[str, str, int, int]]) -> None:
        entries = [
            {"time": time_ms, "message": text, "lineNumber": number, "logType": kind}
            for text, kind, time_ms, number in lines
        ]
        self._put_entries("logs", entries)

    def enqueue_config(self, config: Mapping[str, Any], timestamp_ms: int) -> None:  # noqa: ARG002 as the client calls it
        self.post("config/update", {"config": json.dumps(finite(config))})

    def enqueue_tags(self, tags: Sequence[str], timestamp_ms: int) -> None:  # noqa: ARG002 as the client calls it
        self.post("tags/update", {"tags": list(tags)})

    def enqueue_file(self, local_path: str, **record: Any) -> None:
        name = os.path.relpath(local_path, self.directory)  # the client has copied it there
        self._put({"call": FILE, "args": [self.directory, name, record], "kwargs": {}})

    def _put_entries(self, kind: str, entries: Sequence[Mapping[str, Any]]) -> None:
        self._put({"call": ENTRIES, "args": [kind, entries], "kwargs": {}})

    def _register(self, num: Any = None, df: Mapping[str, Sequence[str]] | None = None) -> None:  # noqa: ARG002
        """Register new keys. Those of numbers and strings are registered with their rows."""
        for kind, names in (df or {}).items():
            self.post("logName/add", {"logType": kind.upper(), "logName": list(names)})


def data_entry(name: str, kind: str, value: Any, time_ms: int, step: int | None) -> dict[str, Any]:
    """Return a value that is no number, as the service takes it."""
    data = value if kind == "string-series" else json.dumps(value)
    return {"time": time_ms, "data": data, "dataType": kind, "logName": name, "step": step or 0}


def upload(settings: Any, path: str, record: Mapping[str, Any]) -> bool:
    """Upload a file. Returns whether the service has it."""
    with PARTS.optional("media are not uploaded: images, audio, video and other files"):
        from pluto.sync.process import _SyncUploader
        from pluto.sync.store import FileRecord

        names = [field.name for field in dataclasses.fields(FileRecord)]
        values = {**dict.fromkeys(names), **record, "id": 0, "local_path": path}
        known = ("_auth", "_op_id", "_op_name", "project", "tag", "url_file")
        uploader = _SyncUploader({name: getattr(settings, name) for name in known}, logger)
        try:
            result = uploader.upload_files_batch([FileRecord(**{name: values[name] for name in names})])[0]
        except Exception:
            logger.debug("cannot upload %s", path, exc_info=True)
            return False
        finally:
            uploader.close()
        return bool(getattr(result, "success", result))  # before 0.0.28, it is a boolean
    return False
