"""A journal: what one writer has logged and its service may lack, in files on the local disk that outlive the process.

A record is in the operating system's hands when `add` returns: SIGKILL loses none. The files of one journal are its
segments, `NAME.journal.0` and so on. Each is a sequence of frames: a head with a checksum of its own, which says the
record's number, length and checksum, and the record. So a reader finds the frames behind a damaged one.

A record of W&B's is in `wandb.outbox.record_of`. One of the other trackers is a line: JSON that no service's format is
in. A line is one of

    {"row": {...}, "step": 3, "time": 1700000000.0}         a row; the step is null if the service counts
    {"call": "log_params", "args": [...], "kwargs": {...}}  a call of a method of the run object
    {"event": "failure", "values": {...}, "text": "..."}    what the run tells of its job; null: nothing any more
    {"exit_code": 0}                                        the run's end
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import is_own_file, open_own, read_own
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]

SUFFIX = ".journal."
# A damaged file whose other records the service has.
_BAD = ".bad"
# The size at which a segment is full. Segments are the unit in which acknowledged records are removed.
SEGMENT_BYTES = 4_000_000
# The largest segment that is read: it has one record at least, and that may be a large one.
_LONGEST_SEGMENT = 256_000_000
# A frame's head: a mark, a kind, a number, the record's length and its checksum; then the checksum of all this.
_HEAD = struct.Struct("<2sBQII")
_CHECKSUM = struct.Struct("<I")
_HEAD_SIZE = _HEAD.size + _CHECKSUM.size
_MARK = b"\xabJ"
# The number of a record is how many were added before it; that of an acknowledgement, how many records the service has.
_RECORD, _HEADER, _ACKNOWLEDGED = range(3)
# Services have steps of 64 bits, and the next step needs room. A row's time is below this, in seconds since the epoch:
# Python's dates have four digits for a year. An exit code has 32 bits.
LARGEST_STEP, LATEST_S, _LARGEST_CODE = 2**62, 2.5e11, 2**31

_warn_once = WarnOnce(logger)
# The journals that this process writes. Reading the last segment of one would release its lock.
_live: set[str] = set()
# Made once: `json.dumps` with these arguments would make one for each row.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class Entry(NamedTuple):
    """A record, and how many were added before it."""

    data: bytes
    number: int


class Journal(PerProcess):
    """One writer's journal. Its first record creates it.

    Attributes:
        directory: Where its files are.
        name: Different for each writer of the directory.
        added: How many records were added, kept or not.
        header: What its readers need to know. A change of it is in the segments that begin later.
        is_closed: Whether records are not kept anymore: after `close`, and since the disk was full.
        replaced: How many records of a full disk the last one has taken the place of.
    """

    def __init__(self, directory: Path, name: str, header: Mapping[str, Any]) -> None:
        """Prepare the journal.

        Args:
            directory: Where its files are.
            name: Different for each writer of the directory.
            header: What its readers need to know: values of JSON.
        """
        self.directory, self.name = directory, name
        self.added = 0
        self._numbers = itertools.count()
        self._base = f"{directory / name}{SUFFIX}"
        self.header = dict(header)
        self._segments: list[tuple[str, int]] = []  # the paths, and how many records were added before each
        self._count = 0  # segments that were begun
        self._acknowledged = 0
        self._file = -1
        self._room = 0  # bytes until the segment is full; without a segment there are none
        self.is_closed = False
        self.replaced = 0
        self._lock = threading.RLock()  # held while segments change. Reentrant: a signal handler may log
        register(self)

    @classmethod
    def closed(cls) -> Journal:
        """Return a journal that keeps nothing."""
        journal = cls(Path(), "", {})
        journal.close()
        return journal

    def add(self, record: bytes, is_last: bool = False) -> int:
        """Keep a record, and return its number. A full disk costs the record, with one warning, and raises nothing.

        The last record, with the status of the run, takes the place of others then.
        """
        size = _HEAD_SIZE + len(record)
        with self._lock:
            number = next(self._numbers)  # a signal handler may add another one before this is written
            self.added = max(self.added, number + 1)
            if self._room >= size or self._begin_segment(size, number):
                self._write(_RECORD, number, record)
            if is_last and self.is_closed and self._segments:
                self._replace_last(_frame(_RECORD, number, record))
            return number

    def entries(self, first: int) -> Iterator[Entry]:
        """Yield the records that the files have, from number `first` on, while more are added."""
        segments = list(self._segments)
        for position, (path, _) in enumerate(segments):
            if position + 1 == len(segments) or segments[position + 1][1] > first:
                frames = [frame for frame in _frames(self._content(path)) if frame is not None]
                yield from (entry for entry in _entries(frames) if entry.number >= first)

    def remove_acknowledged(self, count: int) -> None:
        """Remove the segments of the first `count` records, which the service has, and keep the count."""
        with self._lock:
            is_new = count != self._acknowledged
            self._acknowledged = count
            while len(self._segments) > 1 and self._segments[1][1] <= count:
                _remove(self._segments.pop(0)[0])
            if self._file >= 0 and is_new:
                self._write(_ACKNOWLEDGED, count)

    def close(self) -> None:
        """Keep the files for a reader. Records that are added from now on are not kept."""
        with self._lock:
            self.is_closed = True
            self._close_file()
            _live.discard(self._base)

    def remove(self) -> None:
        """Remove the files: the service has all records."""
        with self._lock:
            self.close()
            for path, _ in self._segments:
                _remove(path)
            self._segments.clear()

    def after_fork_in_child(self) -> None:
        """Keep nothing from now on: the lock may be held forever, and the files are the parent's."""
        self._lock = threading.RLock()
        self._segments = []
        self.close()

    def _content(self, path: str) -> bytes:
        """Return a segment. The last one is read by its own descriptor: closing another would release its lock."""
        with self._lock:
            if self._file >= 0 and path == self._segments[-1][0]:
                return os.pread(self._file, os.fstat(self._file).st_size, 0)
        return _content(Path(path))

    def _write(self, kind: int, number: int, record: bytes = b"") -> None:
        """Write a frame. On a full disk a part of it may be written, behind which nothing is written anymore."""
        frame = _frame(kind, number, record)
        self._room -= len(frame)
        try:
            _write_whole(self._file, frame)
        except OSError as error:
            self._give_up(error)

    def _replace_last(self, frame: bytes) -> None:
        """Write a frame over the last ones, and over what was written in part: that needs no room on the disk."""
        try:
            with open(open_own(Path(self._segments[-1][0]), os.O_RDWR), "r+b") as file:
                data = file.read()
                frames = [one for one in _frames(data) if one is not None]
                start = max(one.end for one in frames if one.end + len(frame) <= len(data))  # behind a header
                os.pwrite(file.fileno(), frame, start)
                os.ftruncate(file.fileno(), start + len(frame))
            self.replaced = sum(one.kind == _RECORD and one.end > start for one in frames)
        except (OSError, ValueError):
            logger.debug("the last record of %s is not kept", self._base, exc_info=True)

    def _begin_segment(self, size: int, before: int) -> bool:
        if self.is_closed:
            return False
        try:
            self._open_segment(size, before)
        except InterruptedError:
            pass
        except OSError as error:
            self._give_up(error)
        return not self.is_closed

    def _open_segment(self, size: int, before: int) -> None:
        """Make the next file. It has its name when it is locked, and the one before it is locked until then.

        So another process that looks for journals whose writers have ended always finds this one locked.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        count, path = self._count, f"{self._base}{self._count}"
        unfinished = f"{path}.{before}.new"
        # O_EXCL: a file of that name, such as a link of another user's, is not this journal's.
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # Not `flock`: a child of a writer that was killed would hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            header = json.dumps(self.header, default=str).encode()
            # Twice: without a header, the run of the other records is not known.
            _write_whole(file, 2 * _frame(_HEADER, self._acknowledged, header))
            if count != self._count:  # a signal handler has added a record, and so has begun the next file already
                raise InterruptedError
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            _live.add(self._base)
            self._count += 1
            os.rename(unfinished, path)
        except BaseException:
            os.close(file)
            _remove(unfinished)
            raise
        self._close_file()
        self._segments.append((path, before))
        self._file, self._room = file, max(SEGMENT_BYTES, size)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._room = -1, 0

    def _give_up(self, error: OSError) -> None:
        """Stop keeping records. The training continues, and loses at a kill what the client has not sent."""
        if not self.is_closed:
            _warn_once(
                str(self.directory),
                "rows cannot be kept in %s: %s. From now on, rows are lost that are not sent before this process ends",
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

    @property
    def name(self) -> str:
        """The name that its writer gave it."""
        return self.paths[0].name.rpartition(SUFFIX)[0]

    def entries(self) -> Iterator[Entry]:
        """Yield the records that are not acknowledged, in their order. One segment is in memory at a time.

        A damaged record is left out, with a warning. Raises nothing.
        """
        acknowledged = 0
        for path in self.paths:
            frames = list(_frames(_content(path)))
            damaged = frames.count(None)
            acknowledged = max([acknowledged, *(one.number for one in frames if one and one.kind != _RECORD)])
            if damaged:
                text = "%s is damaged in %d places: what was there is lost, all else is used. It is kept as %s%s"
                _warn_once(str(path), text, path, damaged, path.name, _BAD)
        for path in self.paths:
            frames_left = [frame for frame in _frames(_content(path)) if frame is not None]
            yield from (entry for entry in _entries(frames_left) if entry.number >= acknowledged)

    def lines(self) -> Iterator[Line]:
        """Yield the lines of these records. One that is no line is left out: its writer was no version of this."""
        return lines_of(self.name, self.entries())

    def segments(self) -> list[StoredJournal]:
        """Return its files as journals of their own, each with its own header: an empty one if that is damaged."""
        return [_stored([path]) or StoredJournal({}, [path]) for path in self.paths]

    def is_open(self) -> bool:
        """Whether another process is writing it. Unknown, as on some network file systems, counts as no."""
        last = self.paths[-1]
        following = last.with_suffix(f".{int(last.suffix[1:]) + 1}")
        # Since these files were found, it may have begun another one, and removed both.
        return _is_locked(last) or os.path.lexists(following) or not os.path.lexists(last)

    def remove(self, is_bad: bool = False) -> None:
        """Remove the files: the service has all records. Damaged files, and all if `is_bad`, get another name."""
        for path in self.paths:
            if is_bad or None in _frames(_content(path)):
                with suppress(OSError):
                    path.rename(f"{path}{_BAD}")
            else:
                _remove(str(path))


def stored(directory: Path) -> list[StoredJournal]:
    """Return the journals of a directory that this process does not write, in the order of their names.

    The files of other users are left out, with a warning.
    """
    segments: dict[str, list[Path]] = {}
    for name, _, path in sorted(_segments_in(directory)):
        segments.setdefault(name, []).append(path)
    journals = []
    for paths in (paths for name, paths in segments.items() if f"{directory / name}." not in _live):
        if (journal := _stored(paths)) is not None:
            journals.append(journal)
        elif any(map(_content, paths)):
            text = "%s is damaged: it does not say which run it is of, so nothing of it is sent"
            _warn_once(f"{paths[0]} unnamed", text, paths[0])
    return journals


def _segments_in(directory: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the files of a directory's journals, each with its journal and its number."""
    for path in directory.glob(f"*{SUFFIX}*"):
        name, _, number = path.name.rpartition(".")
        if re.fullmatch(r"[0-9]{1,18}", number):
            yield name, int(number), path


def files_in(directory: Path) -> list[Path]:
    """Return the files of a directory's journals that are not empty. They may be damaged, or another user's."""
    return [path for _, _, path in _segments_in(directory) if path.lstat().st_size]


def require_all_sent(directory: Path) -> None:
    """Name the files of journals that are left in a directory when all others are sent and removed.

    Raises:
        TrackerUnavailableError: There are some.
    """
    if left := files_in(directory):
        names = ", ".join(printable(path.name) for path in left)
        raise TrackerUnavailableError(
            f"{directory} was sent, but for what is in these files, which are damaged or not this user's alone: {names}"
        )


def remove_torn(directory: Path) -> None:
    """Remove this user's empty files of journals, as a power loss leaves them."""
    for _, _, path in _segments_in(directory):
        if is_own_file(path) and not path.lstat().st_size:
            _remove(str(path))


def encode(line: Line) -> bytes:
    """Return a line as a record: JSON, which a reader cannot be made to run.

    Raises:
        TypeError: JSON cannot hold a value.
        ValueError: JSON cannot hold a value.
    """
    try:
        return _encode(line).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise ValueError("a value is nested too deeply, or contains itself") from None


def lines_of(name: str, entries: Iterable[Entry]) -> Iterator[Line]:
    """Yield the lines of the records of a journal. The "id" of each is the same whenever it is read."""
    for entry in entries:
        with suppress(ValueError, RecursionError):
            line = json.loads(entry.data.decode("utf-8", "surrogatepass"))
            if _is_line(line):
                yield {**line, "id": f"{name}-{entry.number}"}


def _is_line(value: Any) -> bool:
    """Whether a value is a line that can be sent. A record may come from a stranger's archive."""
    match value:
        case {"row": dict(), "step": None | int() | float() as step, "time": int() | float() as time_s}:
            return 0 <= time_s < LATEST_S and abs(step or 0) < LARGEST_STEP
        case {"call": str(), "args": list(), "kwargs": dict()} | {
            "event": str(),
            "values": dict(),
            "text": str() | None,
        }:
            return True
        case {"exit_code": int(code)}:
            return abs(code) < _LARGEST_CODE
    return False


def exit_code_in(lines: Iterable[Line]) -> int:
    """Return the status that a run's lines end with; 1 if its process was killed before it could tell."""
    exit_code = 1
    for line in lines:  # one at a time: there may be millions
        exit_code = line.get("exit_code", exit_code)
    return exit_code


def event_values(line: Line) -> dict[str, Any]:
    """Return what a run's summary gains by an event's line: its values, and its text. None is for what it loses."""
    return {**line["values"], f"{line['event']}/text": line["text"]}


def _stored(paths: Sequence[Path]) -> StoredJournal | None:
    """Return the journal of these files; None if they have no header, or are gone by now."""
    for path in paths:
        header = next((frame for frame in _frames(_content(path)) if frame and frame.kind == _HEADER), None)
        with suppress(ValueError, RecursionError):
            described = None if header is None else json.loads(header.data)
            if isinstance(described, dict):
                return StoredJournal(described, paths)
    return None


class _Frame(NamedTuple):
    kind: int
    number: int
    data: bytes
    end: int
    is_whole: bool


def _entries(frames: Sequence[_Frame]) -> Iterator[Entry]:
    by_number = {frame.number: frame for frame in frames if frame.kind == _RECORD}
    for number, frame in sorted(by_number.items()):
        yield Entry(frame.data, number)


def _content(path: Path) -> bytes:
    """Return a file of this user; nothing if there is none, with a warning if it is another user's."""
    try:
        return read_own(path, _LONGEST_SEGMENT)
    except FileNotFoundError:
        pass
    except OSError as error:
        _warn_once(f"{path} unread", "%s is left out: %s", printable(str(path)), error.strerror)
    return b""


def _is_locked(path: Path) -> bool:
    try:
        file = open_own(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(file)
    return False


def _frame(kind: int, number: int, record: bytes) -> bytes:
    head = _HEAD.pack(_MARK, kind, number, len(record), zlib.crc32(record))
    return head + _CHECKSUM.pack(zlib.crc32(head)) + record


def _write_whole(file: int, data: bytes) -> None:
    if os.write(file, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _frames(data: bytes) -> Iterator[_Frame | None]:
    """Yield the whole frames of a file, and None for each place that has something else. Raises nothing."""
    position = 0
    is_damaged = False
    while 0 <= position < len(data):
        frame = _frame_at(data, position)
        # The next frame may stand behind bytes that are not a frame.
        position = data.find(_MARK, position + 1) if frame is None else frame.end
        is_whole = frame is not None and frame.is_whole
        if is_whole or not is_damaged:
            yield frame if is_whole else None
        is_damaged = not is_whole


def _frame_at(data: bytes, start: int) -> _Frame | None:
    """Return the frame at this place, whose record may be damaged; None if its head is damaged, or its end missing."""
    head_end = start + _HEAD.size
    begin = head_end + _CHECKSUM.size
    if begin > len(data) or zlib.crc32(data[start:head_end]) != _CHECKSUM.unpack_from(data, head_end)[0]:
        return None
    mark, kind, number, size, checksum = _HEAD.unpack_from(data, start)
    if mark != _MARK or begin + size > len(data):
        return None
    record = data[begin : begin + size]
    return _Frame(kind, number, record, begin + size, zlib.crc32(record) == checksum)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        logger.debug("cannot remove %s", path, exc_info=True)
