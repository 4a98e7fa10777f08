"""One writer per run on a machine: a claim that no other live process or thread can take. It leaves nothing behind.

It is a socket bound in Linux's abstract namespace: the name is free again when the process ends, however it ends.
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
    """A name that this process alone has."""

    def __init__(self, bound: socket.socket | None = None) -> None:
        self._bound = bound

    @classmethod
    def acquire(cls, name: str, timeout_s: float = 0) -> RunLock | None:
        """Lock `name` among this user's processes here.

        Args:
            name: What to claim.
            timeout_s: How long a holder is waited for that may be an earlier attempt of this job at its end: one that
                is neither this process, nor an ancestor or a sibling of it.

        Returns:
            None where another has it. Where none can tell, nobody has.
        """
        if sys.platform != "linux":
            return cls()
        digest = hashlib.sha256(name.encode()).hexdigest()
        address = f"\0flyteplugins-tracking/{os.getuid()}/{digest}"
        until = time.monotonic() + timeout_s
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
            if time.monotonic() > until or _is_family(_holder(address)):
                return None
            time.sleep(0.1)

    def release(self) -> None:
        """Give the name back; in a forked child, which has a copy, leave it to the parent."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None


def _holder(address: str) -> int:
    """The process that has the name; 0 where it has just gone or cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(address)
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return 0
        return int(pid)


def _is_family(pid: int) -> bool:
    """Whether `pid` is this process, an ancestor or a sibling."""
    ancestors = [os.getpid()]
    while ancestors[-1] > 1:
        ancestors.append(parent(ancestors[-1]))
    return pid in ancestors or (pid > 1 and parent(pid) == os.getppid() > 1)
