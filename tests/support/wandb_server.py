"""A W&B server on loopback, in this process: it records what the real client sends and fails on command.

    with WandbServer() as server:
        done = jobs.python(tmp_path, "train.py", env=server.environment)
        run = server.run("my-id")
        assert [row["x"] for row in run.rows] == [1, 2]

        with server.failing(Fault.status(503)) as fault:
            server.wait_for(lambda: fault.hits)

It is as strict as the service where that decides whether data is kept: see `wandb_store`.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import unquote

import psutil

from support.loopback import Handler, Listener, LoopbackServer, body_of, survives
from support.wandb_store import Json, Operations, RecordedRun, RecordedSweep, RefusedError, RunKey, Store

KEY = "fa4e" * 10
_FILESTREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream$")
_UPLOAD = re.compile(r"/upload/([^/]+)/([^/]+)/([^/]+)/(.+)$")
_ARTIFACT = re.compile(r"/artifact/([^/]+)/(.+)$")
_DOWNLOAD = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/(.+)$")
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")
_NOT_LOGGED_IN = {"errors": [{"message": "user is not logged in", "extensions": {"code": "PERMISSION_ERROR"}}]}

Endpoint = Literal["graphql", "filestream", "upload", "other"]


class WandbServer(LoopbackServer):
    """The server, from `with` to the end of its block. `fault` can be set at any time, to None to work again.

    Args:
        key: The API key that it accepts.
        replaces: Whether it keeps the config and the summary of a run's last writer alone, and does not merge them by
            key. It is not known which of the two the service does.
        late: How many seconds late it counts a run's rows, and knows the last one: wandb's authors disagree on which.
        old: How many seconds old its answers to `wandb.Api` are.

    Attributes:
        operations: The names of the GraphQL operations that were asked for, in their order.
        refused_operations: Those that are answered with an error.
        unknown_operations: The GraphQL operations that were asked for and are not spoken here. They got an error.
        headers: Those of each request that has come, in their order.
    """

    def __init__(
        self,
        key: str = KEY,
        late: tuple[float, float] = (0.0, 0.0),
        replaces: bool = False,
        old: float = 0.0,
    ) -> None:
        self._store = Store()
        self._store.late, self._store.replaces, self._store.old = late, replaces, old
        super().__init__(_Handler, self._store.changed)
        self.key = key
        self.unknown_operations: list[str] = []
        self.operations: list[str] = []
        self.refused_operations: set[str] = set()
        self.headers: list[Mapping[str, str]] = []
        self._operations = Operations(self._store, self.url)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that send a job's client here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": self.key, "WANDB_MODE": "online"}

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs, in the order in which they were created."""
        return self._store.runs

    @property
    def sweeps(self) -> list[RecordedSweep]:
        """All sweeps, in the order in which they were created."""
        return self._store.sweeps

    # What the handlers call.

    def graphql(self, posted: Json) -> tuple[int, Json]:
        """Answer one GraphQL request, with the HTTP status."""
        match = _OPERATION.search(posted["query"])
        # `wandb.Api` before 0.28 asks `query { viewer { id } }` without a name.
        name = posted.get("operationName") or (match[1] if match else "Viewer" if "viewer" in posted["query"] else "")
        with self._changing():
            self.operations.append(name)
            if name in self.refused_operations:
                return 200, {"data": None, "errors": [{"message": "made to fail"}]}
            try:
                answer = self._operations.answer(name, posted.get("variables") or {})
            except RefusedError as refused:
                return refused.code, {"data": None, "errors": [{"message": str(refused)}]}
            if answer is None:
                self.unknown_operations.append(name)
                return 200, {"data": None, "errors": [{"message": f"unknown operation {name}"}]}
            return 200, {"data": answer}

    def filestream(self, key: RunKey, posted: Json, client: str, connection: set[RunKey], port: int) -> Json | None:
        """Take one filestream request from a port, and return the answer; None if its run is not known."""
        with self._changing():
            run = self._store.get(key)
            if run is None:
                return None
            if key not in connection:
                connection.add(key)
                run.connections += 1
                run.senders |= _wandb_cores_at(port, self.port)
            run.stream(posted, client)
            return {"exitcode": None, "limits": {}, **({"stopped": True} if run.stop_requested else {})}

    def uploaded(self, key: RunKey, name: str, content: bytes) -> None:
        """Take one uploaded file."""
        with self._changing():
            run = self._store.get(key)
            if run is not None:
                run.take_file(name, content)

    def uploaded_to_artifact(self, artifact: str, name: str, content: bytes) -> None:
        """Take one uploaded file of an artifact that was created, and is not committed yet."""
        with self._changing():
            for version in self._store.versions(artifact):
                version.contents = {**version.contents, name: content}

    def file(self, key: RunKey, name: str) -> bytes | None:
        """The content of an uploaded file; None if there is none."""
        run = self._store.get(key)
        return None if run is None else run.files.get(name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._store.changed:
            yield
            self._store.changed.notify_all()


class _Handler(Handler):
    # ruff: noqa: N802
    server: Listener

    def setup(self) -> None:
        super().setup()
        self._streamed: set[RunKey] = set()

    def parse_request(self) -> bool:
        is_parsed = super().parse_request()
        if is_parsed:
            self.server.recorder.headers.append(dict(self.headers))
        return is_parsed

    def do_POST(self) -> None:
        body = body_of(self)
        filestream = _FILESTREAM.match(self.path)
        endpoint: Endpoint = "filestream" if filestream else "graphql" if self.path == "/graphql" else "other"
        if not survives(self, self.server.recorder.meet_fault(endpoint)):
            return
        if endpoint == "other":  # telemetry of wandb's own
            self.answer(200, {})
        elif not self._authorised():
            self.answer(401, _NOT_LOGGED_IN)
        else:
            with self.server.recorder.changed:  # who waits for what a request brings finds it answered
                self._serve(filestream, body)

    def _serve(self, filestream: re.Match[str] | None, body: bytes) -> None:
        """Answer 400 to a request that this server cannot take, which the client does not repeat, and note it."""
        try:
            posted = self._decoded(body)
            code, answer = self._stream(filestream, posted) if filestream else self.server.recorder.graphql(posted)
        except Exception as error:
            self.server.recorder.errors.append(error)
            code, answer = 400, {"errors": [{"message": repr(error)}]}
        self.answer(code, answer)

    def do_PUT(self) -> None:
        body = body_of(self)
        if not survives(self, self.server.recorder.meet_fault("upload")):
            return
        upload, artifact = _UPLOAD.match(unquote(self.path)), _ARTIFACT.match(self.path)
        if upload:
            self.server.recorder.uploaded(_run_key(upload), upload[4], body)
        elif artifact:
            self.server.recorder.uploaded_to_artifact(unquote(artifact[1]), unquote(artifact[2]), body)
        self.answer(200, {})

    def do_GET(self) -> None:
        if not survives(self, self.server.recorder.meet_fault("other")):
            return
        file = _DOWNLOAD.match(unquote(self.path))
        content = self.server.recorder.file(_run_key(file), file[4]) if file else None
        if not self._authorised():
            self.answer(401, _NOT_LOGGED_IN)
        elif content is None:
            self.answer(404, {"error": "file not found"})
        else:
            self.send(200, {"Content-Type": "application/octet-stream"}, content)

    def _authorised(self) -> bool:
        expected = base64.b64encode(f"api:{self.server.recorder.key}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {expected}"

    def _decoded(self, body: bytes) -> Json:
        decoded: Json = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        return decoded

    def _stream(self, path: re.Match[str], posted: Json) -> tuple[int, Json]:
        shared = self.headers.get("X-WANDB-USE-ASYNC-FILESTREAM") == "true"
        client = self.headers.get("X-WANDB-ASYNC-CLIENT-ID", "") if shared else ""
        answer = self.server.recorder.filestream(_run_key(path), posted, client, self._streamed, self.client_address[1])
        return (404, {"error": "run not found"}) if answer is None else (200, answer)


def _wandb_cores_at(port: int, server: int) -> frozenset[int]:
    """The process with the connection from a port to the server's; none if it has just been killed.

    Another process may use the same port of the machine for a connection to another server.
    """
    cores = [one for one in psutil.process_iter(["name"]) if str(one.info["name"]).startswith("wandb-core")]
    found = set()
    for core in cores:
        with suppress(psutil.Error):
            connections = core.net_connections("tcp")
            found |= {
                core.pid for one in connections if one.raddr and (one.laddr.port, one.raddr.port) == (port, server)
            }
    return frozenset(found)


def _run_key(path: re.Match[str]) -> RunKey:
    return unquote(path[1]), unquote(path[2]), unquote(path[3])
