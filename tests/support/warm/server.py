"""The process that has imported what jobs need, and forks them: `python server.py SOCKET OWNER_PID`.

A connection asks for one job: a line of JSON, with the job's output as a file descriptor beside it. The answers are its
process id and, when it has ended, its status. The server ends with its owner, the test session.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from support.warm.imports import HiddenModules
from support.warm.program import Forker, Program

MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",  # by DistributedDataParallel, and by Lightning
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "wandb",
    "wandb.proto.wandb_internal_pb2",
    "wandb.sdk.launch",  # by `wandb.init`
    "flytekit",
    "flytekitplugins.kfpytorch",
    "flytekit.bin.entrypoint",
    "mlflow.cli",
    "mlflow.server.fastapi_app",
    "mlflow.store.tracking.sqlalchemy_store",
    "uvicorn.main",
    "sklearn.datasets",
)  # trackio reads its directory from the environment when it is imported; flyte starts a thread
_MOST_BYTES = 1 << 20


def main(path: str, owner: int) -> None:
    faulthandler.enable()  # as PYTHONFAULTHANDLER has it in a cold job
    hidden = HiddenModules()
    hidden.load(MODULES)
    forker = Forker(hidden)
    forker.patch()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # from here on it is found
    Server(forker, listener, os.pidfd_open(owner)).serve()


class Server:
    def __init__(self, forker: Forker, listener: socket.socket, owner: int) -> None:
        self._forker = forker
        self._listener = listener
        self._jobs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, self._end)
        self._ended, wakeup = socket.socketpair()
        self._ended.setblocking(False)
        wakeup.setblocking(False)
        self._selector.register(self._ended, selectors.EVENT_READ, self._reap)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno())
        self._wakeup = wakeup

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        while not data.endswith(b"\n"):
            data += connection.recv(_MOST_BYTES)
        asked: dict[str, Any] = json.loads(data)
        program = Program.of(asked["command"])
        assert program is not None
        files = {0: os.open(os.devnull, os.O_RDONLY), 1: fds[0], 2: fds[-1]}
        pid = self._forker.fork(program, asked["env"], files, asked["cwd"], new_session=True)
        for fd in {*files.values()}:
            os.close(fd)
        self._jobs[pid] = connection
        connection.sendall(b"%d\n" % pid)

    def _reap(self) -> None:
        while True:
            try:
                if not self._ended.recv(512):
                    break
            except BlockingIOError:
                break
        for pid in list(self._jobs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._jobs.pop(pid) as connection, suppress(OSError):  # nobody may wait for it
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        sys.exit()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
