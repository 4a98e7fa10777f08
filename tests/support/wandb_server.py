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
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from support.wandb_store import Json, Operations, RecordedRun, RecordedSweep, RefusedError, RunKey, Store

KEY = "fa4e" * 10
_FILESTREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream$")
_UPLOAD = re.compile(r"/upload/([^/]+)/([^/]+)/([^/]+)/(.+)$")
_DOWNLOAD = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/(.+)$")
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")
_NOT_LOGGED_IN = {"errors": [{"message": "user is not logged in", "extensions": {"code": "PERMISSION_ERROR"}}]}

T = TypeVar("T")
Endpoint = Literal["graphql", "filestream", "other"]  # pluto_server has other ones


@dataclass
class Fault:
    """One way to fail, until it ends. Make it with a class method.

    Attributes:
        only: The endpoint that it is limited to. The other one works.
        hits: How many requests have met it. Of refused connections the kernel tells nothing: there it is the number
            of open connections that were dropped.
    """

    kind: Literal["refuse", "mute", "slow", "status"]
    delay_s: float = 0
    code: int = 0
    retry_after_s: float | None = None
    only: str | None = None
    hits: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def refuse(cls) -> Fault:
        """Nobody listens: connections are refused, the open ones are dropped."""
        return cls("refuse")

    @classmethod
    def mute(cls, only: str | None = None) -> Fault:
        """Requests are read and not answered. At the end those are served whose client still waits."""
        return cls("mute", only=only)

    @classmethod
    def slow(cls, delay_s: float, only: str | None = None) -> Fault:
        """Each request is served after `delay_s` seconds."""
        return cls("slow", delay_s=delay_s, only=only)

    @classmethod
    def status(cls, code: int, retry_after_s: float | None = None, only: str | None = None) -> Fault:
        """Each request is answered with this HTTP status, and nothing is taken."""
        return cls("status", code=code, retry_after_s=retry_after_s, only=only)


class WandbServer:
    """The server, from `with` to the end of its block. `fault` can be set at any time, to None to work again.

    Args:
        key: The API key that it accepts.
        counts_on_upsert: Whether the answer to UpsertBucket has the run's line count, with which wandb appends even
            without `resume=`. The service counts some seconds late, so that both are to be met there.

    Attributes:
        unknown_operations: The GraphQL operations that were asked for and are not spoken here. They got an error.
    """

    def __init__(self, key: str = KEY, counts_on_upsert: bool = False) -> None:
        self.key = key
        self.unknown_operations: list[str] = []
        self.errors: list[BaseException] = []
        self._store = Store()
        self._fault: Fault | None = None
        self._listener: _Listener | None = None
        # Bound without listening, it keeps the port ours while nobody listens: no other process gets it, and no
        # client that dials it is given it as its own port, which would connect it to itself.
        self._port_holder = _bound_socket(0)
        self.port: int = self._port_holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._operations = Operations(self._store, self.url, counts_on_upsert)

    def __enter__(self) -> WandbServer:
        self._listen()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._hang_up()
        if self._fault is not None:
            self._fault.ended.set()
        self._port_holder.close()
        if self.errors and kind is None:
            raise self.errors[0]

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

    def run(self, id: str) -> RecordedRun:
        """The one run with this id.

        Raises:
            LookupError: There is none, or one in several projects.
        """
        found = [run for run in self.runs if run.id == id]
        if len(found) != 1:
            raise LookupError(f"{len(found)} runs have the id {id!r}; there are {[run.id for run in self.runs]}")
        return found[0]

    def wait_for(self, predicate: Callable[[], T], timeout_s: float = 30) -> T:
        """Wait until `predicate` gives something true, asked after each request; a LookupError counts as false.

        Raises:
            TimeoutError: It did not come true in `timeout_s`.
        """

        def asked() -> T | None:
            try:
                return predicate()
            except LookupError:
                return None

        with self._store.changed:
            if not self._store.changed.wait_for(asked, timeout_s):
                raise TimeoutError(f"not within {timeout_s} s; the server has {self.runs}")
            return predicate()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        if fault is not None:
            fault.hits = 0
            fault.ended.clear()
        previous, self._fault = self._fault, fault
        if previous is not None:
            previous.ended.set()
            if previous.kind == "refuse":
                self._listen()
        if fault is not None and fault.kind == "refuse":
            fault.hits = self._hang_up()

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[Fault]:
        """Fail so inside the block, and work after it."""
        self.fault = fault
        try:
            yield fault
        finally:
            self.fault = None

    def _listen(self) -> None:
        self._listener = _Listener(self, _Handler)
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def _hang_up(self) -> int:
        """Stop listening and drop the open connections. Tells how many."""
        listener, self._listener = self._listener, None
        return 0 if listener is None else listener.hang_up()

    # What the handlers call.

    def meet_fault(self, endpoint: Endpoint) -> Fault | None:
        """The fault that a request to `endpoint` meets now, if any; it is counted."""
        with self._store.changed:
            fault = self._fault
            if fault is None or fault.only not in (None, endpoint):
                return None
            fault.hits += 1
            self._store.changed.notify_all()
            return fault

    def graphql(self, posted: Json) -> tuple[int, Json]:
        """Answer one GraphQL request, with the HTTP status."""
        match = _OPERATION.search(posted["query"])
        name = posted.get("operationName") or (match[1] if match else "")
        with self._changing():
            try:
                answer = self._operations.answer(name, posted.get("variables") or {})
            except RefusedError as refused:
                return refused.code, {"data": None, "errors": [{"message": str(refused)}]}
            if answer is None:
                self.unknown_operations.append(name)
                return 200, {"data": None, "errors": [{"message": f"unknown operation {name}"}]}
            return 200, {"data": answer}

    def filestream(self, key: RunKey, posted: Json, client: str, connection: set[RunKey]) -> bool:
        """Take one filestream request. Tells whether its run is known."""
        with self._changing():
            run = self._store.get(key)
            if run is None:
                return False
            if key not in connection:
                connection.add(key)
                run.connections += 1
                run.open_connections += 1
            run.stream(posted, client)
            return True

    def uploaded(self, key: RunKey, name: str, content: bytes) -> None:
        """Take one uploaded file."""
        with self._changing():
            run = self._store.get(key)
            if run is not None:
                run.files = {**run.files, name: content}

    def file(self, key: RunKey, name: str) -> bytes | None:
        """The content of an uploaded file; None if there is none."""
        run = self._store.get(key)
        return None if run is None else run.files.get(name)

    def disconnected(self, connection: set[RunKey]) -> None:
        """A TCP connection that carried filestream requests of these runs was closed."""
        with self._changing():
            for key in connection:
                run = self._store.get(key)
                if run is not None:
                    run.open_connections -= 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._store.changed:
            yield
            self._store.changed.notify_all()


class _Listener(ThreadingHTTPServer):
    """The listening socket and the connections it has accepted."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, recorder: Any, handler: type[BaseHTTPRequestHandler]) -> None:
        self.recorder = recorder
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", recorder.port), handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        request, address = super().get_request()
        with self._open_lock:
            self._open.add(request)
        return request, address

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> int:
        """Close the listening socket, then drop all connections. Tells how many."""
        self.shutdown()
        self.socket.close()
        with self._open_lock:
            for connection in self._open:
                with suppress(OSError):  # its client was faster
                    connection.shutdown(socket.SHUT_RDWR)
            return len(self._open)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.recorder.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    """One connection: it may carry many requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is one packet
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self._streamed: set[RunKey] = set()

    def finish(self) -> None:
        self.server.recorder.disconnected(self._streamed)
        super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        filestream = _FILESTREAM.match(self.path)
        endpoint: Endpoint = "filestream" if filestream else "graphql" if self.path == "/graphql" else "other"
        if not _survives(self, self.server.recorder.meet_fault(endpoint)):
            return
        if endpoint == "other":  # telemetry of wandb's own
            self.answer(200, {})
        elif not self._authorised():
            self.answer(401, _NOT_LOGGED_IN)
        else:
            self._serve(filestream, body)

    def _serve(self, filestream: re.Match[str] | None, body: bytes) -> None:
        """What this server cannot take is answered with 400, which the client does not try again, and told."""
        try:
            posted = self._decoded(body)
            code, answer = self._stream(filestream, posted) if filestream else self._query(posted)
        except Exception as error:
            self.server.recorder.errors.append(error)
            code, answer = 400, {"errors": [{"message": repr(error)}]}
        self.answer(code, answer)

    def _query(self, posted: Json) -> tuple[int, Json]:
        return self.server.recorder.graphql(posted)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not _survives(self, self.server.recorder.meet_fault("other")):
            return
        upload = _UPLOAD.match(unquote(self.path))
        if upload:
            self.server.recorder.uploaded(_run_key(upload), upload[4], body)
        self.answer(200, {})

    def do_GET(self) -> None:
        if not _survives(self, self.server.recorder.meet_fault("other")):
            return
        file = _DOWNLOAD.match(unquote(self.path))
        content = self.server.recorder.file(_run_key(file), file[4]) if file else None
        if not self._authorised():
            self.answer(401, _NOT_LOGGED_IN)
        elif content is None:
            self.answer(404, {"error": "file not found"})
        else:
            self._send(200, {"Content-Type": "application/octet-stream"}, content)

    def log_message(self, *_: object) -> None:
        pass

    def _authorised(self) -> bool:
        expected = base64.b64encode(f"api:{self.server.recorder.key}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {expected}"

    def _decoded(self, body: bytes) -> Json:
        decoded: Json = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        return decoded

    def _stream(self, path: re.Match[str], posted: Json) -> tuple[int, Json]:
        shared = self.headers.get("X-WANDB-USE-ASYNC-FILESTREAM") == "true"
        client = self.headers.get("X-WANDB-ASYNC-CLIENT-ID", "") if shared else ""
        known = self.server.recorder.filestream(_run_key(path), posted, client, self._streamed)
        return (200, {"exitcode": None, "limits": {}}) if known else (404, {"error": "run not found"})

    def answer(self, code: int, answer: Json, headers: Mapping[str, str] | None = None) -> None:
        self._send(code, {"Content-Type": "application/json", **(headers or {})}, json.dumps(answer).encode())

    def _send(self, code: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _survives(handler: Any, fault: Fault | None) -> bool:
    """Have a request suffer the fault. Tells whether it is to be served after it."""
    if fault is None:
        return True
    if fault.kind == "status":
        wait = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
        handler.answer(fault.code, {"error": "made to fail"}, wait)
        return False
    fault.ended.wait(fault.delay_s if fault.kind == "slow" else None)
    if _client_is_gone(handler.connection):
        handler.close_connection = True
        return False
    return True


def _client_is_gone(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


def _run_key(path: re.Match[str]) -> RunKey:
    return path[1], path[2], path[3]


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound
