"""The ranks of one node that share a run: which of them opens it, and the connection by which the others attach to it.

The messages on a node's socket. Each is one line of JSON, an object with these keys:

```
follower to leader                  leader to follower
rank: 1           "I am here"       publish: {...}, server: "..."   the value to use, and which server sent it
request: "..."    "publish again"   reject: "why"                   there is no value, and there will be none
suspended: true   "I have stopped"  suspend: true                   stop using the value until the next `publish`
```

The end of a connection is a message too: a follower that hangs up is done, a leader that hangs up has gone. The kernel
hangs up for a process that is killed. `flyteplugins_tracking.trackers.wandb.shared` draws the order of the messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.files import private_directory
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking.trackers.base import RunRequest

Json = Mapping[str, Any]

# The longest path of a socket, without the final zero: sun_path in unix(7).
_MAX_PATH = 107
# How long a process that does not read may delay the sender.
SEND_TIMEOUT_S = 1.0
_RETRY_S = 0.05

# What a follower may send: a number or a question a line. A node has a few hundred followers at most.
_LONGEST_LINE = 1 << 20
_MOST_REQUESTS = 500


class _Connected(PerProcess):
    """The sockets of this process, and the tokens of the servers that it has received a value from."""

    def __init__(self) -> None:
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.seen_servers: set[str] = set()

    def after_fork_in_child(self) -> None:
        """Close the parent's connections: copies in a child would keep them open after the parent's end."""
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.close()
        super().after_fork_in_child()


_connected = register(_Connected())


class NodeError(Exception):
    """A follower cannot get the leader's value. The text says why."""


class NodeServerExistsError(NodeError):
    """Another process is the server of this name."""


@dataclass(frozen=True)
class NodeRole:
    """A rank's role among the ranks that share its run.

    Attributes:
        name: "leader": opens the run for itself and the other ranks of its node. It is the primary on the primary's
            node, and local rank 0 on the others. "follower": attaches to the leader's.
            "single": is the only rank of its node, or the ranks of its node are unknown.
        has_peers: Whether other nodes, ranks whose node is unknown, or tasks open the run too, now or later.
    """

    name: Literal["single", "leader", "follower"] = "single"
    has_peers: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> NodeRole:
        """The role of the rank that opens this run."""
        config, info = request.config, request.info
        if info is None:
            return cls(has_peers=request.has_other_writers)
        if config.run_mode != "shared":
            return cls()
        if info.worker_index is None or info.local_rank is None:
            return cls(has_peers=True)
        # An elastic job with one node today may have had several: all writers of a run must be of one kind.
        has_peers = config.rank_scope == "global" and (info.num_workers != 1 or request.has_other_writers)
        if not request.leads_node:
            return cls("follower", has_peers)
        return cls("single" if info.local_world_size == 1 else "leader", has_peers)


class NodeServer:
    """Publishes a value to the followers that connect."""

    def __init__(self, name: str, on_request: Callable[[str], None], expected: int = 0) -> None:
        """Listen under `name`.

        Args:
            name: The same for the server and its clients.
            on_request: Called in a thread of its own, with the text that a follower has sent, when it requests that
                the value is published again.
            expected: How many followers will connect.

        Raises:
            NodeServerExistsError: Another process has the name.
            NodeError: The directory of the socket cannot be used.
        """
        self._on_request = on_request
        self._value: Json | None = None
        self._rejection: str | None = None
        self._readers: dict[socket.socket, LineReader] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._expected = expected
        self._seen_ranks: set[int] = set()
        self._suspended: set[socket.socket] = set()
        self._changed = threading.Condition(threading.RLock())
        self._path = _socket_path(name)
        self._listener = _listen(self._path)
        self._token = uuid.uuid4().hex
        self._is_closing = False
        self._answering = 0  # threads
        self._inode = os.stat(self._path).st_ino
        self._start_thread()

    def _start_thread(self) -> None:
        self._waker, self._wakeup = map(_track, socket.socketpair())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="flyteplugins_tracking.node_server", daemon=True)
        self._thread.start()

    def publish(self, value: Json) -> None:
        """Send `value` to the followers that are connected, and to those that connect later."""
        with self._changed:
            self._value, self._suspended = value, set()
            for follower in self._ranks:
                self._send_value(follower, value)

    def reject(self, reason: str) -> None:
        """Tell the followers, now and later, that there will be no value."""
        with self._changed:
            self._rejection = reason
            for follower in self._ranks:
                _send(follower, {"reject": reason})

    def suspend(self) -> None:
        """Return when the followers have stopped using the value, or after a second. `publish` lets them continue."""
        with self._changed:
            self._value = None
            for follower in self._ranks:
                _send(follower, {"suspend": True})
            self._changed.wait_for(lambda: self._suspended >= self._ranks.keys(), SEND_TIMEOUT_S)

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> list[int]:
        """Wait until the expected followers have connected and left, `timeout_s` has passed, or `until` returns True.

        Returns:
            The ranks that are still connected.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._ranks or self.missing) and time.monotonic() < deadline and not until():
                self._changed.wait(_RETRY_S)
            return sorted(self._ranks.values())

    @property
    def missing(self) -> int:
        """How many of the expected followers have never connected."""
        return max(0, self._expected - len(self._seen_ranks))

    def close(self) -> None:
        """Hang up on the followers that are connected, and stop listening."""
        self._stop_listening()
        _close(self._waker)
        if threading.current_thread() is not self._thread:
            threads.join(self._thread, SEND_TIMEOUT_S)
        with self._changed:
            for connection in [*self._readers, self._listener, self._wakeup]:
                _close(connection)
        if not self._thread.is_alive():
            self._selector.close()

    def _stop_listening(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
            # A follower that has connected and was not accepted yet will connect to the next server.
            self._listener.shutdown(socket.SHUT_RDWR)

    def _send_value(self, follower: socket.socket, value: Json) -> None:
        _send(follower, {"publish": value, "server": self._token})

    # In the server's thread

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                if connection is self._wakeup:
                    return
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                else:
                    self._read(connection)

    def _accept(self) -> None:
        try:
            follower, _ = self._listener.accept()
        except OSError:
            if self._is_closing:
                self._selector.unregister(self._listener)
            else:  # there may be too many open files
                time.sleep(_RETRY_S)
            return
        if not _is_same_user(follower):
            follower.close()
            return
        _track(follower).setblocking(False)
        with self._changed:
            self._readers[follower] = LineReader(_LONGEST_LINE)
        self._selector.register(follower, selectors.EVENT_READ)

    def _read(self, follower: socket.socket) -> None:
        try:
            for message in self._readers[follower].read(follower):
                self._handle(follower, message)
        except (OSError, ValueError, TypeError, ArithmeticError):
            self._selector.unregister(follower)
            with self._changed:
                del self._readers[follower]
                self._ranks.pop(follower, None)
                self._suspended.discard(follower)
                self._changed.notify_all()
            _close(follower)

    def _handle(self, follower: socket.socket, message: Json) -> None:
        with self._changed:
            if "rank" in message:
                self._ranks[follower] = int(message["rank"])
                self._seen_ranks.add(self._ranks[follower])
            if "suspended" in message:
                self._suspended.add(follower)
                self._changed.notify_all()
            if self._rejection is not None:
                _send(follower, {"reject": self._rejection})
            elif self._value is not None and "rank" in message:
                self._send_value(follower, self._value)
        if "request" in message:
            if self._answering >= _MOST_REQUESTS:
                raise ValueError("too many requests at a time")
            self._answering += 1
            # In a thread of its own: the answer may wait in `suspend`, which needs the messages that are read here.
            threading.Thread(target=self._answer, args=(str(message["request"]),), name=__name__, daemon=True).start()

    def _answer(self, request: str) -> None:
        try:
            self._on_request(request)
        finally:
            with self._changed:
                self._answering -= 1


class NodeClient:
    """A connection to the leader, with the value that it has published.

    The leader waits at its end for the connections that are open.
    """

    def __init__(
        self, rank: int, server: str, connection: socket.socket, reader: LineReader, value: Json, pending: list[Json]
    ) -> None:
        """Called by `connect`.

        Args:
            rank: This process's rank.
            server: The token of the server that has sent the value.
            connection: The connection to it.
            reader: Has the part of the next message that has been received.
            value: The published value.
            pending: The messages that were received after the value.
        """
        self.rank = rank
        self.value = value
        self._server = server
        self._connection = connection
        self._reader = reader
        self._pending = pending

    @classmethod
    def connect(cls, name: str, rank: int, deadline: float, publish_timeout_s: float) -> NodeClient:
        """Wait for the server of `name`, and for the value that it publishes.

        Args:
            name: See `NodeServer`. A server that this process has had a value from is ignored: it is ending.
            rank: This process's rank. The server names it in its messages.
            deadline: When the server must listen, in seconds of `time.monotonic`.
            publish_timeout_s: How many seconds after `deadline` a server that listens may publish.

        Raises:
            NodeError: No server listens in time, or it has no value.
        """
        path = _socket_path(name)
        while True:
            # It may not listen yet, or a process that has died may have left its socket.
            with contextlib.suppress(OSError, ValueError):
                return cls._receive_first(rank, _connect(path), deadline + publish_timeout_s)
            if time.monotonic() > deadline:
                raise NodeError("that rank has not opened it, or has ended already")
            time.sleep(_RETRY_S)

    @classmethod
    def _receive_first(cls, rank: int, connection: socket.socket, deadline: float) -> NodeClient:
        try:
            _send(connection, {"rank": rank})
            return cls._await_value(rank, connection, deadline)
        except BaseException:
            _close(connection)
            raise

    @classmethod
    def _await_value(cls, rank: int, connection: socket.socket, deadline: float) -> NodeClient:
        reader = LineReader()
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            messages = reader.read(connection)
            for i, message in enumerate(messages):
                if "reject" in message:
                    raise NodeError(str(message["reject"]))
                if "publish" in message:
                    if message["server"] in _connected.seen_servers:
                        raise ConnectionRefusedError
                    _connected.seen_servers.add(message["server"])
                    connection.settimeout(None)
                    return cls(rank, message["server"], connection, reader, message["publish"], messages[i + 1 :])

    def subscribe(
        self,
        on_publish: Callable[[Json], None],
        on_suspend: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        """Handle the leader's further messages in another thread.

        Args:
            on_publish: Called with the value when it is published again.
            on_suspend: Called when the value must not be used any more. It must not be from the call's return on.
            on_disconnect: Called when the leader has hung up, and after `leave`.
        """
        handlers = {"publish": on_publish, "suspend": lambda _: self._suspend(on_suspend)}
        threading.Thread(
            target=self._receive, args=(handlers, on_disconnect), name="flyteplugins_tracking.node_client", daemon=True
        ).start()

    def request(self, text: str = "") -> None:
        """Request that the leader publishes a value again."""
        _send(self._connection, {"request": text})

    def leave(self, will_return: bool = False) -> None:
        """Hang up: this process is done.

        Args:
            will_return: It could not use the value, and will connect to the same server again.
        """
        if will_return:
            _connected.seen_servers.discard(self._server)
        _close(self._connection)

    def _receive(self, handlers: Mapping[str, Callable[[Any], None]], on_disconnect: Callable[[], None]) -> None:
        messages = self._pending
        with contextlib.suppress(OSError, ValueError):
            while True:
                for message in messages:
                    for name, value in message.items():
                        if name in handlers:
                            handlers[name](value)
                messages = self._reader.read(self._connection)
        on_disconnect()

    def _suspend(self, on_suspend: Callable[[], None]) -> None:
        on_suspend()
        _send(self._connection, {"suspended": True})


class LineReader:
    """Splits what one connection receives into messages."""

    def __init__(self, longest: int = 1 << 28) -> None:
        """Begin with an empty line.

        Args:
            longest: The most bytes of a line.
        """
        self._rest, self._longest = b"", longest

    def read(self, connection: socket.socket) -> list[Json]:
        """Wait for data, and return the messages that are complete.

        Raises:
            OSError: The connection has ended.
            ValueError: A line is not a JSON object, or too long.
        """
        received = connection.recv(1 << 16)
        if not received:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > self._longest:
            raise ValueError(f"a line has more than {self._longest} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line is nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(messages)
        return messages


def _send(connection: socket.socket, message: Json) -> None:
    """Send a message within a second. Otherwise hang up: the other side notices that."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    writable = select.poll()
    try:
        writable.register(connection, select.POLLOUT)
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while data:
            if not writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                # Do not block, whatever mode the socket is in: another thread may be reading from it.
                data = data[connection.send(data, socket.MSG_DONTWAIT) :]
    except (OSError, ValueError):  # the connection has ended
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connect(path: str) -> socket.socket:
    """Connect to the server at `path`.

    Raises:
        OSError: No process of this user listens there.
    """
    connection = _unix_socket()
    try:
        connection.connect(path)
        if not _is_same_user(connection):
            raise ConnectionRefusedError
    except BaseException:
        _close(connection)
        raise
    return connection


def _close(connection: socket.socket) -> None:
    """End the connection. `close` alone would leave it open in children that were forked."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _track(connection: socket.socket) -> socket.socket:
    """Close this socket in children that are forked from now on."""
    _connected.sockets.add(connection)
    return connection


def _unix_socket() -> socket.socket:
    """A new Unix-domain socket."""
    return _track(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def _is_same_user(connection: socket.socket) -> bool:
    """Whether this user's process is at the other end. Only Linux says so; elsewhere the directory's mode decides."""
    if sys.platform != "linux":
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _socket_path(name: str) -> str:
    """The path of the socket with this name. Creates its directory.

    Raises:
        NodeError: There can be no directory for it.
    """
    try:
        directory = socket_directory()
    except OSError as error:
        raise NodeError(f"{error.strerror}. Set TMPDIR to a directory that this user can write to") from error
    return os.path.join(directory, hashlib.sha256(name.encode()).hexdigest()[:32])


def socket_directory() -> Path:
    """The directory for this user's sockets.

    Raises:
        OSError: There can be none.
    """
    return private_directory("sockets", longest=_MAX_PATH - 48)


def _listen(path: str) -> socket.socket:
    """Listen at `path`. Removes the sockets of processes that have died.

    Raises:
        NodeServerExistsError: Another process listens there.
    """
    for stale in _stale_sockets(os.path.dirname(path)):
        with contextlib.suppress(OSError):
            os.unlink(stale)
    if os.path.exists(path):
        raise NodeServerExistsError(f"another process listens at {path}")
    listener = _unix_socket()
    # Bind under another name and rename when it listens: a follower that is refused at `path` has found a dead socket.
    preliminary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(preliminary)
    listener.bind(preliminary)
    listener.listen(socket.SOMAXCONN)
    os.rename(preliminary, path)
    return listener


def _stale_sockets(directory: str) -> Iterator[str]:
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        pid = name.partition(".")[2]
        if pid:
            if not os.path.exists(f"/proc/{pid}"):
                yield path
        elif _is_refused(path):
            yield path


def _is_refused(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
