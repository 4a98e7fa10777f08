"""The Unix-domain sockets of a node's leader and followers: where they are, who may connect, and how a line is sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import private_directory
from flyteplugins_tracking._util.proc import after_fork_in_child

Json = Mapping[str, Any]

# The longest path of a socket, without the final zero: sun_path in unix(7).
_MAX_PATH = 107
# How long a process that does not read may delay the sender.
SEND_TIMEOUT_S = 1.0
RETRY_S = 0.05

# The tokens of the servers that this process has received a value from.
seen_servers: set[str] = set()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class NodeError(Exception):
    """A follower cannot get the leader's value. The text says why."""


class NodeServerExistsError(NodeError):
    """Another process is the server of this name."""


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


def send(connection: socket.socket, message: Json) -> None:
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


def connect(path: str) -> socket.socket:
    """Connect to the server at `path`.

    Raises:
        OSError: No process of this user listens there.
    """
    connection = unix_socket()
    try:
        connection.connect(path)
        if not is_same_user(connection):
            raise ConnectionRefusedError
    except BaseException:
        close(connection)
        raise
    return connection


def close(connection: socket.socket) -> None:
    """End the connection. `close` alone would leave it open in children that were forked."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def track(connection: socket.socket) -> socket.socket:
    """Close this socket in children that are forked from now on."""
    _sockets.add(connection)
    return connection


def unix_socket() -> socket.socket:
    """A new Unix-domain socket."""
    return track(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def is_same_user(connection: socket.socket) -> bool:
    """Whether this user's process is at the other end. Only Linux says so; elsewhere the directory's mode decides."""
    if sys.platform != "linux":
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def socket_path(name: str) -> str:
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


def listen(path: str) -> socket.socket:
    """Listen at `path`. Removes the sockets of processes that have died.

    Raises:
        NodeServerExistsError: Another process listens there.
    """
    for stale in _stale_sockets(os.path.dirname(path)):
        with contextlib.suppress(OSError):
            os.unlink(stale)
    if os.path.exists(path):
        raise NodeServerExistsError(f"another process listens at {path}")
    listener = unix_socket()
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


@after_fork_in_child
def _close_parents_sockets() -> None:
    """Close the parent's connections: copies in a child would keep them open after the parent's end."""
    for connection in list(_sockets):
        with contextlib.suppress(OSError):
            connection.close()
    seen_servers.clear()
