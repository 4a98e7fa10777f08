"""A Pluto server on loopback, in this process: it records what the real client sends and fails on command.

    with PlutoServer() as server:
        done = jobs.python(tmp_path, "train.py", env=server.environment)
        run = server.run("my-id")
        assert [row["x"] for row in run.rows] == [1, 2]

        with server.failing(Fault.status(503)):
            ...

It is as strict as the service (https://github.com/Trainy-ai/pluto-server) where that decides whether data is kept: a
run is one by its project and external id, and is created by the first; later names and tags are ignored; a chart has
one value for a key and a step, the one with the latest time; of two ends the graver one stays; ingest answers 422 to
what it cannot read.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from support.loopback import Handler, LoopbackServer, body_of, survives

# Nothing else on the machine has it: tests look for it in all command lines.
KEY = f"plt_s_{secrets.token_hex(20)}"
Json = dict[str, Any]
Endpoint = Literal["create", "ingest", "trigger", "names", "status", "other"]
_OWN_IDS = re.compile(r"\d+|[A-Z0-9]{1,4}-\d+")
_SEVERITY = {"RUNNING": -1, "COMPLETED": 0, "TERMINATED": 1, "CANCELLED": 2, "FAILED": 3}
_ENDPOINTS: Mapping[str, Endpoint] = {
    "/api/runs/create": "create",
    "/api/runs/trigger": "trigger",
    "/api/runs/logName/add": "names",
    "/api/runs/status/update": "status",
}


class RefusedError(Exception):
    """An answer with another status than 200."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Point:
    """One value of a key."""

    step: int
    time_ms: int
    value: float


@dataclass
class RecordedRun:
    """A run.

    Attributes:
        id: The caller's: externalId.
        number: The server's.
        creates: What each client has asked `create` for, in their order.
        statuses: What was posted as the run's status, in that order.
        status: What came of it.
        lines: The rows of numbers, each with `time`, `step` and `data`.
        duplicates: How many rows have come twice.
        late: How many rows have come after a status.
        names: The registered keys, by their type.
        logs: The lines of the console.
        data: What came to /ingest/data.
    """

    id: str
    number: int
    project: str
    name: str
    tags: list[str]
    config: Json
    metadata: Json
    notes: str = ""
    status: str = "RUNNING"
    creates: list[Json] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    lines: list[Json] = field(default_factory=list)
    duplicates: int = 0
    late: int = 0
    names: dict[str, set[str]] = field(default_factory=dict)
    logs: list[Json] = field(default_factory=list)
    data: list[Json] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @property
    def rows(self) -> list[Json]:
        """The logged values as charts show them: a key has one value for a step."""
        lines = list(self.lines)  # a request may bring more meanwhile
        charted = _charted(lines)
        return [
            {key: value for key, value in line["data"].items() if charted[key][line["step"]].time_ms == line["time"]}
            for line in lines
        ]

    @property
    def charted(self) -> dict[str, dict[int, Point]]:
        """The values of each key by their steps."""
        return _charted(list(self.lines))

    def take(self, line: Json) -> None:
        text = json.dumps(line, sort_keys=True)
        self.duplicates += text in self._seen
        if text not in self._seen:
            self._seen.add(text)
            self.lines.append(line)
        self.late += bool(self.statuses) and self.status != "RUNNING"

    def move_to(self, status: str) -> None:
        self.statuses.append(status)
        if self.status == "RUNNING" or _SEVERITY[status] >= _SEVERITY[self.status]:
            self.status = status


def _charted(lines: list[Json]) -> dict[str, dict[int, Point]]:
    charts: dict[str, dict[int, Point]] = {}
    for line in lines:
        for key, value in line["data"].items():
            chart = charts.setdefault(key, {})
            before = chart.get(line["step"])
            if before is None or before.time_ms <= line["time"]:
                chart[line["step"]] = Point(line["step"], line["time"], value)
    return charts


class PlutoServer(LoopbackServer):
    """The server, from `with` to the end of its block. `fault` can be set at any time, to None to work again.

    Attributes:
        requests: How often each path was asked for.
        refused: The requests that were refused, in words.
    """

    def __init__(self, key: str = KEY) -> None:
        super().__init__(_Handler, threading.Condition(threading.RLock()))
        self.key = key
        self.requests: Counter[str] = Counter()
        self.refused: list[str] = []
        self._runs: dict[tuple[str, str], RecordedRun] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that send a job's client here."""
        return {**urls(self.url), "PLUTO_API_KEY": self.key}

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs, in the order in which they were created."""
        return list(self._runs.values())

    # What the handlers call.

    def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Json]:
        """Answer one request, with the HTTP status."""
        with self.changed:
            self.requests[path] += 1
            try:
                if headers.get("Authorization") != f"Bearer {self.key}":
                    raise RefusedError(401, "Key not found")
                return 200, self._answer(path, body, headers)
            except RefusedError as refused:
                if refused.code != 404:
                    self.refused.append(f"{path}: {refused}")
                return refused.code, {"error": str(refused)}
            finally:
                self.changed.notify_all()

    def details(self, path: str) -> tuple[int, Json]:
        """Answer as GET /api/runs/details/NUMBER does: https://github.com/Trainy-ai/pluto, `query.get_run`."""
        number = re.match(r"/api/runs/details/(\d+)\?projectName=", path)
        try:
            run = self._of(int(number[1]) if number else 0)
        except RefusedError as refused:
            return refused.code, {"error": str(refused)}
        return 200, {"id": run.number, "status": run.status, "config": run.config}

    def _answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Json:
        if path == "/api/slug":
            return {"organization": {"slug": "org"}}
        if path == "/step":
            run = self._of(int(headers["X-Run-Id"]))
            return {"step": max((line["step"] for line in run.lines), default=0)}
        if path.startswith("/ingest/"):
            return self._ingest(path.rpartition("/")[2], body, self._of(int(headers["X-Run-Id"])))
        posted = json.loads(body)
        if path == "/api/runs/create":
            return self._create(posted)
        if path == "/api/runs/resume":
            return self._resume(posted)
        if path not in _UPDATES:
            raise RefusedError(404, f"unknown path {path}")
        run = self._of(posted["runId"])
        _UPDATES[path](run, posted)
        return {"success": True, "status": "RUNNING"}

    def _create(self, posted: Json) -> Json:
        run_id, project, tags = posted["externalId"], posted["projectName"], posted.get("tags") or []
        if not isinstance(run_id, str) or _OWN_IDS.fullmatch(run_id):
            raise RefusedError(400, f"{run_id!r} would be misread for an id of the server's")
        if sum(tag.startswith("group:") for tag in tags) > 1:
            raise RefusedError(400, "A run can have at most one group:* tag.")
        config = json.loads(posted["config"]) if posted.get("config") else {}
        run, is_resumed = self._runs.get((project, run_id)), (project, run_id) in self._runs
        if run is None:
            metadata = json.loads(posted.get("systemMetadata") or "{}")
            run = RecordedRun(run_id, 1000 + len(self._runs), project, posted["runName"], tags, config, metadata)
            self._runs[project, run_id] = run
        elif config:
            run.config = {**run.config, **config}
        run.creates.append({"name": posted["runName"], "config": config, "tags": tags})
        return self._attached(run, is_resumed)

    def _resume(self, posted: Json) -> Json:
        if [posted.get(name) is not None for name in ("runId", "displayId", "externalId")].count(True) != 1:
            raise RefusedError(400, "Provide exactly one of: runId, displayId, or externalId")
        run = self._runs.get((posted["projectName"], posted["externalId"]))
        if run is None:
            raise RefusedError(404, "Run not found")
        return self._attached(run, True)

    def _attached(self, run: RecordedRun, is_resumed: bool) -> Json:
        run.status = "RUNNING"
        page = f"{self.url}/o/org/projects/{run.project}/sqid{run.number}"
        return {"runId": run.number, "displayId": f"PRJ-{run.number}", "url": page, "resumed": is_resumed}

    def _ingest(self, kind: str, body: bytes, run: RecordedRun) -> Json:
        for text in body.decode().splitlines():
            line = json.loads(text)
            if kind == "logs":
                run.logs.append(line)
            elif kind == "data":
                run.data.append(line)
            elif _is_metrics(line):
                run.take(line)
            else:  # what stands before it is kept
                raise RefusedError(422, f"Failed to process metrics stream: {text[:100]}")
        return {}

    def _of(self, number: int) -> RecordedRun:
        for run in self._runs.values():
            if run.number == number:
                return run
        raise RefusedError(404, "Run not found")


def _is_metrics(line: Json) -> bool:
    numbers = line["data"].values()
    return (
        type(line["step"]) is int
        and line["step"] >= 0
        and all(type(value) in (int, float) and abs(value) != 2**64 for value in numbers)
    )


def _add_names(run: RecordedRun, posted: Json) -> None:
    of_type = run.names.get(posted["logType"], set()) | set(posted["logName"])
    run.names = {**run.names, posted["logType"]: of_type}  # a test may read the old ones meanwhile


def _change_config(run: RecordedRun, posted: Json) -> None:
    run.config = {**run.config, **json.loads(posted["config"])}


def _change_tags(run: RecordedRun, posted: Json) -> None:
    run.tags = posted["tags"]


def _change_notes(run: RecordedRun, posted: Json) -> None:
    run.notes = posted["notes"]


_UPDATES: Mapping[str, Callable[[RecordedRun, Json], None]] = {
    "/api/runs/trigger": lambda run, posted: None,
    "/api/runs/logName/add": _add_names,
    "/api/runs/config/update": _change_config,
    "/api/runs/tags/update": _change_tags,
    "/api/runs/notes/update": _change_notes,
    "/api/runs/status/update": lambda run, posted: run.move_to(posted["status"]),
}


def urls(url: str) -> dict[str, str]:
    """The variables that lead a client to `url`."""
    return {f"PLUTO_URL_{part}": url for part in ("APP", "API", "INGEST", "PY")}


class _Handler(Handler):
    # ruff: noqa: N802
    def do_GET(self) -> None:
        """The details of a run, of which the library reads the config."""
        recorder: PlutoServer = self.server.recorder  # type: ignore[attr-defined]
        if survives(self, recorder.meet_fault("other")):
            self.answer(*recorder.details(self.path))

    def do_POST(self) -> None:
        recorder: PlutoServer = self.server.recorder  # type: ignore[attr-defined]
        body = body_of(self)
        endpoint = "ingest" if self.path.startswith("/ingest/") else _ENDPOINTS.get(self.path, "other")
        if not survives(self, recorder.meet_fault(endpoint)):
            return
        with recorder.changed:  # who waits for what a request brings finds it answered
            try:
                code, answer = recorder.answer(self.path, body, self.headers)
            except Exception as error:
                recorder.errors.append(error)
                code, answer = 400, {"error": repr(error)}
            self.answer(code, answer)
