"""One writer per run on a machine: a lock that only one live process or thread can hold. It leaves no file behind.

The lock is a socket in Linux's abstract namespace. The name is free again when the process ends, also if it is killed.
https://man7.org/linux/man-pages/man7/unix.7.html
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import sys
import time

from flyteplugins_tracking._util.proc import parent


class RunLock:
    """A lock by name among this user's processes on this machine."""

    def __init__(self, bound: socket.socket | None = None) -> None:
        self._bound = bound

    @classmethod
    def acquire(cls, name: str, timeout_s: float = 0) -> RunLock | None:
        """Acquire the lock of `name`.

        Args:
            name: The name to lock.
            timeout_s: How long to wait for another holder, in seconds. It may be an earlier attempt of this job that is
                ending. This process, its ancestors and its siblings are not waited for.

        Returns:
            None if another process or thread holds the lock. If the holder is unknown, the lock counts as free.
        """
        if sys.platform != "linux":
            return cls()
        digest = hashlib.sha256(name.encode()).hexdigest()
        address = f"\0flyteplugins-tracking/{os.getuid()}/{digest}"
        deadline = time.monotonic() + timeout_s
        while True:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.bind(address)
                bound.listen()
                return cls(bound)
            except OSError as error:
                bound.close()
                if error.errno != errno.EADDRINUSE:
                    return cls()
            if time.monotonic() > deadline or _is_family(_holder(address)):
                return None
            time.sleep(0.1)

    def release(self) -> None:
        """Release the lock. In a forked child, close only its copy: the parent keeps the lock."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None


def _holder(address: str) -> int:
    """Return the process that holds the lock; 0 if it has just ended or is unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return 0
        return int(pid)


def _is_family(pid: int) -> bool:
    """Whether `pid` is this process, an ancestor or a sibling."""
    ancestors = [os.getpid()]
    while ancestors[-1] > 1:
        ancestors.append(parent(ancestors[-1]))
    return pid in ancestors or (pid > 1 and parent(pid) == os.getppid() > 1)
