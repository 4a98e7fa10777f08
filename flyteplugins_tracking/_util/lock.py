"""Locks between the processes of this user on this machine, for one writer per run.

A lock is a POSIX record lock on a file that no other user can open. The system frees it when the process ends, even if
it is killed. Not `flock`, because a forked child would go on holding it. A process loses such a lock when it closes
any descriptor of the file, so each file is opened once. https://man7.org/linux/man-pages/man2/F_GETLK.2const.html
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from flyteplugins_tracking._util.files import open_own, private_directory
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.proc import machine, parent

_POLL_S = 0.1
# struct flock
_REQUEST = struct.Struct("hhqqi4x")


class _Held(PerProcess):
    """The locks that this process holds: the descriptors, by the path of the file."""

    def __init__(self) -> None:
        self.descriptors: dict[Path, int] = {}
        self.changing = threading.RLock()

    def after_fork_in_child(self) -> None:
        """Close the files of the parent, which keeps the locks."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        super().after_fork_in_child()


_held = register(_Held())


class RunLock:
    """A lock by name among this user's processes on this machine."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @classmethod
    def acquire(cls, name: str, timeout_s: float = 0) -> RunLock | None:
        """Acquire the lock of `name`.

        Args:
            name: The name to lock.
            timeout_s: How long to wait for another holder, in seconds. It may be an earlier attempt of this job that is
                ending. This process, its ancestors and its siblings are not waited for.

        Returns:
            None if another process or thread holds the lock. It counts as free where there can be no locks.
        """
        if sys.platform != "linux":
            return cls()
        digest = hashlib.sha256(f"{machine()}\0{name}".encode()).hexdigest()
        try:
            return cls.of_file(private_directory("locks") / digest, timeout_s)
        except OSError:  # the disk is full, or the file system has no locks
            return cls()

    @classmethod
    def of_file(cls, path: Path, timeout_s: float = 0) -> RunLock | None:
        """Acquire the lock of a file of this user's, which is made, and removed at the release. As `acquire`.

        Raises:
            OSError: The file cannot be locked.
        """
        deadline = time.monotonic() + timeout_s
        while (holder := _hold(path)) is not None:
            if time.monotonic() > deadline or _is_family(holder):
                return None
            time.sleep(_POLL_S)
        return cls(path)

    @classmethod
    def is_held(cls, name: str) -> bool:
        """Whether a process or thread holds the lock of `name`."""
        lock = cls.acquire(name)
        if lock is not None:
            lock.release()
        return lock is None

    def release(self) -> None:
        """Release the lock. It does nothing in a forked child: the parent keeps the lock."""
        if self._path is not None:
            _free(self._path)
        self._path = None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file of this user's, which is made and removed, against other processes and threads.

    Raises:
        OSError: The file cannot be locked.
    """
    while _hold(path) is not None:
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        _free(path)


def _hold(path: Path) -> int | None:
    """Lock a file. Returns None, or the process that holds the lock: 0 if it has just ended or is unknown."""
    with _held.changing:
        if path in _held.descriptors:
            return os.getpid()
        while True:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, descriptor):
                    _held.descriptors[path] = descriptor
                    return None
            except (BlockingIOError, PermissionError):
                return _holder(descriptor)
            finally:
                if path not in _held.descriptors:
                    os.close(descriptor)


def _free(path: Path) -> None:
    with _held.changing:
        descriptor = _held.descriptors.pop(path, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is locked: who has opened it looks whether it is still there
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> int:
    with contextlib.suppress(OSError):
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _REQUEST.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        kind, *_, pid = _REQUEST.unpack(answer)
        return 0 if kind == fcntl.F_UNLCK else int(pid)
    return 0


def _is_family(pid: int) -> bool:
    """Whether `pid` is this process, an ancestor or a sibling."""
    ancestors = [os.getpid()]
    while ancestors[-1] > 1:
        ancestors.append(parent(ancestors[-1]))
    return pid > 0 and (pid in ancestors or (pid > 1 and parent(pid) == os.getppid() > 1))
