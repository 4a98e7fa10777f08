"""Files: where those lie that only this user's processes read, whether one is this user's, and how one is kept whole.

Other users of the machine can make any name in the temporary directory first: a directory, a link to the user's files,
a FIFO that nobody writes to. So a name counts only if it is a directory of this user that nobody else can enter, and a
file only if it is a regular one of this user. Otherwise the next name is used. It raises an OSError at most.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import math
import os
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)
_NAME = "flyteplugins_tracking"
# struct flock, of a whole file
_REQUEST = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
# How many names are tried in a directory in which others may have made them.
_NAMES = 10


def private_directory(*parts: str, on_disk: bool = False, is_of_machine: bool = False) -> Path:
    """Return a directory that only this user can enter. Makes it if it is missing.

    Processes of this user on this machine that have the same environment get the same one, unless other users have
    made all names.

    Args:
        *parts: Its path in the user's private directory.
        on_disk: Whether it may get more than `XDG_RUNTIME_DIR` has room for, which is in memory.
        is_of_machine: Whether all processes must get the same one, whatever their variables: it is in /tmp.

    Raises:
        OSError: There is no such directory, and none can be made.
    """
    for top in _candidates(on_disk, is_of_machine):
        if all(_is_made(level) for level in (top, *(top.joinpath(*parts[: end + 1]) for end in range(len(parts))))):
            return top.joinpath(*parts)
    raise OSError(errno.EACCES, f"{tempfile.gettempdir()}, /tmp and the home directory cannot have a private directory")


def _candidates(on_disk: bool, is_of_machine: bool) -> Iterator[Path]:
    """Yield the names of the user's private directory, in the order in which all its processes try them."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "-")
    # After `su`, it is the other user's. On a compute node, it may come and go with a login of the user.
    if not (on_disk or is_of_machine) and runtime.is_absolute() and is_private(runtime):
        yield runtime / _NAME
    user = f"{_NAME}-{os.geteuid()}"
    places = ("/tmp",) if is_of_machine else (tempfile.gettempdir(), "/tmp")  # noqa: S108 what is in it is checked
    for directory in dict.fromkeys(places):
        names = [Path(directory, f"{user}-{number}" if number else user) for number in range(_NAMES)]
        # One that is there first: who holds and then frees an earlier name must not lead later processes to another.
        yield from sorted(names, key=lambda name: not is_private(name))
    if is_of_machine:
        return
    home = Path(os.path.expanduser("~"), ".cache")
    if home.is_dir():
        yield home / _NAME
    yield _of_this_process()


@functools.cache
def _of_this_process() -> Path:
    """Return a new directory, if all usual names are taken: only this process finds its files."""
    return Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))


def _is_made(path: Path) -> bool:
    """Whether the directory is there and private, by now."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not is_private(path):
            _warn_once(path, "%s is not a directory of this user alone: another one is used", path)
            return False
    except OSError:
        return False
    return is_private(path)


def is_private(path: Path) -> bool:
    """Whether `path` is a directory, not a link to one, that belongs to this user and that no other user can enter."""
    mode = _own_mode(path)
    return stat.S_ISDIR(mode) and not mode & 0o077


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory of this user, and no link to one. Others may be able to enter it."""
    return stat.S_ISDIR(_own_mode(path))


def is_own_file(path: Path) -> bool:
    """Whether `path` is a regular file of this user, and no link to one."""
    return stat.S_ISREG(_own_mode(path))


def _own_mode(path: Path) -> int:
    """Return the mode of what is there, links not followed; 0 if nothing is there, or something of another user."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_mode if status.st_uid == os.geteuid() else 0


def own_file_in(directory: Path, name: str) -> Path | None:
    """Return the file of this name in a directory; None if it is not there, lies elsewhere, or is another user's.

    A link counts if this user has made it: W&B's client links to the files that the user saves.

    Args:
        directory: A directory of this user.
        name: The file's path in it.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        return None
    levels = [directory.joinpath(*parts[:end]) for end in range(len(parts))]
    path = directory / name
    with suppress(OSError):
        if all(map(is_own_directory, levels)) and os.lstat(path).st_uid == os.geteuid() and path.is_file():
            return path
    return None


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user. Never waits, and follows no link.

    A file with a second name counts only in a directory in which this user alone can make names, as in a backup by
    `cp -al`. Elsewhere, another user may have made the name for one of this user's files.

    Raises:
        PermissionError: It is another user's, or anything but a file.
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        in_mode = _own_mode(path.absolute().parent)
        if status.st_nlink <= 1 or (stat.S_ISDIR(in_mode) and not in_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "not a regular file of this user alone", str(path))


def touch_own(path: Path) -> None:
    """Make an empty file of this user, or leave the one that is there as it is.

    Raises:
        OSError: As `open_own`.
    """
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT))


def lock_file(descriptor: int) -> None:
    """Lock an open file until it is closed in this process and in the children that were forked since.

    Raises:
        BlockingIOError: It is locked.
        OSError: Its file system has no locks.
    """
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _REQUEST)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_own(path: Path, limit: int) -> bytes:
    """Return the contents of a file of this user, of at most `limit` bytes.

    Raises:
        FileNotFoundError: There is none.
        OSError: It is longer, or is refused by `open_own`.
    """
    with open(open_own(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
    return data


def own_text(path: Path, limit: int = 1 << 16) -> str | None:
    """Return the text of a file of this user, of at most `limit` bytes; None if there is none, or anything else."""
    try:
        return read_own(path, limit).decode(errors="replace")
    except OSError:
        return None


def replace_whole(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace the content of a file, or make the file: a reader, and a kill, finds the old content or the new one.

    Threads and processes may do so at the same time.

    Args:
        path: The file.
        content: Its new content.
        mode: Its permissions, less the process's umask.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    unfinished.unlink(missing_ok=True)  # of a process that was killed, or planted
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(unfinished, flags, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError:  # a full disk gets its room back
        unfinished.unlink(missing_ok=True)
        raise


def age_s(path: Path) -> float:
    """Return how long ago a file was written, in seconds; infinity if it is not there.

    By its time, which a clock that is set, or another machine's, may have made one that is to come: that is now.
    """
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return math.inf
