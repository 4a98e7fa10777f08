"""The leader's end of a node's connections: publishes one value to the followers, and waits until they are done."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable

from flyteplugins_tracking._util import threads
from flyteplugins_tracking.trackers.peers import sockets
from flyteplugins_tracking.trackers.peers.sockets import Json, LineReader

# What a follower may send: a number or a question a line. A node has a few hundred followers at most.
_LONGEST_LINE = 1 << 20
_MOST_REQUESTS = 500


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
        self._path = sockets.socket_path(name)
        self._listener = sockets.listen(self._path)
        self._token = uuid.uuid4().hex
        self._is_closing = False
        self._answering = 0  # threads
        self._inode = os.stat(self._path).st_ino
        self._start_thread()

    def _start_thread(self) -> None:
        self._waker, self._wakeup = map(sockets.track, socket.socketpair())
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
                sockets.send(follower, {"reject": reason})

    def suspend(self) -> None:
        """Return when the followers have stopped using the value, or after a second. `publish` lets them continue."""
        with self._changed:
            self._value = None
            for follower in self._ranks:
                sockets.send(follower, {"suspend": True})
            self._changed.wait_for(lambda: self._suspended >= self._ranks.keys(), sockets.SEND_TIMEOUT_S)

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> list[int]:
        """Wait until the expected followers have connected and left, `timeout_s` has passed, or `until` returns True.

        Returns:
            The ranks that are still connected.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._ranks or self.missing) and time.monotonic() < deadline and not until():
                self._changed.wait(sockets.RETRY_S)
            return sorted(self._ranks.values())

    @property
    def missing(self) -> int:
        """How many of the expected followers have never connected."""
        return max(0, self._expected - len(self._seen_ranks))

    def close(self) -> None:
        """Hang up on the followers that are connected, and stop listening."""
        self._stop_listening()
        sockets.close(self._waker)
        if threading.current_thread() is not self._thread:
            threads.join(self._thread, sockets.SEND_TIMEOUT_S)
        with self._changed:
            for connection in [*self._readers, self._listener, self._wakeup]:
                sockets.close(connection)
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
        sockets.send(follower, {"publish": value, "server": self._token})

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
                time.sleep(sockets.RETRY_S)
            return
        if not sockets.is_same_user(follower):
            follower.close()
            return
        sockets.track(follower).setblocking(False)
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
            sockets.close(follower)

    def _handle(self, follower: socket.socket, message: Json) -> None:
        with self._changed:
            if "rank" in message:
                self._ranks[follower] = int(message["rank"])
                self._seen_ranks.add(self._ranks[follower])
            if "suspended" in message:
                self._suspended.add(follower)
                self._changed.notify_all()
            if self._rejection is not None:
                sockets.send(follower, {"reject": self._rejection})
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
