"""The three places where Trackio keeps runs: a SQLite file, JSON lines in a directory, or a server."""

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

from flyteplugins_tracking._util.files import is_own_file, own_text

# The longest time that a statement waits for another process, in seconds.
_BUSY_S = 5.0
_RETRY_S = 0.1
_LONGEST_FILE = 1 << 28


@dataclass(frozen=True)
class Stored:
    """A run that exists.

    Attributes:
        name: The name that Trackio shows.
        config: The run's config, with the values that Trackio adds.
        last_step: The highest step of the rows in question; None if there are no such rows.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    last_step: int | None = None


class Store(Protocol):
    """The place where a project is kept.

    Attributes:
        place: Its name in messages.
        shows_config: Whether the config of a run can be read before the run's first row.
        knows_times: Whether `find` can leave out rows by their time.
    """

    place: str
    shows_config: bool
    knows_times: bool = True

    def find(self, run_id: str, before: float) -> Stored | None:
        """Return the run with the last step that was written before that time, in seconds since the epoch."""

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """Replace the run's config, if `shows_config`."""


class Database(Store):
    """A project's SQLite file, which Trackio has created."""

    shows_config = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)

    def find(self, run_id: str, before: float) -> Stored | None:
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
        """Connect to the database. Gives None if it does not exist yet."""
        if not self._path.exists():
            yield None
            return
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as connection:
            tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name IN ('configs', 'metrics')")
            yield connection if tables.fetchone()[0] == 2 else None


class Inbox(Store):
    """Files of JSON lines, for file systems on which SQLite fails. Trackio's dashboard imports them."""

    shows_config = False

    def __init__(self, database: Database, inbox: Path) -> None:
        self._database = database
        self._inbox = inbox
        self.place = str(inbox)

    def find(self, run_id: str, before: float) -> Stored | None:
        records = [r for r in self._records() if r.get("run_id") == run_id and r.get("timestamp", "") < _text(before)]
        taken = self._database.find(run_id, before)
        if not records:
            return taken
        configs = [record["config"] for record in records if record.get("config")]
        steps = [record["step"] for record in records] + ([taken.last_step] if taken and taken.last_step else [])
        return Stored(records[0]["run"], configs[-1] if configs else taken.config if taken else {}, max(steps))

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """Do nothing: the config is written with the first row."""

    def _records(self) -> Iterator[dict[str, Any]]:
        for path in sorted(filter(is_own_file, self._inbox.rglob("*.jsonl")), key=_written_at):
            with contextlib.suppress(ValueError):
                records = [json.loads(line) for line in (own_text(path, _LONGEST_FILE) or "").splitlines()]
                yield from (record for record in records if record.get("kind") == "metric")


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the dashboard has imported and removed it
        return 0.0


class Server(Store):
    """A Trackio server."""

    shows_config = False
    knows_times = False

    def __init__(self, place: str, client: Any, project: str) -> None:
        self.place = place
        self._client = client
        self._project = project

    def find(self, run_id: str, before: float) -> Stored | None:  # noqa: ARG002 the server does not say when rows were written
        summary = self._client.predict(api_name="/get_run_summary", project=self._project, run_id=run_id)
        if not summary or not summary.get("num_logs"):
            return None
        return Stored(summary["run"] or run_id, summary.get("config") or {}, summary.get("last_step"))

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], deadline: float) -> None:
        """Do nothing: the config is written with the first row."""


def _text(time_s: float) -> str:
    """Return a time as Trackio writes it."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat()
