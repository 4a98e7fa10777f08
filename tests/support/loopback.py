"""The base of the recording servers on loopback: they listen, fail on command, and can be waited for."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, TypeVar

T = TypeVar("T")


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


class LoopbackServer(ABC):
    """A server, from `with` to the end of its block. `fault` can be set at any time, to None to work again."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], changed: threading.Condition) -> None:
        """`handler` serves a connection; `changed` is notified after each request."""
        self.errors: list[BaseException] = []
        self.changed = changed
        self._handler = handler
        self._fault: Fault | None = None
        self._listener: Listener | None = None
        # Bound without listening, it keeps the port ours while nobody listens: no other process gets it, and no
        # client that dials it is given it as its own port, which would connect it to itself.
        self._port_holder = _bound_socket(0)
        self.port: int = self._port_holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Any:
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
    @abstractmethod
    def runs(self) -> Sequence[Any]:
        """All runs, in the order in which they were created."""

    def run(self, id: str) -> Any:
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

        with self.changed:
            if not self.changed.wait_for(asked, timeout_s):
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
        self._listener = Listener(self, self._handler)
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def _hang_up(self) -> int:
        """Stop listening and drop the open connections. Tells how many."""
        listener, self._listener = self._listener, None
        return 0 if listener is None else listener.hang_up()

    def meet_fault(self, endpoint: str) -> Fault | None:
        """The fault that a request to `endpoint` meets now, if any; it is counted."""
        with self.changed:
            fault = self._fault
            if fault is None or fault.only not in (None, endpoint):
                return None
            fault.hits += 1
            self.changed.notify_all()
            return fault


class Listener(ThreadingHTTPServer):
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


class Handler(BaseHTTPRequestHandler):
    """One connection: it may carry many requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is one packet

    def answer(self, code: int, answer: Any, headers: Mapping[str, str] | None = None) -> None:
        self.send(code, {"Content-Type": "application/json", **(headers or {})}, json.dumps(answer).encode())

    def send(self, code: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    """The whole body of a request.

    Raises:
        ConnectionAbortedError: Its client died before it had sent all: the connection ends, as at any server.
    """
    length = int(handler.headers.get("Content-Length", 0))
    body = handler.rfile.read(length)
    if len(body) < length:
        raise ConnectionAbortedError(f"{len(body)} of {length} bytes came")
    return body


def survives(handler: Any, fault: Fault | None) -> bool:
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


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


class SlowProxy:
    """Passes on, each after `delay_s` seconds, what clients send to a server on loopback. From `with` to its end.

    Attributes:
        hits: How many times something has come.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self.hits, self._to, self._delay_s = 0, port, delay_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> SlowProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(target=self._pass_on, args=(client, server, self._delay_s), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, 0.0), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.hits += delay_s > 0
                time.sleep(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
