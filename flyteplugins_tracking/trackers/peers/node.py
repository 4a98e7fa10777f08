"""What one process of a node hands to its neighbours, and how it learns when each of them is done.

The host listens on a Unix-domain socket in a directory that only this user can enter. A guest's open connection means
"still there", and its end, also by SIGKILL, means done. Each message is one line of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import selectors
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]

# sun_path of unix(7), with its end.
_MAX_PATH = 107
_RETRY_S = 0.05
# A guest that is stopped does not keep the host's end waiting.
_PAUSE_S = 1.0

# The hosts that this process has been a guest of.
_met: set[str] = set()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class HandoverError(Exception):
    """There is nothing to be had: the text says why."""


class HostExistsError(HandoverError):
    """Another process is the host of this name."""


class Host:
    """Hands one value to the guests that come."""

    def __init__(self, name: str, ask: Callable[[str], None], expected: int = 0) -> None:
        """Listen under `name`.

        Args:
            name: The same for host and guests.
            ask: Called, in a thread of its own, when a guest wants to be offered a value anew, with what it says.
            expected: How many guests are to come.

        Raises:
            HostExistsError: Another process has the name.
            HandoverError: The directory is not this user's own.
        """
        self._ask = ask
        self._value: Json | None = None
        self._refusal: str | None = None
        self._guests: dict[socket.socket, _Lines] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._expected = expected
        self._come: set[int] = set()
        self._paused: set[socket.socket] = set()
        self._changed = threading.Condition(threading.RLock())
        self._path = _path(name)
        self._listener = _listening(self._path)
        self._token = uuid.uuid4().hex
        self._has_withdrawn = False
        self._inode = os.stat(self._path).st_ino
        self._waker, self._woken = _pair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="flyteplugins_tracking.handover", daemon=True)
        self._thread.start()

    def offer(self, value: Json) -> None:
        """Hand `value` to the guests that are there, and to those that come."""
        with self._changed:
            self._value, self._paused = value, set()
            for guest in self._ranks:
                _send(guest, {"offer": value, "host": self._token})

    def refuse(self, reason: str) -> None:
        """Tell the guests, now and later, that there is nothing to be had."""
        with self._changed:
            self._refusal = reason
            for guest in self._ranks:
                _send(guest, {"refusal": reason})

    def pause(self) -> None:
        """Return when the guests use the value no more, until it is offered again: within a second."""
        with self._changed:
            self._value = None
            for guest in self._ranks:
                _send(guest, {"pause": True})
            self._changed.wait_for(lambda: self._paused >= self._ranks.keys(), _PAUSE_S)

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> list[int]:
        """Wait for the expected guests to come and leave, at most `timeout_s` seconds and at most `until` holds.

        Returns:
            The ranks that are still there.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while (self._ranks or self.missing) and time.monotonic() < end and not until():
                self._changed.wait(_RETRY_S)
            return sorted(self._ranks.values())

    @property
    def missing(self) -> int:
        """How many guests have never come."""
        return max(0, self._expected - len(self._come))

    def close(self) -> None:
        """Leave the guests that are there."""
        self._withdraw()
        _close(self._waker)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PAUSE_S)
        with self._changed:
            for one in [*self._guests, self._listener, self._woken]:
                _close(one)
        if not self._thread.is_alive():
            self._selector.close()

    def _withdraw(self) -> None:
        self._has_withdrawn = True
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
            # What has connected and was not accepted yet comes back to the next host.
            self._listener.shutdown(socket.SHUT_RDWR)

    # In the thread

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                if one is self._woken:
                    return
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._accept()
                else:
                    self._read(one)

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:
            if self._has_withdrawn:
                self._selector.unregister(self._listener)
            else:  # too many open files, perhaps
                time.sleep(_RETRY_S)
            return
        if not _is_this_user(guest):
            guest.close()
            return
        _sockets.add(guest)
        guest.setblocking(False)
        with self._changed:
            self._guests[guest] = _Lines()
        self._selector.register(guest, selectors.EVENT_READ)

    def _read(self, guest: socket.socket) -> None:
        try:
            messages = self._guests[guest].messages(guest)
            for message in messages:
                self._take(guest, message)
        except (OSError, ValueError, TypeError):
            self._selector.unregister(guest)
            with self._changed:
                del self._guests[guest]
                self._ranks.pop(guest, None)
                self._paused.discard(guest)
                self._changed.notify_all()
            _close(guest)

    def _take(self, guest: socket.socket, message: Json) -> None:
        with self._changed:
            if "rank" in message:
                self._ranks[guest] = int(message["rank"])
                self._come.add(self._ranks[guest])
            if "paused" in message:
                self._paused.add(guest)
                self._changed.notify_all()
            if self._refusal is not None:
                _send(guest, {"refusal": self._refusal})
            elif self._value is not None and "rank" in message:
                _send(guest, {"offer": self._value, "host": self._token})
        if "ask" in message:
            # In a thread of its own: the answer may wait for a pause, which waits for what guests say here.
            asking = threading.Thread(target=self._ask, args=(str(message["ask"]),), name=__name__, daemon=True)
            asking.start()


class Guest:
    """What a host has handed to this process. While it is open the host waits for it at its end."""

    def __init__(
        self, rank: int, host: str, connection: socket.socket, lines: _Lines, value: Json, further: list[Json]
    ) -> None:
        self.rank = rank
        self.value = value
        self._host = host
        self._connection = connection
        self._lines = lines
        self._further = further

    @classmethod
    def join(cls, name: str, rank: int, deadline: float, patience_s: float) -> Guest:
        """Wait for the host of `name`, and for what it hands over.

        Args:
            name: See `Host`. A host that this process has met already is not the one: it is at its end.
            rank: This process's rank, for the host's messages.
            deadline: When the host must be there, in seconds of `time.monotonic`.
            patience_s: How many seconds longer a host may take that is there.

        Raises:
            HandoverError: It has not come, or has nothing.
        """
        path = _path(name)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _sockets.add(connection)
            try:
                connection.connect(path)
                if not _is_this_user(connection):
                    raise ConnectionRefusedError
                _send(connection, {"rank": rank})
                return cls._first_offer(rank, connection, deadline + patience_s)
            except (OSError, ValueError):  # it is not there yet, or there is what a dead one has left
                _close(connection)
            except BaseException:
                _close(connection)
                raise
            if time.monotonic() > deadline:
                raise HandoverError("it has not, or has ended already")
            time.sleep(_RETRY_S)

    @classmethod
    def _first_offer(cls, rank: int, connection: socket.socket, deadline: float) -> Guest:
        lines = _Lines()
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            messages = lines.messages(connection)
            for i, message in enumerate(messages):
                if "refusal" in message:
                    raise HandoverError(str(message["refusal"]))
                if "offer" in message:
                    if message["host"] in _met:
                        raise ConnectionRefusedError
                    _met.add(message["host"])
                    connection.settimeout(None)
                    return cls(rank, message["host"], connection, lines, message["offer"], messages[i + 1 :])

    def listen(self, offered: Callable[[Json], None], paused: Callable[[], None], gone: Callable[[], None]) -> None:
        """Have the host's further messages taken by these, in another thread.

        Args:
            offered: Takes the value, when it is offered again.
            paused: The value must not be used from its return on.
            gone: The host has left, and so it has when `leave` is called.
        """
        takers = {"offer": offered, "pause": lambda _: self._pause(paused)}
        threading.Thread(
            target=self._listen, args=(takers, gone), name="flyteplugins_tracking.handover", daemon=True
        ).start()

    def ask(self, question: str = "") -> None:
        """Ask the host to offer a value again."""
        _send(self._connection, {"ask": question})

    def leave(self, comes_back: bool = False) -> None:
        """Tell the host that this process is done; or that it has what it cannot use, and joins again."""
        if comes_back:
            _met.discard(self._host)
        _close(self._connection)

    def _listen(self, takers: Mapping[str, Callable[[Any], None]], gone: Callable[[], None]) -> None:
        messages = self._further
        with contextlib.suppress(OSError, ValueError):
            while True:
                for message in messages:
                    for name, value in message.items():
                        takers.get(name, lambda _: None)(value)
                messages = self._lines.messages(self._connection)
        gone()

    def _pause(self, paused: Callable[[], None]) -> None:
        paused()
        _send(self._connection, {"paused": True})


class _Lines:
    """The lines that come in on one connection."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, connection: socket.socket) -> list[Json]:
        """What has come, once something has.

        Raises:
            OSError: The connection has ended.
            ValueError: This is no message.
        """
        received = connection.recv(1 << 16)
        if not received:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + received).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(messages)
        return messages


def _send(connection: socket.socket, message: Json) -> None:
    """Send it, within a second; else hang up, which the other side notices."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    writable = select.poll()
    try:
        writable.register(connection, select.POLLOUT)
        end = time.monotonic() + _PAUSE_S
        while data:
            if not writable.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                # Whatever mode the socket is in: another thread may be reading from it.
                data = data[connection.send(data, socket.MSG_DONTWAIT) :]
    except (OSError, ValueError):  # it has ended
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _close(connection: socket.socket) -> None:
    """End it: `close` alone would leave it open in children that were forked."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    _sockets.update(pair)
    return pair


def _is_this_user(connection: socket.socket) -> bool:
    """Where the system does not tell, the directory's mode has to do."""
    if sys.platform != "linux":
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _path(name: str) -> str:
    return os.path.join(_directory(), hashlib.sha256(name.encode()).hexdigest()[:32])


def _directory() -> str:
    """A directory of this user's, which nobody else can enter."""
    path = place()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    problem = problem_of(path)
    if problem is not None:
        raise HandoverError(f"{problem}. Remove it, or set TMPDIR to another directory")
    return path


def place() -> str:
    """Where this user's directory of sockets is, or will be."""
    own = f"flyteplugins-tracking-{os.geteuid()}"
    path = os.path.join(tempfile.gettempdir(), own)
    return path if len(path) + 48 <= _MAX_PATH else os.path.join("/tmp", own)  # noqa: S108 it is looked at


def problem_of(path: str) -> str | None:
    """Why a directory that is there may not be used for sockets; None where it may."""
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return None
    return (
        f"{path} is not a directory of this user's that nobody else can enter (owner {found.st_uid}, mode "
        f"{stat.S_IMODE(found.st_mode):o})"
    )


def _listening(path: str) -> socket.socket:
    """A socket that listens at `path`, in place of what a dead job has left there."""
    for stale in _stale_sockets(os.path.dirname(path)):
        with contextlib.suppress(OSError):
            os.unlink(stale)
    if os.path.exists(path):
        raise HostExistsError(f"another process listens at {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _sockets.add(listener)
    # Under its name it listens, from the first moment on: a guest that is refused has met a dead one.
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
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)
            try:
                asking.connect(path)
            except ConnectionRefusedError:
                yield path
            except OSError:
                continue


def _forget_the_parents() -> None:
    """In a forked child: its copies would keep connections open that the parent's end must end."""
    for one in list(_sockets):
        with contextlib.suppress(OSError):
            one.close()
    _met.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
