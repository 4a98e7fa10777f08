"""A follower's end of its connection to the leader of its node: receives the leader's value."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.trackers.peers import sockets
from flyteplugins_tracking.trackers.peers.sockets import Json, LineReader, NodeError


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
        path = sockets.socket_path(name)
        while True:
            # It may not listen yet, or a process that has died may have left its socket.
            with contextlib.suppress(OSError, ValueError):
                return cls._receive_first(rank, sockets.connect(path), deadline + publish_timeout_s)
            if time.monotonic() > deadline:
                raise NodeError("that rank has not opened it, or has ended already")
            time.sleep(sockets.RETRY_S)

    @classmethod
    def _receive_first(cls, rank: int, connection: socket.socket, deadline: float) -> NodeClient:
        try:
            sockets.send(connection, {"rank": rank})
            return cls._await_value(rank, connection, deadline)
        except BaseException:
            sockets.close(connection)
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
                    if message["server"] in sockets.seen_servers:
                        raise ConnectionRefusedError
                    sockets.seen_servers.add(message["server"])
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
        sockets.send(self._connection, {"request": text})

    def leave(self, will_return: bool = False) -> None:
        """Hang up: this process is done.

        Args:
            will_return: It could not use the value, and will connect to the same server again.
        """
        if will_return:
            sockets.seen_servers.discard(self._server)
        sockets.close(self._connection)

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
        sockets.send(self._connection, {"suspended": True})
