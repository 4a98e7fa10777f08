"""Where Trackio keeps runs: files of SQLite or of JSON lines in a directory, or a server. What of a run is there."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

# How long one statement waits for another process's.
_BUSY_S = 5.0
_RETRY_S = 0.1


@dataclass(frozen=True)
class Stored:
    """A run that is there.

    Attributes:
        name: What Trackio shows it as.
        config: Its config, with what Trackio adds.
        last_step: The highest step of the rows that were asked for; None where there are none.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    last_step: int | None = None


class Store(Protocol):
    """Where a project is kept.

    Attributes:
        place: What messages call it.
        shows_config: Whether the config of a run is there before its first row.
        tells_when: Whether `find` heeds its `before`.
    """

    place: str
    shows_config: bool
    tells_when: bool = True

    def find(self, run_id: str, before: float) -> Stored | None:
        """The run, and the last step that was written before that time, in seconds since the epoch."""

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """Replace the run's config, where `shows_config`."""


class Database(Store):
    """A project's file of SQLite, which Trackio has made."""

    shows_config = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)

    def find(self, run_id: str, before: float) -> Stored | None:
        """See `Store.find`."""
        with self._connection() as connection:
            if connection is None:
                return None
            row = connection.execute("SELECT run_name, config FROM configs WHERE run_id = ?", (run_id,)).fetchone()
            if row is None:
                return None
            last_step = connection.execute(
                "SELECT MAX(step) FROM metrics WHERE run_id = ? AND timestamp < ?", (run_id, _text(before))
            ).fetchone()[0]
            return Stored(row[0], json.loads(row[1]), last_step)

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """See `Store.put_config`."""
        values = (run_id, name, json.dumps(config, default=str), _text(time.time()))
        while True:
            try:
                busy_s = max(_RETRY_S, min(_BUSY_S, deadline - time.monotonic()))
                with closing(sqlite3.connect(self._path, timeout=busy_s)) as connection, connection:
                    connection.execute(
                        "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?) "
                        "ON CONFLICT (run_id) DO UPDATE SET config = excluded.config",
                        values,
                    )
                return
            except sqlite3.OperationalError:  # another process writes
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                time.sleep(_RETRY_S)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection | None]:
        """None where there is no database yet."""
        if not self._path.exists():
            yield None
            return
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as connection:
            tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name IN ('configs', 'metrics')")
            yield connection if tables.fetchone()[0] == 2 else None


class Inbox(Store):
    """Files of JSON lines, which Trackio's dashboard takes into its database: for file systems where SQLite fails."""

    shows_config = False

    def __init__(self, database: Database, inbox: Path) -> None:
        self._database = database
        self._inbox = inbox
        self.place = str(inbox)

    def find(self, run_id: str, before: float) -> Stored | None:
        """See `Store.find`."""
        records = [r for r in self._records() if r.get("run_id") == run_id and r.get("timestamp", "") < _text(before)]
        taken = self._database.find(run_id, before)
        if not records:
            return taken
        configs = [record["config"] for record in records if record.get("config")]
        steps = [record["step"] for record in records] + ([taken.last_step] if taken and taken.last_step else [])
        return Stored(records[0]["run"], configs[-1] if configs else taken.config if taken else {}, max(steps))

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """See `Store.put_config`."""

    def _records(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._inbox.rglob("*.jsonl"), key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(OSError, ValueError):  # the dashboard may have taken it
                records = [json.loads(line) for line in path.read_text().splitlines()]
                yield from (record for record in records if record.get("kind") == "metric")


class Server(Store):
    """A server of Trackio's."""

    shows_config = False
    tells_when = False

    def __init__(self, place: str, client: Any, project: str) -> None:
        self.place = place
        self._client = client
        self._project = project

    def find(self, run_id: str, before: float) -> Stored | None:  # noqa: ARG002 it does not tell when
        """See `Store.find`."""
        found = self._client.predict(api_name="/get_run_summary", project=self._project, run_id=run_id)
        if not found or not found.get("num_logs"):
            return None
        return Stored(found["run"] or run_id, found.get("config") or {}, found.get("last_step"))

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """See `Store.put_config`."""


def _text(time_s: float) -> str:
    """As Trackio writes times."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat()
