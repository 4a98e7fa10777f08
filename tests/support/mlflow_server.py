"""A real MLflow server with SQLite on loopback, and what it has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import jobs

ID_TAG = "flyteplugins_tracking.run_id"
CONFIG_TAG = "flyteplugins_tracking.config"
GROUP_TAG = "flyteplugins_tracking.group"


@dataclass(frozen=True)
class StoredRun:
    """A run in the server's database.

    Attributes:
        rows: Each value of a metric: its key, value, step and time in ms.
    """

    run_id: str
    name: str
    status: str
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, float, int, int]] = field(default_factory=list)

    @property
    def id(self) -> str | None:
        """The id of the plan; None for a run that this library has not made."""
        return self.tags.get(ID_TAG)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.tags.get(CONFIG_TAG, "{}"))

    def values(self, key: str) -> list[float]:
        """The values of a metric, by their steps."""
        return [value for name, value, *_ in sorted(self.rows, key=lambda row: row[2]) if name == key]


class MlflowServer:
    """`mlflow server`, in a process group of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = jobs.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._database = directory / "mlflow.db"

    def __enter__(self) -> MlflowServer:
        self._start()
        return self

    def _start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        stores = [f"--backend-store-uri=sqlite:///{self._database}", "--artifacts-destination", "artifacts"]
        env = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            # The process that answers is a fork of the one that makes the tables, and must not have its connections.
            "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
        }
        self._log = (self._directory / "server.log").open("w")
        self._process = jobs.start([*command, *stores, "--workers", "1"], self._directory, env, log=self._log.fileno())
        try:
            self._await_health(time.monotonic() + 120)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self._log.close()

    def _await_health(self, until: float) -> None:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            assert self._process.poll() is None, (self._directory / "server.log").read_text()
            assert time.monotonic() < until, (self._directory / "server.log").read_text()
            time.sleep(0.2)

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Have the server take connections and answer nothing, in the block.

        After it, it answers what it was asked meanwhile, also for clients that have ended.
        """
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def runs(self, project: str) -> list[StoredRun]:
        """The runs of an experiment, by its name."""
        return stored_runs(self._database, project)

    def artifacts(self, run: StoredRun) -> Path:
        """The folder of a run's artifacts."""
        found = [*(self._directory / "artifacts").glob(f"*/{run.run_id}/artifacts")]
        return found[0] if found else self._directory / "no artifacts"


def stored_runs(database: Path, project: str) -> list[StoredRun]:
    """The runs of an experiment in MLflow's SQLite file, without MLflow."""
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as opened:
        found = opened.execute(
            "SELECT run_uuid, runs.name, status FROM runs JOIN experiments USING (experiment_id) "
            "WHERE experiments.name = ? ORDER BY start_time",
            (project,),
        ).fetchall()
        return [_stored(opened, *run) for run in found]


def _stored(database: sqlite3.Connection, run_id: str, name: str, status: str) -> StoredRun:
    def of(what: str) -> list[Any]:
        return database.execute(f"SELECT {what} WHERE run_uuid = ?", (run_id,)).fetchall()

    tags, params = of("key, value FROM tags"), of("key, value FROM params")
    rows = of("key, CASE WHEN is_nan THEN 'nan' ELSE value END, step, timestamp FROM metrics")
    points = [(key, float(value), step, at) for key, value, step, at in rows]
    return StoredRun(run_id, name, status, dict(tags), dict(params), points)
