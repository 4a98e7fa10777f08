"""Read the `.wandb` file of a run's directory.

The file is a log in the format of LevelDB after a header of 7 bytes. wandb has no reader for Python.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import is_own_file, open_own
from flyteplugins_tracking._util.fork import OwnLock, register
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.wandb import vendor

_warn_once = WarnOnce(logging.getLogger(__name__))
_HEADER, _BLOCK = 7, 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_DAMAGED, _FULL, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3, 4
# How much of a file is read for its head, in bytes, unless its first row is behind that.
_HEAD = 1 << 18
_known: dict[Path | None, Contents] = {}


class Row(NamedTuple):
    """A row of a run.

    Attributes:
        step: Its step.
        values: Its values, with the time at which it was logged as "_timestamp".
        is_placed: Whether the function has given the step.
    """

    step: int
    values: Mapping[str, Any]
    is_placed: bool = False

    @property
    def time(self) -> float:
        """When it was logged, in seconds since the epoch. Tells the rows of several processes apart."""
        return float(self.values.get("_timestamp", 0))


def file_in(directory: Path) -> Path | None:
    """Return this user's `.wandb` file in a run's directory; None if there is none. Others may have made more there."""
    return next(filter(is_own_file, sorted(directory.glob("*.wandb"))), None)


class Contents:
    """What a run's `.wandb` file says, but for its rows' values. It is read once, and on as it grows.

    Attributes:
        described: The record with which the run was opened; None if its process was killed before it had written any.
        first: Its first row; None if there is none.
        end: The position in the file behind what was read.
        steps: Those of its rows, in their order.
        times: When these were logged.
        positions: A position in the file before each of these.
        files: The names of the files that were saved for the run, also of those of rows. They are below "files".
        artifacts: Its artifacts, serialized.
        exit_code: The status of the run's end, which wandb-core writes last, and not after a failure; None for none.
    """

    def __init__(self, file: Path | None) -> None:
        """Begin. `file` is None if there is none."""
        self.file, self.end, self._size = file, 0, 0
        self._reading = register(OwnLock())
        self.described: Any = None
        self.first: Row | None = None
        self.steps, self.times, self.positions = array("q"), array("d"), array("q")
        self.files, self.artifacts = list[str](), list[bytes]()
        self.exit_code: int | None = None

    def read(self, *, is_whole: bool) -> Contents:
        """Read what is new; or its head, with the description and the first row."""
        if self._has_head and not is_whole:  # another thread may be reading the whole file, which takes long
            return self
        with self._reading.lock:
            size = 0 if self.file is None else self.file.stat().st_size
            if self.file is None or size == self._size:
                return self
            for end, data in records_from(self.file, self.end):
                self._take(*vendor.parse_record(data))
                self.end = end
                if self._has_head and end > _HEAD and not is_whole:
                    return self
            self._size = size
        return self

    @property
    def _has_head(self) -> bool:
        return self.described is not None and self.first is not None

    def _take(self, kind: str, record: Any) -> None:
        if kind == "run" and self.described is None:
            self.described = record
        elif kind == "history":
            self.first = self.first or row_of(record)
            step, time = _step_and_time_of(record)
            self.steps.append(step)
            self.times.append(time)
            self.positions.append(self.end)
        elif kind == "files":
            self.files += [item.path for item in record.files]
        elif kind == "artifact":
            self.artifacts.append(record.SerializeToString())
        elif kind == "exit" and self.exit_code is None:  # one that is cut gets another one
            self.exit_code = int(record.exit_code)


def contents_of(directory: Path, *, is_whole: bool = True) -> Contents:
    """Return what the file in a directory says; nothing if there is none."""
    file = file_in(directory)
    return _known.setdefault(file, Contents(file)).read(is_whole=is_whole)


def forget(directory: Path) -> None:
    """Forget what the file in a directory says: it is sent."""
    _known.pop(file_in(directory), None)


def description(directory: Path) -> Any:
    """Return the record with which the run was opened; None if its process was killed before it had written any.

    Raises:
        TrackerUnavailableError: It is damaged, or another user's.
    """
    head = contents_of(directory, is_whole=False)
    if head.file is None and any(directory.glob("*.wandb")):
        text = f"{directory} was not sent: its .wandb file is not a file of this user"
        raise TrackerUnavailableError(text, is_outage=False)
    if head.described is None and head.first is not None:
        raise TrackerUnavailableError(f"{head.file} is damaged: it has rows, and does not say which run they are of")
    return head.described


def arguments_of(record: Any) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that make the run of a description again."""
    config = {item.key: json.loads(item.value_json) for item in record.config.update if item.key[:1] not in ("", "_")}
    return {
        "name": record.display_name or None,
        "group": record.run_group or None,
        "job_type": record.job_type or None,
        "tags": list(record.tags) or None,
        "notes": record.notes or None,
        "config": config,
    }


def records_from(path: Path, position: int, *, is_written: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the records from a position in the file on, each with the position behind it. One block is in memory.

    A torn end, as a kill leaves it, is left out. So is a damaged record, with a warning.

    Args:
        path: The file.
        position: 0, or one that was yielded.
        is_written: Whether a process still writes: what looks damaged has not been written completely.

    Raises:
        OSError: The file cannot be read, or is another user's.
    """
    parts, is_begun = b"", False
    for end, kind, fragment in _fragments(path, max(_HEADER, position), is_written):
        if kind in (_FULL, _FIRST):
            parts, is_begun = fragment, True
        elif is_begun:
            parts += fragment
        is_begun = is_begun and kind != _DAMAGED
        if kind in (_FULL, _LAST) and is_begun:
            yield end, parts
            is_begun = False


def _fragments(path: Path, position: int, is_written: bool) -> Iterator[tuple[int, int, bytes]]:
    """Yield the position behind each fragment, its kind and its bytes; for what is damaged, one without bytes."""
    is_damaged = False
    with open(open_own(path), "rb") as file:
        file.seek(position)
        while data := file.read(_BLOCK - position % _BLOCK):
            start, left = 0, _BLOCK - position % _BLOCK - len(data)
            is_end = os.fstat(file.fileno()).st_size <= position + len(data)  # a block before it is written completely
            while start + _FRAGMENT.size <= len(data):  # behind that, there is padding
                kind, fragment = _fragment_at(data, start)
                end = start + _FRAGMENT.size + len(fragment)
                if not kind and is_written and is_end:
                    return
                if not kind:
                    # Its length may be damaged too: then the next block is the next place where a fragment begins.
                    start = end if end < len(data) and _fragment_at(data, end)[0] else len(data)
                    yield position + start, _DAMAGED, b""
                elif is_damaged:
                    _warn_once(str(path), "%s is damaged: the records at that place are left out", path)
                is_damaged = not kind
                if kind:
                    start = end
                    yield position + start, kind, fragment
            position += len(data)
            if left:  # the end of the file, for now
                return


def _fragment_at(data: bytes, start: int) -> tuple[int, bytes]:
    """Return the kind and the bytes of the fragment at a place; a kind of 0 if it is torn or damaged."""
    begin = start + _FRAGMENT.size
    if begin > len(data):
        return 0, b""
    checksum, length, kind = _FRAGMENT.unpack_from(data, start)
    fragment = data[begin : begin + length]
    is_whole = len(fragment) == length and checksum == zlib.crc32(bytes([kind]) + fragment)
    return kind if is_whole and _FULL <= kind <= _LAST else 0, fragment


def row_of(record: Any) -> Row:
    """Return the row of a record."""
    values: dict[str, Any] = {}
    for item in record.item:
        *parents, key = item.nested_key or [item.key]
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = json.loads(vendor.json_of(item))
    step = values.pop("_step", None)
    values.pop("_runtime", None)  # wandb-core gives it
    return Row(record.step.num if step is None else int(step), values)


def _step_and_time_of(record: Any) -> tuple[int, float]:
    """Return these of a row's record, without its other values."""
    own: dict[str, float] = {}
    for item in record.item:
        key = ".".join(item.nested_key) or item.key
        if key in ("_step", "_timestamp"):
            own[key] = float(vendor.json_of(item))
            if len(own) == 2:  # wandb-core writes these first
                break
    return int(own.get("_step", record.step.num)), own.get("_timestamp", 0.0)
