"""The two places where Trackio keeps runs: a SQLite file, or a server."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.plain import finite
from flyteplugins_tracking.trackers.trackio import vendor

# The longest time that a statement waits for another process, in seconds.
_BUSY_S, _SHORTEST_S = 5.0, 0.1


@dataclass(frozen=True)
class Stored:
    """A run that exists.

    Attributes:
        name: The name that Trackio shows.
        config: The run's config, with the values that Trackio adds.
        last_step: The highest step of its rows; None if there are no rows.
        last_at: When its last row was logged, in seconds since the epoch; 0 if that is not known.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    last_step: int | None = None
    last_at: float = 0.0


class Database:
    """A project's SQLite file, which Trackio has created.

    Attributes:
        place: Its name in messages.
        shows_config: Whether the config of a run can be read before the run's first row.
    """

    shows_config = True

    def __init__(self, path: Path) -> None:
        self._path, self.place = path, str(path)

    def find(self, run_id: str) -> Stored | None:
        """Return the run if it exists."""
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as connection:
            row = connection.execute("SELECT run_name, config FROM configs WHERE run_id = ?", (run_id,)).fetchone()
            if row is None:
                return None
            query = "SELECT MAX(step), MAX(timestamp) FROM metrics WHERE run_id = ?"
            last_step, last = connection.execute(query, (run_id,)).fetchone()
            return Stored(row[0], json.loads(row[1]), last_step, time_of(last))

    def log(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of a run. A row that it has, by its `log_id`, is left. The first one may have the run's config."""
        vendor.write_rows(entries)

    def put_config(self, run_id: str, name: str, config: Mapping[str, Any], timeout_s: float) -> None:
        """Replace the run's config. It needs no row.

        Raises:
            sqlite3.OperationalError: Other processes have written all the time.
        """
        with closing(sqlite3.connect(self._path, timeout=max(_SHORTEST_S, timeout_s))) as connection, connection:
            connection.execute(
                "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (run_id) DO UPDATE SET config = excluded.config",
                # Trackio itself keeps NaN and infinities as text.
                (run_id, name, json.dumps(finite(config)), text_of(time.time())),
            )


class Server:
    """A Trackio server. Its attributes are those of a database."""

    shows_config = False

    def __init__(self, place: str, client: Any, project: str) -> None:
        self.place = place
        self._client = client
        self._project = project

    def find(self, run_id: str) -> Stored | None:
        summary = self._client.predict(api_name="/get_run_summary", project=self._project, run_id=run_id)
        if not summary or not summary.get("num_logs"):
            return None
        return Stored(summary["run"] or run_id, summary.get("config") or {}, summary.get("last_step"))

    def log(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._client.predict(api_name="/bulk_log", logs=entries, hf_token=None)


# Where a project is kept.
Store = Database | Server


def text_of(time_s: float) -> str:
    """Return a time as Trackio writes it."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat()


def time_of(text: Any) -> float:
    """Return the time of a text that `text_of` has made; 0 for another one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0
