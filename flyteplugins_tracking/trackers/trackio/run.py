"""Trackio's own run, with another way to its store: rows are written soon, and what cannot be written is kept.

Trackio's own drops a batch that it could not write, and what it has kept for a server is not sent to one of one's own.
What is replaced of it, and used of its inside, is named here; the tests run with a version that has it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._util.timeout import run_with_timeout
from flyteplugins_tracking.trackers.client import refuse_to_pickle

# How long a row waits for others to be written with it: what SIGKILL takes, at most.
_FLUSH_S = 0.2
# Writing may take this share of the time; with many ranks in one store, each waits longer for its turn.
_SHARE = 0.5
_MOST_PAUSE_S = 1.0
_RETRY_S = 0.2
# How long the Hugging Face Hub may take to say who runs this, where there is a token for it. Trackio has no limit.
_USERNAME_S = 2.0
# How Trackio's names of the warnings begin that a batch is dropped.
_DROPS = "write-"


@functools.cache
def run_class() -> Any:
    """The class of our runs: Trackio's own, which is imported here, behind what differs."""
    import trackio

    return type("Run", (_OwnWay, trackio.Run), {"__doc__": trackio.Run.__doc__})


class _OwnWay:
    """What comes before `trackio.Run`.

    Attributes:
        resumed: Whether the run had been there.
        tracking: Its handle.
    """

    resumed = False
    tracking: Any = None

    # Trackio's own.
    id: str
    name: str
    project: str
    config: dict[str, Any]
    _client: Any
    _client_lock: Any
    _cpu_monitor: Any
    _gpu_monitor: Any
    _is_local: bool
    _queue_lock: Any
    _queued_logs: list[dict[str, Any]]
    _sending_batch: Any
    _stop_flag: Any
    _take_queued_batches: Any
    _complete_batch: Any

    _anchor: dict[str, Any] | None = None  # a row of this run's

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row."""
        self.tracking.log(metrics, step)

    def finish(self) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    def queue(self, row: Mapping[str, Any], step: int) -> None:
        """Have Trackio make a row ready, to be written with the next ones."""
        super().log(dict(row), step=step)  # type: ignore[misc]
        with self._queue_lock:
            if self._queued_logs:
                self._anchor = dict(self._queued_logs[-1])

    def requeue(self, entry: Mapping[str, Any]) -> None:
        """Write what `unwritten` has given. Where it has been written meanwhile, Trackio knows it by its log_id."""
        self._anchor = dict(entry)
        with self._queue_lock:
            self._queued_logs.append(dict(entry))

    def tell_config(self) -> None:
        """Have the run's config replaced: with one of its rows again, which is not written twice."""
        new = {"metrics": {}, "step": 0, "log_id": f"{self.id}/config"}
        row = self._anchor or {"project": self.project, "run": self.name, "run_id": self.id, **new}
        with self._queue_lock:
            for entry in self._queued_logs:
                entry["config"] = None  # of several in one batch, Trackio takes the first
            self._queued_logs.append({**row, "config": dict(self.config)})

    def unwritten(self) -> list[dict[str, Any]]:
        """The rows that have not been written."""
        with self._queue_lock:
            batches = [batch.entries for batch in self._sending_batch or () if not batch._handled]
            rows = [entry for entries in [*batches, self._queued_logs] for entry in entries]
        return [row for row in rows if "log_id" in row and "step" in row]

    def flush(self) -> None:
        """Write all that is queued. What cannot be written stays queued, and the reason is raised."""
        with self._client_lock:
            batches = self._take_queued_batches()
            for batch in batches:
                if self._is_local:
                    batch.persist()
                else:
                    batch.send(self._client, None)
            self._complete_batch(batches)

    def stop(self, deadline: float) -> None:
        """Stop what runs in the background, and write all that can be written by then."""
        for monitor in (self._gpu_monitor, self._cpu_monitor):
            if monitor is not None:
                monitor.stop()
        self._stop_flag.set()
        run_with_timeout(max(_RETRY_S, deadline - time.monotonic()), self._flush_until, deadline)

    def go_on(self) -> None:
        """After `stop`: what is logged from now on is written in the background again."""
        self._stop_flag.clear()

    def _flush_until(self, deadline: float) -> None:
        while True:
            try:
                return self.flush()
            except Exception as error:
                if time.monotonic() + _RETRY_S > deadline:
                    return self._delayed(error)
            time.sleep(_RETRY_S)

    def _delayed(self, error: Exception) -> None:
        if self.tracking is not None:
            self.tracking.delayed(error)

    # Trackio's threads run these.

    def _local_batch_sender(self) -> None:
        pause_s = _FLUSH_S
        while not self._stop_flag.wait(pause_s):
            began = time.monotonic()
            try:
                self.flush()
            except Exception as error:
                self._delayed(error)
            pause_s = min(max(_FLUSH_S, (time.monotonic() - began) / _SHARE), _MOST_PAUSE_S)

    _init_client_background = _local_batch_sender

    def _get_username(self) -> Any:
        found: list[Any] = []
        run_with_timeout(_USERNAME_S, lambda: found.append(super(_OwnWay, self)._get_username()))  # type: ignore[misc]
        return found[0] if found else None

    def _flush_queues_inline(self) -> None:
        self.flush()

    # Trackio calls these where it has not written a batch: what raises here keeps it.

    def _warn_once(self, key: str, message: str) -> None:
        if key.startswith(_DROPS) and sys.exc_info()[1] is not None:
            raise  # the error that is warned of
        super()._warn_once(key, message)  # type: ignore[misc]

    def _refuse(self, _: Any) -> None:
        raise sys.exc_info()[1] or RuntimeError("the server has not taken it")

    _persist_logs_locally = _persist_system_logs_locally = _persist_uploads_locally = _refuse

    def _write_alerts_to_sqlite(self, alerts: Any) -> None:
        if not self._is_local:
            self._refuse(alerts)
        super()._write_alerts_to_sqlite(alerts)  # type: ignore[misc]
