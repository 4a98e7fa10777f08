"""Ask the server for jobs. It is started when the first is asked for, and ends with the test session."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.warm.program import Program

_START_S = 120
# Where the kernel reads a process's command line and environment: as long as the server's own.
_ROOM = 96 * 1024


class WarmProcess:
    """A job of the server's, with what tests use of `subprocess.Popen`.

    Attributes:
        args: The command line.
        pid: The process's id. It is the server's child.
        returncode: Its status as `Popen` has it; None while it runs.
        stdout: What it and its children write, as text.
    """

    def __init__(self, connection: socket.socket, pid: int, output: int, command: Sequence[str]) -> None:
        self._connection = connection
        self._read: list[bytes] = []
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """The status, if it has ended."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It runs still, after `timeout` seconds.
        """
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output, when that is closed and the process has ended; called again after a timeout, nothing is lost.

        Raises:
            subprocess.TimeoutExpired: That is not so after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self.stdout.closed:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0, b"".join(self._read))
            data = os.read(self.stdout.fileno(), 65_536)
            self._read.append(data)
            if not data:
                self.stdout.close()
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return b"".join(self._read).decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # as with Popen: it may end just then
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            told = self._connection.recv(64)
            self.returncode = int(told) if told else -signal.SIGKILL  # the server has ended, and has killed it
            self._connection.close()
        return self.returncode


def start(command: Sequence[str], cwd: Path, env: Mapping[str, str], log: int | None) -> WarmProcess | None:
    """Start a job; None where the command cannot be forked, or outside pytest, which has the server."""
    if "TESTS_WARM_DIR" not in os.environ or Program.of(command) is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(_server())
    reader, writer = os.pipe()
    if log is not None:
        os.dup2(log, writer)
    asked = json.dumps({"command": list(command), "cwd": str(cwd), "env": dict(env)}).encode() + b"\n"
    socket.send_fds(connection, [asked[:1]], [writer])
    connection.sendall(asked[1:])
    os.close(writer)
    pid = int(connection.recv(64))
    return WarmProcess(connection, pid, reader, list(command))


def _server() -> str:
    """The path of the server's socket; the first worker of the session to come here starts it."""
    directory, owner = Path(os.environ["TESTS_WARM_DIR"]), os.environ["TESTS_WARM_OWNER"]
    path = directory / "socket"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start(path, owner)
    return str(path)


def _start(path: Path, owner: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    # Directories that imported modules make last as long as the server, not as long as the worker that starts it.
    env |= {
        "TMPDIR": str(path.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # As in a pod, flytekit does not wrap what it logs: it looks when it is imported.
        "FLYTE_SDK_RICH_TRACEBACKS": "0",
        # A process that forks must have no other thread, which may hold a lock: pyarrow's allocator starts one.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    env["ROOM"] = "x" * _ROOM
    # A pipe, as a job's output is one: what has been read of a file's position is kept by sys.stdout.
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("server.py"), path, owner, "x" * _ROOM],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + _START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise RuntimeError(f"the server of warm jobs did not start: {process.communicate()[0]}")
        time.sleep(0.02)
