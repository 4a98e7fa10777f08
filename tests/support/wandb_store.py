"""What the recording W&B server keeps: its runs, each as the service would show it.

The rules of the service that are kept here, because a client that breaks them loses data there too:

- A line of a run's history stays at the offset that its writer gave: who starts at 0 again overwrites.
- A shared-mode writer has offsets of its own, under its client id; all default-mode writers of a run share theirs.
- A run is over at its exit code, until a `wandb.init` opens it again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Row = Json
RunKey = tuple[str, str, str]
_Place = tuple[str, int]  # the client id of a shared-mode writer, or "", and the offset it gave

HISTORY, EVENTS, SUMMARY, OUTPUT = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json", "output.log"
ENTITY, PROJECT = "recorded", "uncategorized"  # of a run that names none


@dataclass
class RecordedRun:
    """One run, up to date with the last request.

    What a reader can iterate over is replaced by a write and never changed, so that it can be read at any time.

    Attributes:
        name: The display name.
        config: The values, without wandb's own `_wandb`.
        exit_codes: One for each time that a writer completed the run.
        upserts: The variables of each UpsertBucket.
        requests: How many filestream requests were accepted.
        clients: The client ids of shared-mode writers.
        files: Each uploaded file's last content, by name.
        artifacts: The names of the artifacts that were created.
        rows_after_completion: How many rows came when the run was over and no `wandb.init` had opened it again.
        rows_overwritten: How many rows took the place of a different one, which is lost.
        connections: How many TCP connections have carried filestream requests.
        open_connections: How many of them are open.
    """

    entity: str
    project: str
    id: str
    name: str
    group: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    job_type: str = ""
    raw_config: dict[str, Any] = field(default_factory=dict, repr=False)
    state: str = "running"
    exit_codes: list[int] = field(default_factory=list)
    upserts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    requests: int = 0
    clients: frozenset[str] = frozenset()
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    artifacts: list[str] = field(default_factory=list)
    rows_after_completion: int = 0
    rows_overwritten: int = 0
    connections: int = 0
    open_connections: int = 0
    _has_default_writer: bool = field(default=False, repr=False)
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
        """The last summary of each writer, put together in the order in which they came."""
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
        self.tags = self.tags if given.get("tags") is None else list(given["tags"])
        self.raw_config = {**self.raw_config, **json.loads(given.get("config") or "{}")}
        if given.get("host"):  # only the upsert of `wandb.init` has it; a late change of the config opens nothing
            self.state, self._preempting = "running", False

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

    def _complete(self, exit_code: int) -> None:
        self.exit_codes = [*self.exit_codes, exit_code]
        failed = "preempted" if self._preempting else "failed"
        self.state = failed if exit_code else "finished"

    @property
    def storage_id(self) -> str:
        """What GraphQL has as the id of the run's bucket."""
        return f"run:{self.entity}/{self.project}/{self.id}"

    def resume_status(self) -> Json:
        """The run as the query of `resume=` asks for it."""
        telemetry = self.raw_config.get("_wandb", {}).get("value", {}).get("t", {})
        return {
            "id": self.storage_id,
            "name": self.id,
            "displayName": self.name,
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(self._rows),
            "eventsLineCount": len(self._events),
            "logLineCount": len(self._output),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]),
            "eventsTail": json.dumps(list(self._events.values())[-1:]),
            "config": json.dumps(self.raw_config),
            "tags": self.tags,
            "notes": self.notes,
            "wandbConfig": json.dumps({"t": telemetry}),
        }


class Store:
    """All runs, with one lock for all: `changed` is notified after each request."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._runs: dict[RunKey, RecordedRun] = {}

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs, in the order in which they were created."""
        return list(self._runs.values())

    def get(self, key: RunKey) -> RecordedRun | None:
        return self._runs.get(key)

    def upsert(self, given: Mapping[str, Any]) -> tuple[RecordedRun, bool]:
        """Create or change the run that an UpsertBucket names. Also tells whether it is a new one."""
        key = (given.get("entity") or ENTITY, given.get("project") or PROJECT, given["name"])
        inserted = key not in self._runs
        run = self._runs.setdefault(key, RecordedRun(*key, name=f"recorded-{len(self._runs) + 1}"))
        run.upsert(given)
        return run, inserted


class Operations:
    """The answers to the GraphQL operations that wandb 0.31 sends for a run, each a method of the operation's name."""

    # ruff: noqa: N802

    def __init__(self, store: Store, url: str, counts_on_upsert: bool) -> None:
        self._store = store
        self._url = url
        self._counts_on_upsert = counts_on_upsert

    def answer(self, operation: str, given: Json) -> Json | None:
        """The data for `operation` with the variables `given`; None for one that is not spoken here."""
        resolve = getattr(self, operation, None) if operation[:1].isupper() else None
        answer: Json | None = resolve(given) if resolve else None
        return answer

    def Viewer(self, _: Json) -> Json:
        viewer = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

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
            "config": json.dumps(run.raw_config),
            "historyLineCount": len(run.rows) if self._counts_on_upsert else None,
            "project": _project(run.entity, run.project),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def RunResumeStatus(self, given: Json) -> Json:
        entity, project = given.get("entity") or ENTITY, given["project"]
        run = self._store.get((entity, project, given["name"]))
        return {"model": {**_project(entity, project), "bucket": run and run.resume_status()}}

    def RunStoppedStatus(self, _: Json) -> Json:
        return {"project": {"run": {"stopped": False}}}

    def CreateRunFiles(self, given: Json) -> Json:
        path = f"{self._url}/upload/{given['entity']}/{given['project']}/{given['run']}"
        files = [{"name": name, "uploadUrl": f"{path}/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def MarkRunFilesUploaded(self, _: Json) -> Json:
        return {"markRunFilesUploaded": {"success": True}}

    def NotifyScriptableRunAlert(self, _: Json) -> Json:
        return {"notifyScriptableRunAlert": {"success": True}}

    def ArtifactType(self, _: Json) -> Json:
        return {"project": {"artifact": None}}

    def CreateArtifact(self, given: Json) -> Json:
        asked = given["input"]
        run = self._store.get((asked["entityName"], asked["projectName"], asked["runName"]))
        if run is not None:
            run.artifacts = [*run.artifacts, asked["artifactCollectionName"]]
        artifact = {"id": asked["clientID"], "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def CreateArtifactManifest(self, given: Json) -> Json:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(given["artifactID"])}}

    def UpdateArtifactManifest(self, given: Json) -> Json:
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(given["artifactManifestID"])}}

    def CreateArtifactFiles(self, given: Json) -> Json:
        nodes = [
            {
                "storagePath": asked["name"],
                "uploadUrl": f"{self._url}/artifact/{asked['name']}",
                "uploadHeaders": [],
                "artifact": {"id": asked["artifactID"]},
            }
            for asked in given["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def CommitArtifact(self, given: Json) -> Json:
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}

    def ClientIDMapping(self, given: Json) -> Json:
        return {"clientIDMapping": {"serverID": given["clientID"]}}

    def _manifest(self, name: str) -> Json:
        return {"id": name, "file": {"id": name, "uploadUrl": f"{self._url}/artifact/manifest", "uploadHeaders": []}}


def _project(entity: str, project: str) -> Json:
    return {"id": f"project:{project}", "name": project, "entity": {"id": f"entity:{entity}", "name": entity}}
