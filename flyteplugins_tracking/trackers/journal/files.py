"""A journal: the records of one writer that its service may not have received, in files that outlive the process.

A record is in the operating system's hands when `add` returns: SIGKILL loses none. The files of one journal are its
segments, `NAME.journal.0` and so on. Each is a sequence of frames: a kind, a length, a time, and as many bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.fork import after_fork_in_child
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

SUFFIX = ".journal."
# The size at which a segment is full. Segments are the unit in which acknowledged records are removed.
SEGMENT_BYTES = 4_000_000
_FRAME = struct.Struct("<BId")
_pack = _FRAME.pack
_COUNT = struct.Struct("<Q")
_RECORD, _HEADER, _ACKNOWLEDGED = range(3)

_warn_once = WarnOnce(logger)
# The journals that this process writes. Reading one would release its lock.
_live: set[str] = set()
# All journals of this process: a forked child must leave them alone.
_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


class Entry(NamedTuple):
    """A record, and when it was added, in seconds since the epoch."""

    time_s: float
    data: bytes


class Journal:
    """One writer's journal. Its first record creates it.

    Attributes:
        directory: Where its files are.
        added: How many records were added.
    """

    def __init__(self, directory: Path, name: str, header: Mapping[str, Any], segments: int | None = None) -> None:
        """Prepare the journal.

        Args:
            directory: Where its files are.
            name: Different for each writer of the directory.
            header: What its readers need to know: values of JSON.
            segments: How many segments are kept, if the client has older records in files of its own. None to keep all
                records that are not acknowledged.
        """
        self.directory = directory
        self.added = 0
        self._base = f"{directory / name}{SUFFIX}"
        self._header, self._most = dict(header), segments
        self._segments: list[tuple[str, int]] = []  # the paths, and how many records were added before each
        self._count = 0  # segments that were begun
        self._acknowledged = 0
        self._file = -1
        self._room = 0  # bytes until the segment is full; without a segment there are none
        self._is_closed = False
        self._lock = threading.RLock()  # held while segments change. Reentrant: a signal handler may log
        _journals.add(self)

    def add(self, record: bytes) -> None:
        """Keep a record. Called for each row: a full disk costs the record, with one warning, and raises nothing."""
        frame = _pack(_RECORD, len(record), time.time()) + record
        size = len(frame)
        with self._lock:
            if self._room < size and not self._begin_segment(size):
                return
            self._room -= size
            self.added += 1
            try:
                if os.write(self._file, frame) != size:
                    raise OSError("no space left on device")
            except OSError as error:
                self._give_up(error)

    def acknowledged(self, count: int) -> None:
        """Note that the service has the first `count` records. Removes the segments that are not needed anymore."""
        with self._lock:
            is_new = count != self._acknowledged
            self._acknowledged = count
            while len(self._segments) > 1 and self._segments[1][1] <= count:
                _remove(self._segments.pop(0)[0])
            if self._file >= 0 and is_new:
                self._write(_ACKNOWLEDGED, _COUNT.pack(count))

    def close(self) -> None:
        """Keep the files for a reader. Records that are added from now on are not kept."""
        with self._lock:
            self._is_closed = True
            self._close_file()
            _live.discard(self._base)

    def remove(self) -> None:
        """Remove the files: the service has all records."""
        with self._lock:
            self.close()
            for path, _ in self._segments:
                _remove(path)
            self._segments.clear()

    def forget(self) -> None:
        """Keep nothing from now on, in a forked child: the lock may be held forever, and the files are the parent's."""
        self._lock = threading.RLock()
        self._segments = []
        self.close()

    def _write(self, kind: int, data: bytes) -> None:
        """Write a frame. On a full disk a part of it may be written, behind which nothing can be read."""
        frame = _pack(kind, len(data), time.time()) + data
        self._room -= len(frame)
        try:
            if os.write(self._file, frame) != len(frame):
                raise OSError("no space left on device")
        except OSError as error:
            self._give_up(error)

    def _begin_segment(self, size: int) -> bool:
        if self._is_closed:
            return False
        try:
            self._open_segment(size)
        except OSError as error:
            self._give_up(error)
        if self._is_closed:
            return False
        while self._most is not None and len(self._segments) > self._most:
            _remove(self._segments.pop(0)[0])
        return True

    def _open_segment(self, size: int) -> None:
        self._close_file()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = f"{self._base}{self._count}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # Not `flock`: a child of a writer that was killed would hold it.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _live.add(self._base)
        self._segments.append((path, self.added))
        self._count += 1
        header = json.dumps({**self._header, "before": self.added, "acknowledged": self._acknowledged}, default=str)
        self._write(_HEADER, header.encode())
        if not self._is_closed:
            self._room = max(SEGMENT_BYTES, size)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._room = -1, 0

    def _give_up(self, error: OSError) -> None:
        """Stop keeping records. The training continues, and loses at a kill what the client has not sent."""
        if not self._is_closed:
            _warn_once(
                str(self.directory),
                "rows cannot be kept in %s: %s. A kill of this process now loses the rows that are not sent yet",
                self.directory,
                error,
            )
        self.close()


@dataclass(frozen=True)
class StoredJournal:
    """A journal that its writer has left.

    Attributes:
        header: What the writer said of it.
        paths: Its segments, in their order.
    """

    header: Mapping[str, Any]
    paths: Sequence[Path]

    def pending(self) -> list[Entry]:
        """Return the records that are not acknowledged, in their order. A torn end is left out."""
        entries: list[Entry] = []
        before = acknowledged = 0
        for number, path in enumerate(self.paths):
            for kind, time_s, data in _frames(path):
                if kind == _RECORD:
                    entries.append(Entry(time_s, data))
                elif kind == _ACKNOWLEDGED:
                    acknowledged = _COUNT.unpack(data)[0]
                elif number == 0:
                    header = json.loads(data)
                    before, acknowledged = header["before"], header["acknowledged"]
        return entries[max(0, acknowledged - before) :]

    def is_open(self) -> bool:
        """Whether another process is writing it. Unknown, as on some network file systems, counts as no."""
        try:
            file = os.open(self.paths[-1], os.O_WRONLY)
        except OSError:
            return False
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(file)
        return False

    def claim(self) -> None:
        """Have `stored` leave it out in this process, which is sending it."""
        _live.add(self._base)

    def release(self) -> None:
        """Undo `claim`."""
        _live.discard(self._base)

    def remove(self) -> None:
        """Remove the files: the service has all records."""
        for path in self.paths:
            _remove(str(path))

    @property
    def _base(self) -> str:
        return str(self.paths[0])[: -len(self.paths[0].suffix) + 1]


def stored(directory: Path) -> list[StoredJournal]:
    """Return the journals of a directory that this process does not write, in the order of their names."""
    segments: dict[str, list[tuple[int, Path]]] = {}
    for path in directory.glob(f"*{SUFFIX}*"):
        name, _, number = path.name.rpartition(".")
        if re.fullmatch(r"\d+", number):
            segments.setdefault(name, []).append((int(number), path))
    others = [name for name in sorted(segments) if f"{directory / name}." not in _live]
    journals = [_stored([path for _, path in sorted(segments[name])]) for name in others]
    return [journal for journal in journals if journal is not None]


def remove_torn(directory: Path) -> None:
    """Remove the files of journals whose writers were killed before they had written anything."""
    for path in directory.glob(f"*{SUFFIX}*"):
        if not path.stat().st_size:
            _remove(str(path))


def _stored(paths: Sequence[Path]) -> StoredJournal | None:
    try:
        kind, _, data = next(_frames(paths[0]), (_RECORD, 0.0, b""))
        return StoredJournal(json.loads(data), paths) if kind == _HEADER else None
    except (OSError, ValueError):
        return None  # removed meanwhile


def _frames(path: Path) -> Iterator[tuple[int, float, bytes]]:
    data = path.read_bytes()
    position = 0
    while position + _FRAME.size <= len(data):
        kind, size, time_s = _FRAME.unpack_from(data, position)
        position += _FRAME.size
        if kind > _ACKNOWLEDGED or position + size > len(data) or not time_s:
            return
        yield kind, time_s, data[position : position + size]
        position += size


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        logger.debug("cannot remove %s", path, exc_info=True)


@after_fork_in_child
def _forget_all() -> None:
    for journal in list(_journals):
        journal.forget()
