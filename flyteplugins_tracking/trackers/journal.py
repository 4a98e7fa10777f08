"""A journal: what one writer has logged and its service may lack, in a text file on the local disk.

A record is in the operating system's hands when `add` returns: SIGKILL loses none. The file of a journal is
`NAME.journal.txt`. A line of it is one of

    CRC NUMBER RECORD         a record, and how many were added before it
    CRC acknowledged COUNT    the service has the first COUNT records
    CRC header {...}          what readers need to know; the last one counts

CRC is the checksum of what follows, in hexadecimal digits. There is a newline before each line and one behind it, so
that a damaged byte, or a line that a full disk has cut off, costs its own line only. Empty lines mean nothing.

A record of W&B's is in `wandb.outbox.record_of`. One of the other trackers is JSON that no service's format is in:

    {"row": {...}, "step": 3, "time": 1700000000.0}         a row; the step is null if the service counts
    {"call": "log_params", "args": [...], "kwargs": {...}}  params and tags of MLflow, and what Pluto's client has made
    {"event": "failure", "values": {...}, "text": "..."}    what the run tells of its job; null: nothing any more
    {"exit_code": 0}                                        the run's end
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import secrets
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import lock_file, open_own
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]

# Not `.journal` alone: systemd's files have that name.
SUFFIX = ".journal.txt"
# A damaged file whose other records the service has.
_BAD = ".bad"
# What a line has in the place of a record's number, if it has no record.
_HEADER, _ACKNOWLEDGED = b"header", b"acknowledged"
_LONGEST_NUMBER = 20
# The longest line that is read, in bytes: a file that is none of ours may have no newline.
_LONGEST_LINE = 256_000_000

_warn_once = WarnOnce(logger)
# The journals that this process writes. Closing another descriptor of one would release its lock.
_live: set[Path] = set()
# Made once: `json.dumps` with these arguments would make one for each row.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class Entry(NamedTuple):
    """A record, and how many were added before it."""

    data: bytes
    number: int


class Journal(PerProcess):
    """One writer's journal. Its first record creates the file.

    Attributes:
        directory: Where the file is.
        name: Different for each writer of the directory.
        added: How many records were added, kept or not.
        header: What its readers need to know: see `describe`.
        is_closed: Whether records are not kept anymore: after `close`, and since the disk was full.
    """

    def __init__(self, directory: Path, name: str, header: Mapping[str, Any]) -> None:
        """Prepare the journal.

        Args:
            directory: Where the file is.
            name: Different for each writer of the directory.
            header: What its readers need to know: values of JSON.
        """
        self.directory, self.name = directory, name
        self.header = dict(header)
        self.added = 0
        self.is_closed = False
        self._path = directory / f"{name}{SUFFIX}"
        self._file = -1
        self._lock = threading.RLock()  # no other thread closes the file meanwhile. Reentrant: a signal handler may log
        register(self)

    @classmethod
    def closed(cls) -> Journal:
        """Return a journal that keeps nothing."""
        journal = cls(Path(), "", {})
        journal.close()
        return journal

    def add(self, record: bytes) -> int:
        """Keep a record, and return its number. A full disk costs the record, with one warning, and raises nothing.

        Args:
            record: Bytes without a newline.
        """
        with self._lock:
            if self._file < 0:
                self.make()
            while True:
                number = self.added
                line = _line(b"%d" % number, record)
                if number == self.added:  # otherwise a signal handler has added a record meanwhile
                    break
            self.added = number + 1
            # Handlers run behind a call only: what one adds from here on comes behind this record.
            try:
                if not self.is_closed and os.write(self._file, line) != len(line):
                    raise _full_disk()
            except OSError as error:
                self._give_up(error)
            return number

    def make(self) -> None:
        """Make the file, if there is none."""
        with self._lock:
            if self._file < 0 and not self.is_closed:
                try:
                    self._make_file()
                except OSError as error:
                    self._give_up(error)

    def acknowledge(self, count: int) -> None:
        """Keep that the service has the first `count` records."""
        self._note(_ACKNOWLEDGED, b"%d" % count)

    def describe(self, **values: Any) -> None:
        """Change values of the header."""
        self.header.update(values)
        self._note(_HEADER, self._encoded_header())

    def close(self) -> None:
        """Keep the file for a reader. Records that are added from now on are not kept."""
        with self._lock:
            self.is_closed = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            _live.discard(self._path)

    def remove(self) -> None:
        """Remove the file: the service has all records."""
        with self._lock:
            if self._file >= 0:
                _remove(self._path)  # as long as it is locked: no reader is to find it then
            self.close()

    def after_fork_in_child(self) -> None:
        """Keep nothing from now on: the lock may be held forever, and the file is the parent's."""
        self._lock = threading.RLock()
        self.close()

    def _make_file(self) -> None:
        """Make the file. It has its name when it is locked, so that another process always finds it locked."""
        self.directory.mkdir(parents=True, exist_ok=True)
        unfinished = self.directory / f"{self.name}.{secrets.token_hex(3)}.new"
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            lock_file(file)
            # Twice: without a header, the run of the records is not known.
            header = 2 * _line(_HEADER, self._encoded_header())
            if os.write(file, header) != len(header):
                raise _full_disk()
            is_taken = os.path.lexists(self._path)
            if self._file < 0:  # otherwise a signal handler has added a record meanwhile, and made the file
                if is_taken:  # a link of another user's, for one
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._path))
                self._file = file  # a signal handler's records go there from now on
                _live.add(self._path)
                os.rename(unfinished, self._path)
        finally:
            if os.path.lexists(unfinished):
                if self._file == file:
                    self._file = -1
                os.close(file)
                _remove(unfinished)

    def _encoded_header(self) -> bytes:
        return json.dumps(self.header, default=str).encode()

    def _note(self, name: bytes, text: bytes) -> None:
        """Write a line without a record, if there is a file."""
        line = _line(name, text)
        with self._lock:
            try:
                if self._file >= 0 and not self.is_closed and os.write(self._file, line) != len(line):
                    raise _full_disk()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stop keeping records. The training continues, and loses at a kill what the client has not sent.

        The file stays open: no other process is to send what this one is sending.
        """
        if not self.is_closed:
            _warn_once(
                str(self.directory),
                "rows cannot be kept in %s: %s. From now on, rows are lost that are not sent before this process ends",
                self.directory,
                error,
            )
        self.is_closed = True


@dataclass(frozen=True)
class StoredJournal:
    """A journal that its writer has left.

    Attributes:
        header: What the writer said of it.
        path: The file.
    """

    header: Mapping[str, Any]
    path: Path

    @property
    def name(self) -> str:
        """The name that its writer gave it."""
        return self.path.name.removesuffix(SUFFIX)

    def entries(self, *, also_sent: bool = False) -> Iterator[Entry]:
        """Yield the records that are not acknowledged, or all, in their order. One line is in memory at a time.

        A damaged line is left out, with a warning. Raises nothing.
        """
        _, acknowledged, damaged = _notes_of(self.path)
        if damaged:
            text = "%s is damaged in %d places: what was there is lost, all else is used. It is kept as %s%s"
            _warn_once(str(self.path), text, self.path, damaged, self.path.name, _BAD)
        for number, record in _parsed(self.path):
            if _is_number(number) and (also_sent or int(number) >= acknowledged):
                yield Entry(record, int(number))

    def lines(self, *, also_sent: bool = False) -> Iterator[Line]:
        """Yield the lines of these records. One that is no line is left out.

        Those of a run that was only kept have "is_kept": their rows are as they were logged.
        """
        mark = {"is_kept": True} if self.header.get("is_kept") else {}
        return ({**line, **mark} for line in lines_of(self.name, self.entries(also_sent=also_sent)))

    def is_open(self) -> bool:
        """Whether another process is writing it. Unknown, as on some network file systems, counts as no."""
        try:
            file = open_own(self.path, os.O_WRONLY)
        except OSError as error:
            return isinstance(error, FileNotFoundError)  # since it was found, its writer has ended and removed it
        try:
            lock_file(file)
            return os.fstat(file).st_nlink == 0
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(file)

    def remove(self, is_bad: bool = False) -> None:
        """Remove the file: the service has all records. It gets another name if it is damaged, or if `is_bad`."""
        if is_bad or _notes_of(self.path).damaged:
            with suppress(OSError):
                self.path.rename(f"{self.path}{_BAD}")
        else:
            _remove(self.path)


def stored(directory: Path) -> list[StoredJournal]:
    """Return the journals of a directory that this process does not write, in the order of their names.

    The files of other users are left out, with a warning.
    """
    journals = []
    for path in sorted(set(directory.glob(f"*{SUFFIX}")) - _live):
        header = _notes_of(path).header
        if header is not None:
            journals.append(StoredJournal(header, path))
        elif any(True for _ in _lines_of(path)):
            text = "%s is damaged: it does not say which run it is of, so nothing of it is sent"
            _warn_once(f"{path} unnamed", text, path)
    return journals


def files_in(directory: Path) -> list[Path]:
    """Return the files of a directory's journals that are not empty. They may be damaged, or another user's."""
    found = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):  # its owner removes it just now
            found += [path] if path.lstat().st_size else []
    return found


def require_all_sent(directory: Path) -> None:
    """Name the files of journals that are left in a directory when all others are sent and removed.

    Raises:
        TrackerUnavailableError: There are some.
    """
    if left := files_in(directory):
        names = ", ".join(printable(path.name) for path in left)
        raise TrackerUnavailableError(
            f"{directory} was sent, but for what is in these files, which are damaged or not yours alone: {names}",
            is_outage=False,
        )


def encode(line: Line) -> bytes:
    """Return a line as a record: JSON, which a reader cannot be made to run.

    Raises:
        TypeError: JSON cannot hold a value.
        ValueError: JSON cannot hold a value.
    """
    return _encode(line).encode("utf-8", "surrogatepass")


def lines_of(name: str, entries: Iterable[Entry]) -> Iterator[Line]:
    """Yield the lines of the records of a journal. The "id" of each is the same whenever it is read."""
    for entry in entries:
        with suppress(ValueError, RecursionError):
            line = json.loads(entry.data.decode("utf-8", "surrogatepass"))
            if isinstance(line, dict):
                yield {**line, "id": f"{name}-{entry.number}"}


def event_values(line: Line) -> dict[str, Any]:
    """Return what a run's summary gains by an event's line: its values, and its text. None is for what it loses."""
    return {**line["values"], f"{line['event']}/text": line["text"]}


def _line(name: bytes, text: bytes) -> bytes:
    return b"\n%08x %b %b\n" % (zlib.crc32(text, zlib.crc32(name + b" ")), name, text)


def _full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of this user; none if there is none, with a warning if it is another user's."""
    try:
        with open(open_own(path), "rb") as file:
            while line := file.readline(_LONGEST_LINE):
                if line != b"\n":
                    yield line.removesuffix(b"\n")
    except FileNotFoundError:
        pass
    except OSError as error:
        _warn_once(f"{path} unread", "%s is left out: %s", printable(str(path)), error.strerror)


def _parsed(path: Path) -> Iterator[tuple[bytes, bytes]]:
    return map(_parse, _lines_of(path))


def _parse(line: bytes) -> tuple[bytes, bytes]:
    """Return a line's number, or what stands in its place, and its text. A damaged line has no number."""
    checksum, _, content = line.partition(b" ")
    name, _, text = content.partition(b" ")
    return (name, text) if checksum == b"%08x" % zlib.crc32(content) else (b"", b"")


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) < _LONGEST_NUMBER


class _Notes(NamedTuple):
    """What a file has beside records: its last header, how many of them are acknowledged, and its damaged lines."""

    header: dict[str, Any] | None = None
    acknowledged: int = 0
    damaged: int = 0


def _notes_of(path: Path) -> _Notes:
    """Return what a file has beside records. It is read again only when it has changed."""
    try:
        at = path.lstat()
    except OSError:
        return _Notes()
    return _read_notes(path, at.st_ino, at.st_size, at.st_mtime_ns)


@functools.lru_cache(maxsize=1000)
def _read_notes(path: Path, *_: int) -> _Notes:
    header, acknowledged, damaged = _Notes()
    for name, text in _parsed(path):
        if not name:
            damaged += 1
        elif name == _ACKNOWLEDGED and _is_number(text):
            acknowledged = max(acknowledged, int(text))
        elif name == _HEADER:
            with suppress(ValueError, RecursionError):
                described = json.loads(text)
                header = described if isinstance(described, dict) else header
    return _Notes(header, acknowledged, damaged)


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        logger.debug("cannot remove %s", path, exc_info=True)
