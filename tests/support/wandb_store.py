"""The state of the recording W&B server: its runs and sweeps, each as the service would show it.

The rules of the service that are kept here, because a client that breaks them loses data there too:

- A line of a run's history stays at the offset that its writer gave: who starts at 0 again overwrites.
- A shared-mode writer has offsets of its own, under its client id; all default-mode writers of a run share theirs.
- A run with shared-mode writers has one step counter, in the order in which rows arrive: readers see that one.
- A run is over at its exit code, until a `wandb.init` opens it again.
- A sweep hands a run to an agent that has none, and takes no agent when it is over.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
import mimetypes
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]
Row = Json
RunKey = tuple[str, str, str]  # also a sweep's
_Place = tuple[str, int]  # the client id of a shared-mode writer, or "", and the offset it gave

HISTORY, EVENTS, SUMMARY, OUTPUT = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json", "output.log"
ENTITY, PROJECT = "recorded", "uncategorized"  # of a run that names none


class RefusedError(Exception):
    """The service would answer so: an HTTP status that is not tried again, and why."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class RecordedArtifact:
    """One version of an artifact, as its run has created it.

    Attributes:
        files: The MD5 of each file that was to be uploaded for it, by its name.
        contents: What was uploaded.
        committed: Whether all of it was there: before that, the service shows it to nobody.
    """

    name: str
    type: str
    aliases: list[str] = field(default_factory=list)
    digest: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    committed: bool = False


@dataclass
class RecordedRun:
    """One run, up to date with the last request.

    What a reader can iterate over is replaced by a write and never changed, so that it can be read at any time.

    Attributes:
        name: The display name.
        sweep: The id of the sweep that it is of.
        config: The values, without wandb's own `_wandb`.
        exit_codes: One for each time that a writer completed the run.
        upserts: The variables of each UpsertBucket.
        requests: How many filestream requests were accepted.
        clients: The client ids of shared-mode writers.
        files: Each uploaded file's last content, by name.
        versions: The artifacts that were created, by their ids.
        alerts: The title, text and level of each alert.
        rows_after_completion: How many rows came when the run was over and no `wandb.init` had opened it again.
        rows_overwritten: How many rows took the place of a different one, which is lost.
        connections: How many TCP connections have carried filestream requests. One process may have several: it opens
            another while it asks something else over the first.
        senders: The ids of the processes at their other ends.
        late: How many seconds late the count of rows is, and the last row.
        replaces: Whether of several writers the last one's config and summary are kept alone.
        old: How many seconds old the answers to look-ups are: `wandb.Api` reads what the run was then.
        shown_until: A time of `time.monotonic` after which look-ups show no change; None to show all.
        stop_requested: Whether somebody has pressed the run's Stop button: a test sets it. The answer to a filestream
            request tells it.
    """

    entity: str
    project: str
    id: str
    name: str
    group: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    job_type: str = ""
    sweep: str | None = None
    created_at: str = field(default_factory=lambda: _now(), repr=False)
    raw_config: dict[str, Any] = field(default_factory=dict, repr=False)
    state: str = "running"
    exit_codes: list[int] = field(default_factory=list)
    upserts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    requests: int = 0
    clients: frozenset[str] = frozenset()
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    _uploaded_at: dict[str, str] = field(default_factory=dict, repr=False)
    versions: dict[str, RecordedArtifact] = field(default_factory=dict, repr=False)
    alerts: list[tuple[str, str, str]] = field(default_factory=list, repr=False)
    rows_after_completion: int = 0
    rows_overwritten: int = 0
    connections: int = 0
    senders: frozenset[int] = frozenset()
    stop_requested: bool = False
    _has_default_writer: bool = field(default=False, repr=False)
    late: tuple[float, float] = (0.0, 0.0)
    replaces: bool = False
    old: float = 0.0
    shown_until: float | None = None
    _counted: list[tuple[float, int]] = field(default_factory=list, repr=False)
    _past: list[tuple[float, RecordedRun, int]] = field(default_factory=list, repr=False)
    _preempting: bool = field(default=False, repr=False)
    _rows: dict[_Place, Row] = field(default_factory=dict, repr=False)
    _events: dict[_Place, str] = field(default_factory=dict, repr=False)
    _output: dict[_Place, str] = field(default_factory=dict, repr=False)
    _summaries: dict[str, Row] = field(default_factory=dict, repr=False)

    @property
    def config(self) -> dict[str, Any]:
        return {key: item["value"] for key, item in self.raw_config.items() if key != "_wandb"}

    @property
    def summary(self) -> Row:
        """The last summary of each writer, put together in the order in which they came; or the last one alone."""
        if self.replaces:
            return dict(list(self._summaries.values())[-1]) if self._summaries else {}
        return {key: value for summary in list(self._summaries.values()) for key, value in summary.items()}

    @property
    def rows(self) -> list[Row]:
        """The rows that are kept, in the order in which their places were first written."""
        return list(self._rows.values())

    @property
    def events(self) -> list[Row]:
        """The system metrics."""
        return [json.loads(line) for line in list(self._events.values())]

    @property
    def log(self) -> list[str]:
        """The lines of the console, each behind its time."""
        return list(self._output.values())

    @property
    def artifacts(self) -> list[str]:
        """The names of the artifacts that were created."""
        return [one.name for one in self.versions.values()]

    @property
    def committed(self) -> dict[str, dict[str, bytes]]:
        """The files of each artifact that was committed, by the artifact's name."""
        return {one.name: one.contents for one in self.versions.values() if one.committed}

    @property
    def completed(self) -> bool:
        return self.state not in ("running", "preempting")

    @property
    def mixed_writers(self) -> bool:
        """Whether shared-mode and default-mode writers have met here, which loses rows on the service."""
        return self._has_default_writer and bool(self.clients)

    def upsert(self, given: Mapping[str, Any]) -> None:
        """Take the variables of an UpsertBucket. What is null stays as it was."""
        self.upserts = [*self.upserts, dict(given)]
        self.group = given.get("groupName") or self.group
        self.name = given.get("displayName") or self.name
        self.notes = given.get("notes") or self.notes
        self.job_type = given.get("jobType") or self.job_type
        self.sweep = given.get("sweep") or self.sweep
        self.tags = self.tags if given.get("tags") is None else list(given["tags"])
        config = json.loads(given.get("config") or "{}")
        self.raw_config = config if self.replaces and config else {**self.raw_config, **config}
        # Only the upsert of `wandb.init` has a host, and that of a late name, with the entity and id of an answer.
        is_late = bool(given.get("id") and given.get("entity")) and not self.completed
        if given.get("host") and not is_late:
            self.state, self._preempting = "running", False
        self._note()

    def take_file(self, name: str, content: bytes) -> None:
        """Take an uploaded file."""
        self.files = {**self.files, name: content}
        self._uploaded_at[name] = _now()

    def uploaded_at(self, name: str) -> str:
        """When a file was uploaded."""
        return self._uploaded_at[name]

    def stream(self, posted: Mapping[str, Any], client: str) -> None:
        """Take the body of a filestream request, from the shared-mode writer `client` or from a default one: ""."""
        self.requests += 1
        if client:
            self.clients |= {client}
        else:
            self._has_default_writer = True
        for name, chunk in (posted.get("files") or {}).items():
            self._take(name, chunk["offset"], chunk["content"], client)
        if posted.get("preempting"):
            self.state, self._preempting = "preempting", True
        if posted.get("complete"):
            self._complete(posted["exitcode"])
        self._note()

    def _note(self) -> None:
        """Keep what look-ups show later."""
        self._past.append((time.monotonic(), copy.copy(self), len(self._rows)))

    @property
    def shown(self) -> RecordedRun | None:
        """The run as look-ups show it now; None if it was not there then."""
        if not self.old and self.shown_until is None:
            return self
        until = time.monotonic() - self.old if self.shown_until is None else self.shown_until
        past = [(run, count) for at, run, count in self._past if at <= until]
        if not past:
            return None
        run = copy.copy(past[-1][0])
        run._rows = dict(itertools.islice(self._rows.items(), past[-1][1]))
        return run

    def _take(self, name: str, offset: int, lines: list[str], client: str) -> None:
        if name == HISTORY:
            self._take_rows(offset, [json.loads(line) for line in lines], client)
        elif name == SUMMARY:
            summaries = {key: value for key, value in self._summaries.items() if key != client}
            self._summaries = {**summaries, client: json.loads(lines[-1])}
        elif name in (EVENTS, OUTPUT):
            kept = self._events if name == EVENTS else self._output
            kept.update({(client, offset + i): line for i, line in enumerate(lines)})

    def _take_rows(self, offset: int, rows: list[Row], client: str) -> None:
        places = {(client, offset + i): row for i, row in enumerate(rows)}
        self.rows_overwritten += sum(self._rows.get(place, row) != row for place, row in places.items())
        self.rows_after_completion += len(rows) if self.completed else 0
        self._rows.update(places)
        self._counted = [*self._counted, (time.monotonic(), len(self._rows))]

    def _known(self, late_s: float) -> int:
        """How many rows the run had so many seconds ago."""
        until = time.monotonic() - late_s
        return max((count for at, count in self._counted if at <= until), default=0)

    def _complete(self, exit_code: int) -> None:
        self.exit_codes = [*self.exit_codes, exit_code]
        failed = "preempted" if self._preempting else "failed"
        self.state = failed if exit_code else "finished"

    @property
    def storage_id(self) -> str:
        """The id that GraphQL gives to the run's bucket."""
        return f"run:{self.entity}/{self.project}/{self.id}"

    def resume_status(self) -> Json:
        """The run as the query of `resume=` asks for it."""
        telemetry = self.raw_config.get("_wandb", {}).get("value", {}).get("t", {})
        return {
            "id": self.storage_id,
            "name": self.id,
            "displayName": self.name,
            "summaryMetrics": json.dumps({k: v for k, v in self.summary.items() if k != "_step" or not self.late[1]}),
            "historyLineCount": self._known(self.late[0]),
            "eventsLineCount": len(self._events),
            "logLineCount": len(self._output),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[: self._known(self.late[1])][-1:]]),
            "eventsTail": json.dumps(list(self._events.values())[-1:]),
            "config": json.dumps(self.raw_config),
            "tags": self.tags,
            "notes": self.notes,
            "wandbConfig": json.dumps({"t": telemetry}),
        }

    def as_read(self) -> Json:
        """The run as `wandb.Api` asks for it."""
        return {
            "id": self.storage_id,
            "projectId": 1,
            "name": self.id,
            "displayName": self.name,
            "sweepName": self.sweep,
            "state": self.state,
            "config": json.dumps(self.raw_config),
            "summaryMetrics": json.dumps(self.summary),
            "systemMetrics": json.dumps(dict(itertools.chain(*(row.items() for row in self.events[-1:])))),
            "historyKeys": {
                "lastStep": max(
                    (row.get("_step", -1) for row in self._numbered()[: self._known(self.late[1])]), default=-1
                )
            },
            "historyLineCount": self._known(self.late[0]),
            "group": self.group or None,
            "jobType": self.job_type or None,
            "tags": self.tags,
            "notes": self.notes or None,
            "description": self.notes or None,
            "commit": None,
            "readOnly": False,
            "createdAt": self.created_at,
            "heartbeatAt": self.created_at,
            "user": {"name": ENTITY, "username": ENTITY},
        }

    def _numbered(self) -> list[Row]:
        """The rows with the steps that readers see."""
        return [{**row, "_step": step} for step, row in enumerate(self.rows)] if self.clients else self.rows

    def history(self, samples: int, keys: Sequence[str] = (), steps: range | None = None) -> list[Row]:
        """At most `samples` of the rows that have all `keys`, by their steps."""
        rows = [row for row in self._numbered() if all(key in row for key in keys)]
        rows = [row for row in rows if steps is None or row.get("_step", 0) in steps]
        rows.sort(key=lambda row: row.get("_step", 0))
        rows = _sampled(rows, samples)
        return [{key: row[key] for key in keys} for row in rows] if keys else rows


@dataclass
class RecordedSweep:
    """One sweep, up to date with the last request.

    The trials of `method: grid` are the product of the parameters' `values`, after which the sweep is over. Any
    other method goes through that product again and again. A parameter of `min` and `max` starts at its minimum.

    Attributes:
        config: As `wandb.sweep` sent it, which is with a distribution for each parameter.
        run_ids: The runs that were handed out.
        agents: How many agents there have been.
    """

    entity: str
    project: str
    id: str
    config: dict[str, Any]
    state: str = "RUNNING"
    run_ids: list[str] = field(default_factory=list)
    agents: int = 0
    created_at: str = field(default_factory=lambda: _now(), repr=False)

    @property
    def storage_id(self) -> str:
        return f"sweep:{self.entity}/{self.project}/{self.id}"

    @property
    def run_count_expected(self) -> int | None:
        """How many trials there will be; None if they do not end."""
        grid = math.prod(len(values) for values in self._values) if self.config["method"] == "grid" else None
        limits = [limit for limit in (grid, self.config.get("run_cap")) if limit is not None]
        return min(limits, default=None)

    def next_run(self) -> Json | None:
        """The agent's command to run the next trial; None if the sweep is over."""
        number, expected = len(self.run_ids), self.run_count_expected
        if expected is not None and number >= expected:
            self.state = "FINISHED"
            return None
        self.run_ids = [*self.run_ids, secrets.token_hex(4)]
        args = {name: {"value": value} for name, value in self.parameters(number).items()}
        program = {"program": self.config["program"]} if "program" in self.config else {}
        return {"type": "run", "run_id": self.run_ids[-1], "args": args, "logs": [], **program}

    def parameters(self, number: int) -> dict[str, Any]:
        """The parameters of the trial of this number; the first is 0."""
        product = itertools.product(*self._values)
        chosen = iter(next(itertools.islice(product, number % math.prod(map(len, self._values)), None)))
        return {
            name: next(chosen) if "values" in given else given["value"] if "value" in given else _between(given, number)
            for name, given in self.config["parameters"].items()
        }

    def as_read(self, run_count: int) -> Json:
        """The sweep as `wandb.Api` asks for it."""
        return {
            "__typename": "Sweep",
            "id": self.storage_id,
            "name": self.id,
            "displayName": self.config.get("name"),
            "method": self.config["method"],
            "state": self.state,
            "description": self.config.get("description"),
            "bestLoss": None,
            "config": json.dumps(self.config),  # read as YAML
            "createdAt": self.created_at,
            "updatedAt": self.created_at,
            "runCount": run_count,
            "runCountExpected": self.run_count_expected,
        }

    @property
    def _values(self) -> list[list[Any]]:
        return [given["values"] for given in self.config["parameters"].values() if "values" in given]


class Store:
    """All runs and sweeps, with one lock for all: `changed` is notified after each request."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._runs: dict[RunKey, RecordedRun] = {}
        self._sweeps: dict[RunKey, RecordedSweep] = {}
        self._agents: dict[str, RecordedSweep] = {}

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs, in the order in which they were created."""
        return list(self._runs.values())

    @property
    def sweeps(self) -> list[RecordedSweep]:
        """All sweeps, in the order in which they were created."""
        return list(self._sweeps.values())

    def get(self, key: RunKey) -> RecordedRun | None:
        return self._runs.get(key)

    late: tuple[float, float] = (0.0, 0.0)
    replaces = False
    old = 0.0

    def upsert(self, given: Mapping[str, Any]) -> tuple[RecordedRun, bool]:
        """Create or change the run that an UpsertBucket names. Also tells whether it is a new one."""
        key = (given.get("entity") or ENTITY, given.get("project") or PROJECT, given["name"])
        inserted = key not in self._runs
        run = self._runs.setdefault(key, RecordedRun(*key, name=f"recorded-{len(self._runs) + 1}", late=self.late))
        run.replaces, run.old = self.replaces, self.old
        run.upsert(given)
        return run, inserted

    def versions(self, artifact_id: str) -> list[RecordedArtifact]:
        """The artifact with this id, if it was created."""
        return [run.versions[artifact_id] for run in self.runs if artifact_id in run.versions]

    def create_artifact(self, run: RecordedRun, artifact_id: str, version: RecordedArtifact) -> None:
        """Add an artifact to a run. The service does not take the same one of a project twice."""
        others = [one for other in self.runs if other.project == run.project for one in other.versions.values()]
        for one in others:
            if one.committed and (one.name, one.digest) == (version.name, version.digest):
                version.committed, version.contents = True, one.contents
        run.versions = {**run.versions, artifact_id: version}

    def get_sweep(self, key: RunKey) -> RecordedSweep | None:
        return self._sweeps.get(key)

    def create_sweep(self, given: Mapping[str, Any]) -> RecordedSweep:
        """Create the sweep that an UpsertSweep describes."""
        import yaml  # comes with wandb

        config = yaml.safe_load(given.get("config") or "{}")
        for section in ("method", "parameters"):
            if section not in config:
                raise RefusedError(400, f"Invalid sweep config: Sweep config must contain {section} section")
        sweep = RecordedSweep(
            given.get("entityName") or ENTITY, given.get("projectName") or PROJECT, secrets.token_hex(4), config
        )
        sweep.parameters(0)  # fails now for what is not understood here, not at each heartbeat of an agent
        self._sweeps[sweep.entity, sweep.project, sweep.id] = sweep
        return sweep

    def create_agent(self, key: RunKey) -> str:
        """The id of a new agent of the sweep `key`."""
        sweep = self._sweeps.get(key)
        if sweep is None:
            raise RefusedError(404, f"could not find sweep {'/'.join(key)} during createAgent")
        if sweep.state != "RUNNING":
            raise RefusedError(400, f"Sweep {'/'.join(key)} is not running")
        sweep.agents += 1
        agent = f"agent:{len(self._agents) + 1}"
        self._agents[agent] = sweep
        return agent

    def commands(self, agent: str, has_run: bool) -> list[Json]:
        """The command for an agent at this heartbeat: none while it has a run."""
        if agent not in self._agents:
            raise RefusedError(404, "agent not found")
        if has_run:
            return []
        return [self._agents[agent].next_run() or {"type": "exit"}]


class Operations:
    """The answers to the GraphQL operations that wandb 0.31 sends for a run, for a sweep and to read them back.

    Each is a method of the operation's name. What is not there is null, which the client tells as an error.
    """

    # ruff: noqa: N802

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        self._url = url

    def answer(self, operation: str, given: Json) -> Json | None:
        """The data for `operation` with the variables `given`; None for one that is not spoken here."""
        resolve = getattr(self, operation, None) if operation[:1].isupper() else None
        answer: Json | None = resolve(given) if resolve else None
        return answer

    def Viewer(self, _: Json) -> Json:
        viewer = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    GetDefaultEntity = GetViewer = Viewer

    def ServerInfo(self, _: Json) -> Json:
        return {"serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}

    def ServerFeaturesQuery(self, _: Json) -> Json:
        return {"serverInfo": {"features": [{"name": "FILESTREAM_GZIP", "isEnabled": True}]}}

    def OrganizationCoreWeaveOrganizationID(self, _: Json) -> Json:
        return {"entity": {"organization": None}}

    def UpsertBucket(self, given: Json) -> Json:
        run, inserted = self._store.upsert(given)
        bucket = {
            "id": run.storage_id,
            "name": run.id,
            "displayName": run.name,
            "sweepName": run.sweep,
            "config": json.dumps(run.raw_config),
            "historyLineCount": None,
            "project": _project(run.entity, run.project),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def RunResumeStatus(self, given: Json) -> Json:
        entity, project = given.get("entity") or ENTITY, given["project"]
        run = self._store.get((entity, project, given["name"]))
        return {"model": {**_project(entity, project), "bucket": run and run.resume_status()}}

    def ProbeServerSettings(self, _: Json) -> Json:
        """A question of `wandb sync` before 0.28.1, which is written in Python."""
        return {"ServerSettingsType": {"fields": []}}

    def ProbeRunInput(self, _: Json) -> Json:
        """A question of `wandb.Api` in the oldest versions."""
        return {"RunType": {"fields": [{"name": "projectId"}]}}

    def RunStoppedStatus(self, _: Json) -> Json:
        return {"project": {"run": {"stopped": False}}}

    def CreateRunFiles(self, given: Json) -> Json:
        key = (given["entity"], given["project"], given["run"])
        files = [{"name": name, "uploadUrl": self._file_url("upload", key, name)} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def MarkRunFilesUploaded(self, _: Json) -> Json:
        return {"markRunFilesUploaded": {"success": True}}

    def NotifyScriptableRunAlert(self, given: Json) -> Json:
        run = self._store.get((given["entityName"], given["projectName"], given["runName"]))
        if run is not None:
            run.alerts = [*run.alerts, (given["title"], given["text"], given.get("severity") or "INFO")]
        return {"notifyScriptableRunAlert": {"success": True}}

    def ArtifactType(self, _: Json) -> Json:
        return {"project": {"artifact": None}}

    def CreateArtifact(self, given: Json) -> Json:
        asked = given["input"]
        run = self._store.get((asked["entityName"] or ENTITY, asked["projectName"], asked["runName"]))
        version = RecordedArtifact(
            asked["artifactCollectionName"],
            asked["artifactTypeName"],
            [alias["alias"] for alias in asked.get("aliases") or ()],
            asked.get("digest", ""),
            json.loads(asked.get("metadata") or "{}"),
        )
        if run is not None:
            self._store.create_artifact(run, asked["clientID"], version)
        state = "COMMITTED" if version.committed else "PENDING"
        artifact = {"id": asked["clientID"], "state": state, "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def CreateArtifactManifest(self, given: Json) -> Json:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(given["artifactID"])}}

    def UpdateArtifactManifest(self, given: Json) -> Json:
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(given["artifactManifestID"])}}

    def CreateArtifactFiles(self, given: Json) -> Json:
        files = given.get("input", given)["artifactFiles"]  # without an input before wandb 0.26
        for asked in files:
            for version in self._store.versions(asked["artifactID"]):
                version.files = {**version.files, asked["name"]: asked["md5"]}
        nodes = [
            {
                "storagePath": asked["name"],
                "uploadUrl": f"{self._url}/artifact/{quote(asked['artifactID'])}/{quote(asked['name'])}",
                "uploadHeaders": [],
                "artifact": {"id": asked["artifactID"]},
            }
            for asked in files
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def CommitArtifact(self, given: Json) -> Json:
        for version in self._store.versions(given["artifactID"]):
            version.committed = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}

    def ClientIDMapping(self, given: Json) -> Json:
        return {"clientIDMapping": {"serverID": given["clientID"]}}

    def UpsertSweep(self, given: Json) -> Json:
        if given.get("id"):
            raise RefusedError(400, "a sweep is not changed here")
        sweep = self._store.create_sweep(given)
        named = {"id": sweep.storage_id, "name": sweep.id, "project": _project(sweep.entity, sweep.project)}
        return {"upsertSweep": {"sweep": named, "configValidationWarnings": []}}

    def CreateAgent(self, given: Json) -> Json:
        key = (given.get("entityName") or ENTITY, given.get("projectName") or PROJECT, given["sweep"])
        return {"createAgent": {"agent": {"id": self._store.create_agent(key)}}}

    def Heartbeat(self, given: Json) -> Json:
        commands = self._store.commands(given["id"], any(json.loads(given["runState"]).values()))
        return {"agentHeartbeat": {"agent": {"id": given["id"]}, "commands": json.dumps(commands)}}

    def GetSweep(self, given: Json) -> Json:
        sweep = self._store.get_sweep((given["entity"], given["project"], given["name"]))
        runs = sweep and self._matching(given, {"sweep": sweep.id})
        return self._of_project(given, sweep=sweep and sweep.as_read(len(runs or [])))

    GetSweepLegacy = GetSweep

    def SweepWithRuns(self, given: Json) -> Json:
        """What `wandb agent` asks of it: it reads the configuration, and no run."""
        sweep = self._store.get_sweep((given["entity"], given["project"], given["sweep"]))
        return self._of_project(given, sweep=sweep and {**sweep.as_read(0), "runs": {"edges": []}})

    def Run(self, given: Json) -> Json:
        run = self._asked(given)
        return self._of_project(given, run=run and run.as_read())

    RunState = RunHistoryKeys = Run  # which ask for less of it

    def ProbeProjectInput(self, _: Json) -> Json:
        """What a project can be asked for, before wandb 0.23; and the server, for a row with an image."""
        named = {"Project": ["internalId"], "Query": [], "Mutation": [], "ServerInfo": []}
        return {f"{kind}Type": {"fields": [{"name": name} for name in names]} for kind, names in named.items()}

    ProbeServerCapabilities = ProbeProjectInput

    def InputFields(self, given: Json) -> Json:
        """What a mutation takes besides what all servers do, before wandb 0.26."""
        return {"TypeInfo": {"name": given["typeName"], "inputFields": []}}

    def Runs(self, given: Json) -> Json:
        """All of each run, also where only the lighter part of it was asked for."""
        runs = self._matching(given, json.loads(given.get("filters") or "{}"))
        if given["order"] not in ("+created_at", "-created_at"):
            raise ValueError(f"runs are not ordered by {given['order']} here")
        nodes = [run.as_read() for run in (runs if given["order"][0] == "+" else reversed(runs))]
        page = _page(nodes, given.get("cursor"), given["perPage"])
        return self._of_project(given, internalId=1, readOnly=False, runCount=len(nodes), runs=page)

    def RunFiles(self, given: Json) -> Json:
        run = self._asked(given)
        if run is None:
            return self._of_project(given, internalId=1, run=None)
        nodes = [
            self._file(run, name, bool(given.get("upload")))
            for name in run.files
            if name in (given.get("fileNames") or [name])
        ]
        page = _page(nodes, given.get("fileCursor"), given["fileLimit"])
        return self._of_project(given, internalId=1, run={"fileCount": len(run.files), "files": page})

    def RunSampledHistory(self, given: Json) -> Json:
        run = self._asked(given)
        specs = [json.loads(spec) for spec in given["specs"]]
        sampled = run and [run.history(spec["samples"], spec["keys"]) for spec in specs]
        return self._of_project(given, run=run and {"sampledHistory": sampled})

    def SampledHistoryPage(self, given: Json) -> Json:
        """A page of `scan_history` with keys: it has all rows, as it asks for as many samples as steps."""
        run, spec = self._shown(given, "run"), json.loads(given["spec"])
        steps = range(spec["minStep"], spec["maxStep"] + 1)
        page = run and [run.history(spec["samples"], spec["keys"], steps)]
        return self._of_project(given, run=run and {"sampledHistory": page})

    def RunParquetHistory(self, given: Json) -> Json:
        """Answer that no row was exported, and with the steps of those that can be read page by page."""
        run = self._shown(given, "runName")
        rows = run.history(len(run.rows), given.get("liveKeys", ())) if run else []
        return self._of_project(given, run=run and {"parquetHistory": {"parquetUrls": [], "liveData": rows}})

    def HistoryPage(self, given: Json) -> Json:
        run = self._shown(given, "run")
        steps = range(given["minStep"], given["maxStep"])
        rows = [] if run is None else run.history(len(run.rows), (), steps)
        page = [json.dumps(row) for row in rows[: given["pageSize"]]]
        return self._of_project(given, run=run and {"history": page})

    def _of_project(self, given: Json, **content: Any) -> Json:
        """The requested fields of a project; null for one that has no run and no sweep."""
        asked, known = (given["entity"], given["project"]), [*self._store.runs, *self._store.sweeps]
        return {"project": content if asked in [(each.entity, each.project) for each in known] else None}

    def _asked(self, given: Json) -> RecordedRun | None:
        return self._shown(given, "name")

    def _shown(self, given: Json, name: str) -> RecordedRun | None:
        """The run of a look-up, whose id is the variable `name`."""
        run = self._store.get((given["entity"], given["project"], given[name]))
        return run and run.shown

    def _matching(self, given: Json, filters: Json) -> list[RecordedRun]:
        """The runs of the project that is asked for, as far as `filters` lets them through."""
        project = (given["entity"], given["project"])
        return [run for run in self._store.runs if (run.entity, run.project) == project and _matches(run, filters)]

    def _file(self, run: RecordedRun, name: str, upload: bool) -> Json:
        content, key = run.files[name], (run.entity, run.project, run.id)
        url = self._file_url("upload" if upload else "files", key, name)
        return {
            "id": f"file:{'/'.join(key)}/{name}",
            "name": name,
            "url": url,
            "directUrl": url,
            "sizeBytes": str(len(content)),
            "mimetype": mimetypes.guess_type(name)[0] or "",
            "updatedAt": run.uploaded_at(name),
            "md5": base64.b64encode(hashlib.md5(content).digest()).decode(),
        }

    def _file_url(self, endpoint: str, key: RunKey, name: str) -> str:
        return f"{self._url}/{endpoint}/{quote('/'.join([*key, name]))}"

    def _manifest(self, name: str) -> Json:
        return {"id": name, "file": {"id": name, "uploadUrl": f"{self._url}/manifest", "uploadHeaders": []}}


def _project(entity: str, project: str) -> Json:
    return {"id": f"project:{project}", "name": project, "entity": {"id": f"entity:{entity}", "name": entity}}


def _page(nodes: list[Json], after: str | None, first: int) -> Json:
    """At most `first` of the nodes, from behind the cursor `after`."""
    start = int(after or 0)
    edges = [{"node": node, "cursor": str(start + i + 1)} for i, node in enumerate(nodes[start : start + first])]
    end = start + len(edges)
    return {"edges": edges, "pageInfo": {"endCursor": str(end), "hasNextPage": end < len(nodes)}}


def _matches(run: RecordedRun, filters: Json) -> bool:
    """Whether the run has what `filters` asks for: equal values, also in an `$and`."""
    read = run.as_read()
    names = {"sweep": "sweepName"}
    return all(
        all(_matches(run, each) for each in wanted) if key == "$and" else read[names.get(key, key)] == wanted
        for key, wanted in filters.items()
    )


def _sampled(rows: list[Row], samples: int) -> list[Row]:
    return rows if len(rows) <= samples else [rows[i * len(rows) // samples] for i in range(samples)]


def _between(given: Json, number: int) -> float:
    """The minimum, and more for each trial."""
    return float(given["min"] + (given["max"] - given["min"]) * number / (number + 1))


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
