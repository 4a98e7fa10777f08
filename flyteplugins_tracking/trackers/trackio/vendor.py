"""The undocumented names of Trackio. No other module uses them.

`PARTS` lists each name with its use, and the feature that is lost without it. `run_class` is Trackio's
own run with another way to its store: rows are written soon, and rows that cannot be written are kept. Trackio itself
drops a batch that it could not write, and does not send kept rows to a self-hosted server.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.trackers.client import refuse_to_pickle
from flyteplugins_tracking.trackers.vendor_parts import Part, VendorParts

logger = logging.getLogger(__name__)

_CPU_METRICS, _GPU_METRICS = (
    "metrics of the processor, unless auto_log_cpu=True",
    "metrics of a GPU, unless auto_log_gpu=True",
)
PARTS = VendorParts(
    "Trackio",
    "trackio==0.43.0",
    [
        Part("trackio.run:Run._take_queued_batches", "takes the queued rows"),
        Part("trackio.run:Run._complete_batch", "takes written rows out of the queue"),
        Part("trackio.run:Run._local_batch_sender", "runs in the client's thread, where rows are written"),
        Part("trackio.run:Run._init_client_background", "runs in the client's thread for a server"),
        Part("trackio.run:Run._flush_queues_inline", "writes rows at the end of the process"),
        Part("trackio.run:Run._warn_once", "is where the client drops rows that it could not write"),
        Part("trackio.run:Run._persist_logs_locally", "is where the client puts aside rows for a server"),
        Part("trackio.run:Run._persist_system_logs_locally", "is where the client puts aside metrics of the system"),
        Part("trackio.run:Run._persist_uploads_locally", "is where the client puts aside files"),
        Part("trackio.run:Run._write_alerts_to_sqlite", "is where the client puts aside alerts"),
        Part("run._client", "sends rows to a server"),
        Part("run._client_lock", "keeps two threads from writing rows at the same time"),
        Part("run._config_logged", "keeps a rank from replacing the primary rank's config"),
        Part("run._is_local", "says whether rows go to files or to a server"),
        Part("run._queue_lock", "is held while the queue changes"),
        Part("run._queued_logs", "holds the rows that are not written"),
        Part("run._sending_batch", "holds the rows that are being written"),
        Part("run._stop_flag", "stops the client's thread"),
        Part("batch.entries", "holds the rows of a batch"),
        Part("batch._handled", "says whether a batch is written"),
        Part("batch.persist", "writes a batch to files"),
        Part("batch.send", "sends a batch to a server"),
        Part("run._cpu_monitor", "stops the metrics of the processor", "the processor's last metrics"),
        Part("run._gpu_monitor", "stops the metrics of a GPU", "the GPU's last metrics"),
        Part(
            "trackio.run:Run._get_username",
            "asks the Hugging Face Hub, in 2 s at most",
            "that limit: a run may open late",
        ),
        Part("trackio.cpu:cpu_available", "says whether this machine is measured", _CPU_METRICS),
        Part("trackio.gpu:gpu_available", "says whether there is an NVIDIA GPU", _GPU_METRICS),
        Part("trackio.apple_gpu:apple_gpu_available", "says whether there is an Apple GPU", _GPU_METRICS),
        Part("trackio.context_vars:current_run", "makes trackio.log() go to our run"),
        Part("trackio.context_vars:current_project", "says which project trackio's functions use"),
        Part("trackio.context_vars:current_server", "says which server trackio's functions use"),
        Part("trackio:config", "is the current run's config", "trackio.config"),
        Part("trackio.utils:TRACKIO_DIR", "is the directory of all projects"),
        Part("trackio.utils:canonical_project_name", "is the project's name in files", "the warning that it changes"),
        Part("trackio.utils:get_storage_mode", "says whether projects are databases or JSON lines"),
        Part("trackio.utils:serialize_values", "makes JSON of a config"),
        Part("trackio.fragments:local_inbox_dir", "is the directory of JSON lines"),
        Part("trackio.sqlite_storage:SQLiteStorage.validate_project_name", "refuses a project's name"),
        Part("trackio.sqlite_storage:SQLiteStorage.get_project_db_path", "is the project's database"),
        Part("trackio.sqlite_storage:SQLiteStorage.init_db", "creates the project's database"),
        Part("trackio.remote_client:RemoteClient.predict", "asks a server"),
    ],
)

# The longest time that a row waits for others to be written with it: SIGKILL loses no more.
_FLUSH_S = 0.2
# The largest share of the time that is spent on writing. With many ranks in one store, each waits longer.
_SHARE = 0.5
_MOST_PAUSE_S = 1.0
_RETRY_S = 0.2
# How long the Hugging Face Hub may take to name the token's owner. Trackio itself has no limit.
_USERNAME_S = 2.0
# The prefix of the keys of Trackio's warnings that a batch is dropped.
_DROPS = "write-"


# Where runs are kept.


def directory() -> Path:
    """Return the directory of all projects."""
    from trackio import utils

    return Path(utils.TRACKIO_DIR)


def name_in_files(project: str) -> str:
    """Return the project's name as Trackio writes it in names of files."""
    if not PARTS.has("trackio.utils:canonical_project_name"):
        return project
    from trackio import utils

    return str(utils.canonical_project_name(project))


def check_project(project: str) -> None:
    """Refuse a name that Trackio does not take.

    Raises:
        ValueError: Trackio does not take it.
    """
    from trackio.sqlite_storage import SQLiteStorage

    SQLiteStorage.validate_project_name(project)


def inbox() -> Path | None:
    """Return the directory of JSON lines; None if projects are kept in databases."""
    from trackio import utils
    from trackio.fragments import local_inbox_dir

    return local_inbox_dir() if utils.get_storage_mode() == "jsonl" else None


def database(project: str, *, create: bool) -> Path:
    """Return the path of the project's database."""
    from trackio.sqlite_storage import SQLiteStorage

    path: Path = SQLiteStorage.init_db(project) if create else SQLiteStorage.get_project_db_path(project)
    return path


def remote_client(url: str, token: str | None, timeout_s: float) -> Any:
    """Return a client of a server."""
    from trackio.remote_client import RemoteClient

    return RemoteClient(url, write_token=token, httpx_kwargs={"timeout": timeout_s})


def serialized(config: Mapping[str, Any]) -> Any:
    """Return a config as Trackio stores it."""
    from trackio.utils import serialize_values

    return serialize_values(config)


# The current run.


def has_cpu_metrics() -> bool:
    """Whether Trackio measures the processor of this machine by default."""
    if not PARTS.has("trackio.cpu:cpu_available"):
        return False
    from trackio.cpu import cpu_available

    return bool(cpu_available())


def has_gpu_metrics() -> bool:
    """Whether Trackio measures a GPU of this machine by default."""
    if not (PARTS.has("trackio.gpu:gpu_available") and PARTS.has("trackio.apple_gpu:apple_gpu_available")):
        return False
    from trackio.apple_gpu import apple_gpu_available
    from trackio.gpu import gpu_available

    return bool(gpu_available() or apple_gpu_available())


def leave_config_to_primary(run: Any) -> None:
    """Keep the client from sending the run's config with a row: that would replace the config that is there."""
    run._config_logged = True


def make_current(run: Any) -> Callable[[], None]:
    """Have `trackio.log` and the like go to `run`. Returns a function that undoes that."""
    import trackio
    from trackio import context_vars as variables

    _join_frameworks_runs()
    values = {
        variables.current_run: run,
        variables.current_project: run.project,
        variables.current_server: run.url,
    }
    before = {variable: variable.get() for variable in values}
    for variable, value in values.items():
        variable.set(value)
    has_config = PARTS.has("trackio:config")
    config_before = trackio.config if has_config else None
    trackio.config = run.config

    def restore() -> None:
        if variables.current_run.get() is run:
            for variable, value in before.items():
                variable.set(value)
        if trackio.config is run.config:
            trackio.config = config_before

    return restore


@functools.cache
def _join_frameworks_runs() -> None:
    """Have `trackio.init` and `trackio.finish` of frameworks use our run, if one is current."""
    import trackio
    from trackio.context_vars import current_run

    init, finish, ours = trackio.init, trackio.finish, run_class()

    @functools.wraps(init)
    def join(*args: Any, **kwargs: Any) -> Any:
        run = current_run.get()
        if not isinstance(run, ours):
            return init(*args, **kwargs)
        logger.info("Trackio: trackio.init() returns run %s, which is open", run.id)
        run.config.update(kwargs.get("config") or {})
        return run

    @functools.wraps(finish)
    def leave() -> None:
        if not isinstance(current_run.get(), ours):
            finish()

    trackio.init, trackio.finish = join, leave


# The run.


@functools.cache
def run_class() -> Any:
    """Return the class of our runs: Trackio's own, with the methods of `_KeepsRows` before it."""
    import trackio

    return type("Run", (_KeepsRows, trackio.Run), {"__doc__": trackio.Run.__doc__})


class _KeepsRows:
    """Methods that take the place of those of `trackio.Run`.

    Attributes:
        resumed: Whether the run existed before.
        tracking: The run's handle.
    """

    resumed = False
    tracking: Any = None

    # Attributes of Trackio's own run.
    id: str
    name: str
    project: str
    config: dict[str, Any]
    _client: Any
    _client_lock: Any
    _is_local: bool
    _queue_lock: Any
    _queued_logs: list[dict[str, Any]]
    _sending_batch: Any
    _stop_flag: Any
    _take_queued_batches: Any
    _complete_batch: Any

    _anchor: dict[str, Any] | None = None  # a row of this run

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row."""
        self.tracking.log(metrics, step)

    def finish(self) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    def queue(self, row: Mapping[str, Any], step: int) -> dict[str, Any] | None:
        """Queue a row, to be written with the next ones. Returns it as Trackio has it; None if it is being written."""
        super().log(dict(row), step=step)  # type: ignore[misc]
        with self._queue_lock:
            if not self._queued_logs:
                return None
            entry = self._anchor = dict(self._queued_logs[-1])
            return entry

    def requeue(self, entry: Mapping[str, Any]) -> None:
        """Queue a row of `unwritten` again. If it was written meanwhile, Trackio recognizes it by its log_id."""
        self._anchor = dict(entry)
        with self._queue_lock:
            self._queued_logs.append(dict(entry))

    def send_config(self) -> None:
        """Send the run's config: with one of its rows again, which is not written twice."""
        new = {"metrics": {}, "step": 0, "log_id": f"{self.id}/config"}
        row = self._anchor or {"project": self.project, "run": self.name, "run_id": self.id, **new}
        with self._queue_lock:
            for entry in self._queued_logs:
                entry["config"] = None  # Trackio takes the first config of a batch
            self._queued_logs.append({**row, "config": dict(self.config)})

    def unwritten(self) -> list[dict[str, Any]]:
        """Return the rows that have not been written."""
        with self._queue_lock:
            batches = [batch.entries for batch in self._sending_batch or () if not batch._handled]
            rows = [entry for entries in [*batches, self._queued_logs] for entry in entries]
        return [row for row in rows if "log_id" in row and "step" in row]

    def flush(self) -> None:
        """Write all queued rows. Rows that cannot be written stay queued, and the reason is raised."""
        with self._client_lock:
            is_written = self.tracking.writing() if self.tracking is not None else None
            batches = self._take_queued_batches()
            for batch in batches:
                if self._is_local:
                    batch.persist()
                else:
                    batch.send(self._client, None)
            self._complete_batch(batches)
            if is_written is not None:
                is_written()

    def stop(self, deadline: float) -> None:
        """Stop the background threads, and write the queued rows until `deadline`."""
        for name in ("_gpu_monitor", "_cpu_monitor"):
            monitor = getattr(self, name) if PARTS.has(f"run.{name}", self) else None
            if monitor is not None:
                monitor.stop()
        self._stop_flag.set()
        run_with_timeout(max(_RETRY_S, deadline - time.monotonic()), self._flush_until, deadline)

    def resume(self) -> None:
        """Write rows in the background again, after `stop`."""
        self._stop_flag.clear()

    def check(self) -> None:
        """Refuse a run object that lacks a required name.

        Raises:
            TrackerNotInstalledError: It does.
        """
        PARTS.require_of("run", self)

    def _flush_until(self, deadline: float) -> None:
        while True:
            try:
                return self.flush()
            except Exception as error:
                if time.monotonic() + _RETRY_S > deadline:
                    return self._warn_of_delay(error)
            time.sleep(_RETRY_S)

    def _warn_of_delay(self, error: Exception) -> None:
        if self.tracking is not None:
            self.tracking.warn_of_delay(error)

    # Trackio's threads run these methods.

    def _local_batch_sender(self) -> None:
        pause_s = _FLUSH_S
        while not self._stop_flag.wait(pause_s):
            began = time.monotonic()
            try:
                self.flush()
            except Exception as error:
                self._warn_of_delay(error)
            pause_s = min(max(_FLUSH_S, (time.monotonic() - began) / _SHARE), _MOST_PAUSE_S)

    _init_client_background = _local_batch_sender

    def _get_username(self) -> Any:
        names: list[Any] = []
        run_with_timeout(_USERNAME_S, lambda: names.append(super(_KeepsRows, self)._get_username()))  # type: ignore[misc]
        return names[0] if names else None

    def _flush_queues_inline(self) -> None:
        self.flush()

    # Trackio calls these methods when it has not written a batch. An error that is raised here keeps the batch.

    def _warn_once(self, key: str, message: str) -> None:
        if key.startswith(_DROPS) and sys.exc_info()[1] is not None:
            raise  # the error that the warning is about
        super()._warn_once(key, message)  # type: ignore[misc]

    def _keep_batch(self, _: Any) -> None:
        raise sys.exc_info()[1] or RuntimeError("the server has not taken the rows")

    _persist_logs_locally = _persist_system_logs_locally = _persist_uploads_locally = _keep_batch

    def _write_alerts_to_sqlite(self, alerts: Any) -> None:
        if not self._is_local:
            self._keep_batch(alerts)
        super()._write_alerts_to_sqlite(alerts)  # type: ignore[misc]
