"""Read the `.wandb` file of a run's directory.

The file is a log in the format of LevelDB after a header of 7 bytes. wandb has no reader for Python.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flyteplugins_tracking._util.files import is_own_file, open_own
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.wandb import vendor

_warn_once = WarnOnce(logging.getLogger(__name__))
_HEADER, _BLOCK = 7, 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_DAMAGED, _FULL, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3, 4
_heads: dict[Path | None, Head] = {}


class Row(NamedTuple):
    """A row of a run.

    Attributes:
        step: Its step.
        time: When it was logged, in seconds since the epoch. Tells the rows of several processes apart.
        items: Its values, as W&B's client has serialized them. One of them is the time.
        columns: Its columns. That of a nested value is the outermost one.
        is_placed: Whether the function has given the step.
    """

    step: int
    time: float
    items: Sequence[Any]
    columns: Set[str]
    is_placed: bool = False

    def number_in(self, column: str | None) -> int | None:
        """Return the number that it has in a column; None for none."""
        found = (json.loads(vendor.json_of(item)) for item in self.items if name_of(item) == column)
        return next((int(value) for value in found if isinstance(value, (int, float))), None)


class Head(NamedTuple):
    """How a run's `.wandb` file begins.

    Attributes:
        described: The record with which the run was opened; None if its process was killed before it had written any.
        first: Its first row; None if there is none.
    """

    described: Any = None
    first: Row | None = None


class Mark(NamedTuple):
    """A row's step, its time, and a position in the file before it."""

    step: int
    time: float
    position: int


def file_in(directory: Path) -> Path | None:
    """Return this user's `.wandb` file in a run's directory; None if there is none. Others may have made more there."""
    return next(filter(is_own_file, sorted(directory.glob("*.wandb"))), None)


def head_of(directory: Path) -> Head:
    """Return how the file in a directory begins. It is read again until it has a row."""
    file, described = file_in(directory), None
    if file in _heads:
        return _heads[file]
    for _, data in records_from(file):
        kind, record = vendor.parse_record(data)
        if kind == "run" and described is None:
            described = record
        elif kind == "history":
            return _heads.setdefault(file, Head(described, row_of(record)))
    return Head(described)


def last_rows(directory: Path, below: float = math.inf) -> list[Mark]:
    """Return the last rows below a step in the file of a directory: those that begin in the last block that has one.

    The steps of a file rise, so few blocks are read.
    """
    file = file_in(directory)
    if file is None:
        return []

    def first_step(block: int) -> float:
        return next((mark.step for mark in marks_in(file, block * _BLOCK)), math.inf)

    place = bisect_left(range(file.stat().st_size // _BLOCK + 1), below, key=first_step) - 1
    return list(takewhile(lambda mark: mark.step < below, marks_in(file, max(0, place) * _BLOCK)))


def marks_in(file: Path | None, position: int = 0) -> Iterator[Mark]:
    """Yield the marks of a file's rows, from a position on."""
    for end, data in records_from(file, position):
        kind, record = vendor.parse_record(data)
        if kind == "history":
            row = row_of(record)
            yield Mark(row.step, row.time, position)
        position = end


def exit_code_of(directory: Path) -> int | None:
    """Return the status of the run's end, which wandb-core writes last, and not after a failure; None for none."""
    file, rows = file_in(directory), last_rows(directory)
    for _, data in records_from(file, rows[-1].position if rows else 0):
        kind, record = vendor.parse_record(data)
        if kind == "exit":  # the first one: one that is cut gets another one
            return int(record.exit_code)
    return None


def saved_in(directory: Path) -> tuple[list[str], list[bytes]]:
    """Return the names of the files that were saved for the run, also of those of rows; and artifacts, serialized."""
    file, names, artifacts = file_in(directory), list[str](), list[bytes]()
    for _, data in records_from(file):
        kind, record = vendor.parse_record(data)
        if kind == "files":
            names += [item.path for item in record.files]
        elif kind == "artifact":
            artifacts.append(record.SerializeToString())
    return names, artifacts


def forget(directory: Path) -> None:
    """Forget how the file in a directory begins: it is sent."""
    _heads.pop(file_in(directory), None)
    close()


def close() -> None:
    """Close the files that were read: opened again, a file of another node has what that has written since."""
    _opened.cache_clear()


def description(directory: Path) -> Any:
    """Return the record with which the run was opened; None if its process was killed before it had written any.

    Raises:
        TrackerUnavailableError: It is damaged, or another user's.
    """
    head, file = head_of(directory), file_in(directory)
    if file is None and any(directory.glob("*.wandb")):
        text = f"{directory} was not sent: its .wandb file is not a file of this user"
        raise TrackerUnavailableError(text, is_outage=False)
    if head.described is None and head.first is not None:
        raise TrackerUnavailableError(f"{file} is damaged: it has rows, and does not say which run they are of")
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


def records_from(path: Path | None, position: int = 0, *, is_written: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the records from a position in the file on, each with the position behind it. One block is in memory.

    A torn end, as a kill leaves it, is left out. So is a damaged record, with a warning.

    Args:
        path: The file; None for none, which has no records.
        position: 0, or one that was yielded.
        is_written: Whether a process still writes: what looks damaged has not been written completely.

    Raises:
        OSError: The file cannot be read, or is another user's.
    """
    if path is None:
        return
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
    is_damaged, file = False, _opened(path)
    while data := os.pread(file.fileno(), _BLOCK - position % _BLOCK, position):
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


@functools.lru_cache(maxsize=64)
def _opened(path: Path) -> BinaryIO:
    return open(open_own(path), "rb", buffering=0)


def _fragment_at(data: bytes, start: int) -> tuple[int, bytes]:
    """Return the kind and the bytes of the fragment at a place; a kind of 0 if it is torn or damaged."""
    begin = start + _FRAGMENT.size
    if begin > len(data):
        return 0, b""
    checksum, length, kind = _FRAGMENT.unpack_from(data, start)
    fragment = data[begin : begin + length]
    is_whole = len(fragment) == length and checksum == zlib.crc32(bytes([kind]) + fragment)
    return kind if is_whole and _FULL <= kind <= _LAST else 0, fragment


def name_of(item: Any) -> str:
    """Return the column of a value: its key, or the first one of a nested value. In W&B's file all are nested."""
    return str(item.key or "".join(item.nested_key[:1]))


def row_of(record: Any) -> Row:
    """Return the row of a record."""
    step, time, items, columns = record.step.num, 0.0, [], set()
    for item in record.item:
        key = name_of(item)
        if key == "_step":
            step = int(json.loads(vendor.json_of(item)))  # more than a float has, if it is a time in nanoseconds
        elif key != "_runtime":  # wandb-core gives it
            items.append(item)
            columns.add(key)
            if key == "_timestamp" and isinstance(given := json.loads(vendor.json_of(item)), (int, float)):
                time = float(given)
    return Row(step, time, items, columns)
