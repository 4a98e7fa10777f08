"""A node's leader and followers, for `test_node_connections.py`. Arguments: a function's name, and its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time

from flyteplugins_tracking.trackers.node_group import NodeClient, NodeServer

PATIENCE_S = 120
ENDLESS_S = 600  # longer than any test waits


def follower(name: str, rank: str) -> None:
    """Join, print what comes, and do what each line of the input says.

    "writes", "read", "leave", "ask" with a question, "join" again.
    """
    joined = join(name, int(rank))
    joined.subscribe(
        on_publish=lambda value: print("offered", value, flush=True),
        on_suspend=lambda: print("paused", flush=True),
        on_disconnect=lambda: print("gone", flush=True),
    )
    print("value", joined.value, flush=True)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command in ("writes", "read"):
            joined.tell_read(command == "read")
        elif command == "leave":
            joined.leave()
        elif command == "ask":
            joined.request(rest) if rest else joined.request()
        elif command == "join":
            print(join(name, int(rank)).value, flush=True)


def join(name: str, rank: int) -> NodeClient:
    return NodeClient.connect(name, rank, time.monotonic() + PATIENCE_S, PATIENCE_S)


def dies(*names: str) -> None:
    """The leader of these names ends without closing."""
    _servers = [NodeServer(name, on_request=lambda _: None) for name in names]
    os._exit(0)


def forks(name: str) -> None:
    """The leader prints its forked child's process id, and kills itself at a line of input; the child lives on."""
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({})
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(ENDLESS_S,))
    worker.start()
    print(worker.pid, flush=True)
    input()
    os.kill(os.getpid(), signal.SIGKILL)


def another_user(path: str) -> None:
    """Ask the leader at this socket as the user nobody, and print its answer."""
    os.setuid(65534)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    try:
        connection.sendall(b'{"rank": 1}\n')
        print(connection.recv(100))
    except OSError:
        print(b"")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
