"""One writer per run on a machine: a claim that no other live process or thread can take. It leaves nothing behind.

It is a socket bound in Linux's abstract namespace: the name is free again when the process ends, however it ends.
https://man7.org/linux/man-pages/man7/unix.7.html
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys


class Claim:
    """A name that this process alone has."""

    def __init__(self, bound: socket.socket | None = None) -> None:
        self._bound = bound

    @classmethod
    def take(cls, name: str) -> Claim | None:
        """Claim `name` among this user's processes here; None where another has it. Where none can tell, nobody has."""
        if sys.platform != "linux":
            return cls()
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        digest = hashlib.sha256(name.encode()).hexdigest()
        try:
            bound.bind(f"\0flyteplugins-tracking/{os.getuid()}/{digest}")
        except OSError as error:
            bound.close()
            return None if error.errno == errno.EADDRINUSE else cls()
        return cls(bound)

    def release(self) -> None:
        """Give the name back; in a forked child, which has a copy, leave it to the parent."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
