"""Locks between the processes of this user on this machine, for one writer per run.

A lock is an open file description's, on a file that no other user can open. The system frees it when the process ends,
even if it is killed. Not a POSIX lock: a process loses that when it closes any descriptor of the file, as a training
does that copies the directory of its checkpoints. A forked child closes its copy of the description: see `fork`.
https://man7.org/linux/man-pages/man2/F_OFD_SETLK.2const.html
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import sys
import threading
import time
from pathlib import Path

from flyteplugins_tracking._util.files import lock_file, open_own, own_text, private_directory
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.proc import lineage, machine, parent, start_time

# The errors of a file system without locks: Lustre without `flock`, NFS without its lock daemon, some FUSE.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_POLL_S = 0.1
# The most bytes that say who holds a lock.
_LONGEST = 1 << 10


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
        while not _hold(path):
            if time.monotonic() > deadline or _is_family(holder_of(path)):
                return None
            time.sleep(_POLL_S)
        return cls(path)

    @classmethod
    def of_any_file(cls, path: Path) -> RunLock | None:
        """As `of_file`. It counts as free where there can be no locks."""
        try:
            return cls.of_file(path)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return cls()

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


def holder_of(path: Path) -> str:
    """Return who holds the lock of a file, or has held it."""
    return own_text(path, _LONGEST) or "another process"


def _hold(path: Path) -> bool:
    """Lock a file, unless it is locked. Returns whether this call has locked it."""
    with _held.changing:
        while path not in _held.descriptors:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                lock_file(descriptor)
                if _is_at(path, descriptor):
                    with contextlib.suppress(OSError):  # the disk is full
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, _described(os.getpid()).encode(), 0)
                    _held.descriptors[path] = descriptor
                    return True
            except (BlockingIOError, PermissionError):
                return False
            except OSError as error:
                if error.errno in NO_LOCKS:  # nobody holds it, and its file would say so
                    os.unlink(path)
                raise
            finally:
                if path not in _held.descriptors:
                    os.close(descriptor)
        return False


def _free(path: Path) -> None:
    with _held.changing:
        descriptor = _held.descriptors.pop(path, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                if _is_at(path, descriptor):  # its directory may have been moved, and there is another process's file
                    os.unlink(path)  # while it is locked: who has opened it looks whether it is still there
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _described(pid: int) -> str:
    """Return a text that no other process has, on any machine that may see the file."""
    return f"host {os.uname().nodename}, pid {pid}, started {start_time(pid)}"


def _is_family(holder: str) -> bool:
    """Whether the holder of a lock is this process, an ancestor or a sibling."""
    found = re.search(r", pid (\d+),", holder)
    pid = int(found[1]) if found else 0
    if pid <= 0 or holder != _described(pid):
        return False
    return pid in lineage() or (pid > 1 and parent(pid) == os.getppid() > 1)
