"""The ranks of one node that share a run: which of them opens it, and the connection by which the others attach to it.

The messages on a node's socket. Each is one line of JSON, an object with these keys:

```
follower to leader                  leader to follower
rank: 1           "I am here"       publish: {...}, server: "..."   the value to use, and which server sent it
request: "..."    "publish again"   reject: "why"                   there is no value, and there will be none
suspended: true   "I have stopped"  suspend: true                   stop using the value until the next `publish`
read: false       "I write"; true: "all that I have written was read"
```

The end of a connection is a message too: a follower that hangs up is done, a leader that hangs up has gone. The kernel
hangs up for a process that is killed. `flyteplugins_tracking.trackers.wandb.shared` draws the order of the messages.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.files import private_directory
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking.trackers.base import RunRequest

logger = logging.getLogger(__name__)
Json = Mapping[str, Any]

# The longest path of a socket, without the final zero: sun_path in unix(7).
_MAX_PATH = 107
# How long a process that does not read may delay the sender.
SEND_TIMEOUT_S = 1.0
_RETRY_S = 0.05

# What a follower may send is a number or a question, and the leader's value may be large. In bytes.
_LONGEST_QUESTION, _LONGEST_VALUE = 1 << 20, 1 << 28
# What a message raises that says something else than expected, and what a connection or a new thread may raise.
_MALFORMED = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)
# A node has a few hundred followers at most.
_MOST_CONNECTIONS = _MOST_REQUESTS = 500


class _SeenServers(PerProcess):
    """The tokens of the servers that this process has received a value from."""

    def __init__(self) -> None:
        self.tokens: set[str] = set()


_seen_servers = register(_SeenServers())


class NodeError(Exception):
    """A follower cannot get the leader's value. The text says why."""


class NodeServerExistsError(NodeError):
    """Another process is the server of this name."""


@dataclass(frozen=True)
class NodePart:
    """A rank's part among the ranks that share its run.

    Attributes:
        name: "leader": opens the run for itself and the other ranks of its node. It is the primary on the primary's
            node, and local rank 0 on the others. "follower": attaches to the leader's.
            "single": is the only rank of its node, or the ranks of its node are unknown.
        has_writers_elsewhere: Whether other nodes, ranks whose node is unknown, or tasks open the run too, now or
            later.
    """

    name: Literal["single", "leader", "follower"] = "single"
    has_writers_elsewhere: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> NodePart:
        """The part of the rank that opens this run."""
        config, info = request.config, request.info
        if info is None:
            return cls(has_writers_elsewhere=request.has_other_writers)
        if config.run_mode != "shared":
            return cls(has_writers_elsewhere=config.has_roles)
        if info.worker_index is None or info.local_rank is None:
            return cls(has_writers_elsewhere=True)
        # An elastic job with one node today may have had several: all writers of a run must be of one kind.
        has_writers_elsewhere = config.rank_scope == "global" and (info.num_workers != 1 or request.has_other_writers)
        if not request.leads_node:
            return cls("follower", has_writers_elsewhere)
        return cls("single" if info.local_world_size == 1 else "leader", has_writers_elsewhere)


class NodeServer:
    """Publishes a value to the followers that connect.

    Attributes:
        on_request: See `__init__`. It may be replaced.
    """

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
        self.on_request = on_request
        self._message: Json | None = None  # what followers get when they connect
        self._expected = expected
        self._connections: set[_Connection] = set()
        self._seen_ranks: set[int] = set()
        self._unread: set[int] = set()  # the ranks that may have written something that was not read
        self._answering = 0  # threads
        self._changed = threading.Condition(threading.RLock())
        self._token = uuid.uuid4().hex
        self._path = _socket_path(name)
        self._listener = _Connection(_listen(self._path))
        self._is_closing = False
        self._thread = _started(self._accept)

    def publish(self, value: Json) -> None:
        """Send `value` to the followers that are connected, and to those that connect later."""
        with self._changed:
            self._message = {"publish": value, "server": self._token}
            for connection in self._followers:
                connection.is_suspended = False
                connection.send(self._message)

    def reject(self, reason: str) -> None:
        """Tell the followers, now and later, that there will be no value."""
        with self._changed:
            self._message = {"reject": reason}
            for connection in self._followers:
                connection.send(self._message)

    def suspend(self) -> None:
        """Return when the followers have stopped using the value, or after a second. `publish` lets them continue."""
        with self._changed:
            self._message = None
            for connection in self._followers:
                connection.send({"suspend": True})
            self._changed.wait_for(
                lambda: all(connection.is_suspended for connection in self._followers), SEND_TIMEOUT_S
            )

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> list[int]:
        """Wait until the expected followers have connected and left, `timeout_s` has passed, or `until` returns True.

        Returns:
            The ranks that are still connected.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._followers or self.missing) and time.monotonic() < deadline and not until():
                self._changed.wait(_RETRY_S)
            return sorted(connection.rank for connection in self._followers if connection.rank is not None)

    @property
    def unread(self) -> list[int]:
        """The followers that have written something, and have not said since that all was read."""
        with self._changed:
            return sorted(self._unread)

    def forget_unread(self) -> None:
        """Take all that the followers have written for read: the leader has found it elsewhere."""
        with self._changed:
            self._unread.clear()

    @property
    def missing(self) -> int:
        """How many of the expected followers have never connected."""
        return max(0, self._expected - len(self._seen_ranks))

    def close(self) -> None:
        """Hang up on the followers that are connected, and stop listening."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._listener.hang_up()  # a follower that was not accepted yet will connect to the next server
        if threading.current_thread() is not self._thread:
            threads.join(self._thread, SEND_TIMEOUT_S)
        with self._changed:
            for connection in self._connections:
                connection.hang_up()

    @property
    def _followers(self) -> list[_Connection]:
        """Those that have said who they are."""
        return [connection for connection in self._connections if connection.rank is not None]

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                connection = self._listener.accept()
            except OSError:  # there may be too many open files
                time.sleep(_RETRY_S)
                continue
            try:
                _started(self._serve, connection)
            except RuntimeError:  # there may be too many threads
                connection.hang_up()

    def _serve(self, connection: _Connection) -> None:
        """Handle what one follower sends, until it hangs up or sends no valid message."""
        with contextlib.suppress(Exception):  # it says no number, for one
            with self._changed:
                if self._is_closing or len(self._connections) >= _MOST_CONNECTIONS or not connection.is_of_this_user():
                    raise ConnectionRefusedError
                self._connections.add(connection)
            for message in connection.messages(_LONGEST_QUESTION):
                with self._changed:
                    self._handle(connection, message)
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()
        connection.hang_up()

    def _handle(self, connection: _Connection, message: Json) -> None:
        if "rank" in message:
            connection.rank = int(message["rank"])
            if len(self._seen_ranks) < _MOST_CONNECTIONS:
                self._seen_ranks.add(connection.rank)
            if self._message is not None:
                connection.send(self._message)
        if "read" in message and connection.rank in self._seen_ranks:
            (self._unread.discard if message["read"] else self._unread.add)(connection.rank)
        if "suspended" in message:
            connection.is_suspended = True
            self._changed.notify_all()
        if "request" in message:
            if self._answering >= _MOST_REQUESTS:
                raise ValueError("too many requests at a time")
            # In a thread of its own: the answer may wait in `suspend`, which needs the messages that are read here.
            _started(self._answer, str(message["request"]))
            self._answering += 1

    def _answer(self, request: str) -> None:
        try:
            self.on_request(request)
        finally:
            with self._changed:
                self._answering -= 1


class NodeClient:
    """A connection to the leader, with the value that it has published.

    The leader waits at its end for the connections that are open.
    """

    def __init__(self, rank: int, connection: _Connection, messages: Iterator[Json], published: Json) -> None:
        """Called by `connect`.

        Args:
            rank: This process's rank.
            connection: The connection to the server.
            messages: The messages that follow.
            published: The first message with a value.
        """
        self.rank = rank
        self.value: Json = published["publish"]
        self._connection, self._messages = connection, messages

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
            with contextlib.suppress(*_MALFORMED):
                connection = _Connection(socket.socket(socket.AF_UNIX))
                try:
                    return cls._receive_first(rank, connection, path, deadline + publish_timeout_s)
                except BaseException:
                    connection.hang_up()
                    raise
            if time.monotonic() > deadline:
                raise NodeError("that rank has not opened it, or has ended already")
            time.sleep(_RETRY_S)

    @classmethod
    def _receive_first(cls, rank: int, connection: _Connection, path: str, deadline: float) -> NodeClient:
        connection.connect(path)
        connection.send({"rank": rank})
        messages = connection.messages(_LONGEST_VALUE, deadline)
        for message in messages:
            if "reject" in message:
                raise NodeError(str(message["reject"]))
            if "publish" in message:
                if message["server"] in _seen_servers.tokens:
                    break
                _seen_servers.tokens.add(message["server"])
                return cls(rank, connection, messages, message)
        raise ConnectionRefusedError

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
        _started(self._receive, on_publish, on_suspend, on_disconnect)

    def request(self, text: str = "") -> None:
        """Request that the leader publishes a value again."""
        self._connection.send({"request": text})

    def tell_read(self, is_read: bool) -> None:
        """Tell the leader that all that this process has written was read, or that it writes something now."""
        self._connection.send({"read": is_read})

    def leave(self) -> None:
        """Hang up: this process is done."""
        self._connection.hang_up()

    def _receive(
        self, on_publish: Callable[[Json], None], on_suspend: Callable[[], None], on_disconnect: Callable[[], None]
    ) -> None:
        try:
            for message in self._messages:
                if "publish" in message:
                    on_publish(message["publish"])
                if "suspend" in message:
                    on_suspend()
                    self._connection.send({"suspended": True})
        except _MALFORMED:
            logger.debug("a message of the leader cannot be used", exc_info=True)
        finally:
            on_disconnect()


class _Connection(PerProcess):
    """A Unix-domain socket to a process of this user. A message is a line of JSON, an object.

    Attributes:
        rank: The rank that the other side has said to be.
        is_suspended: Whether it has said that it does not use the value.
    """

    rank: int | None = None
    is_suspended = False

    def __init__(self, unix_socket: socket.socket) -> None:
        self._socket = unix_socket
        unix_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(SEND_TIMEOUT_S), 0))
        self._sending = threading.Lock()
        register(self)

    def after_fork_in_child(self) -> None:
        """Close the parent's connection: a copy in a child would keep it open after the parent's end."""
        with contextlib.suppress(OSError):  # it is closed
            os.close(self._socket.detach())

    def accept(self) -> _Connection:
        """Return the next connection to this socket, which listens.

        Raises:
            OSError: There is none.
        """
        return _Connection(self._socket.accept()[0])

    def connect(self, path: str) -> None:
        """Connect to the server at a path.

        Raises:
            OSError: No process of this user listens there.
        """
        self._socket.connect(path)
        if not self.is_of_this_user():
            raise ConnectionRefusedError

    def is_of_this_user(self) -> bool:
        """Whether a process of this user is at the other end. Elsewhere than on Linux, the directory's mode decides."""
        if sys.platform != "linux":
            return True
        _, uid, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return bool(uid == os.geteuid())

    def messages(self, longest: int, deadline: float | None = None) -> Iterator[Json]:
        """Yield what is received, until the other side hangs up.

        Args:
            longest: The most bytes of a message.
            deadline: When the first message must have been received, in seconds of `time.monotonic`; None for no limit.

        Raises:
            OSError: The connection has failed, or the time is up.
            ValueError: A line is not a JSON object, or too long.
        """
        self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        with self._socket.makefile("rb") as lines:
            while line := lines.readline(longest + 1):
                yield _parsed(line)
                self._socket.settimeout(None)

    def send(self, message: Json) -> None:
        """Send a message within a second. Otherwise hang up: the other side notices that."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError):  # the connection has ended
            self.hang_up()

    def hang_up(self) -> None:
        """End the connection. `close` alone would leave it open in children that were forked."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _parsed(line: bytes) -> Json:
    if not line.endswith(b"\n"):
        raise ValueError("a line is too long, or cut off")
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a line is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(message)
    return message


def _started(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="flyteplugins_tracking.node_group", daemon=True)
    thread.start()
    return thread


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
    for dead in filter(_is_refused, Path(path).parent.iterdir()):
        dead.unlink(missing_ok=True)
    if os.path.exists(path):
        raise NodeServerExistsError(f"another process listens at {path}")
    listener = socket.socket(socket.AF_UNIX)
    # Bind under another name and rename when it listens: a follower that is refused at `path` has found a dead socket.
    preliminary = f"{path}.{os.getpid()}"
    listener.bind(preliminary)
    listener.listen(socket.SOMAXCONN)
    try:
        os.rename(preliminary, path)
    except FileNotFoundError:  # another process has taken it for a dead one, before it listened
        listener.close()
        return _listen(path)
    return listener


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
