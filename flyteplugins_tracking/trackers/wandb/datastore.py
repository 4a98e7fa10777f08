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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flyteplugins_tracking._util.files import is_own_file, open_own
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.wandb import vendor

_warn_once = WarnOnce(logging.getLogger(__name__))
_HEADER, _BLOCK = 7, 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_DAMAGED, _FULL, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3, 4
_heads: dict[Path, tuple[Any, Row]] = {}


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


def rows(directory: Path) -> Iterator[Row]:
    """Yield the rows of a directory's file. Behind the run's end, where `wandb sync` reads none, there may be more."""
    file = file_in(directory)
    for kind, record in map(vendor.parse_record, records(file)) if file is not None else ():
        if kind == "history":
            yield row_of(record)
        if kind == "exit":
            return


def last_rows(directory: Path) -> list[Row]:
    """Return the rows near the end of a directory's file: none only if it has none."""
    file = file_in(directory)
    block, back = (0 if file is None else _last_block(file)), 1
    while file is not None:
        parsed = map(vendor.parse_record, records(file, block))
        found = [row_of(record) for kind, record in parsed if kind == "history"]
        if found or not block:
            return found
        block, back = max(0, block - back), 2 * back
    return []


def _last_block(file: Path) -> int:
    """Return the last block but one."""
    return max(0, file.stat().st_size // _BLOCK - 1)


def position_before(file: Path, step: int) -> int:
    """Return a place in a file from which on its rows are read that have this step, or a higher one; and one before."""
    block, back = _last_block(file), 1
    while step > 0 and block > 0:
        parsed = map(vendor.parse_record, records(file, block))
        first = next((record for kind, record in parsed if kind == "history"), None)
        if first is not None and row_of(first).step < step:
            return block * _BLOCK
        block, back = block - back, 2 * back
    return 0


def saved_files(directory: Path) -> list[str]:
    """Return the names of the files that were saved for the run, also of those of rows. They are below "files"."""
    file = file_in(directory)
    parsed = map(vendor.parse_record, records(file)) if file is not None else ()
    return list(dict.fromkeys(item.path for kind, record in parsed if kind == "files" for item in record.files))


def artifacts(directory: Path) -> Iterator[bytes]:
    """Yield the artifacts of a run that was logged offline, serialized."""
    file = file_in(directory)
    parsed = map(vendor.parse_record, records(file)) if file is not None else ()
    yield from (record.SerializeToString() for kind, record in parsed if kind == "artifact")


def exit_code(directory: Path) -> int | None:
    """Return the status of the run's end, which wandb-core writes last, and not after a failure; None for none."""
    file = file_in(directory)
    parsed = map(vendor.parse_record, records(file, _last_block(file))) if file is not None else ()
    return next((int(record.exit_code) for kind, record in parsed if kind == "exit"), None)


def description(directory: Path) -> Any:
    """Return the record with which the run was opened; None if its process was killed before it had written any.

    Raises:
        TrackerUnavailableError: It is damaged, or another user's.
    """
    file = file_in(directory)
    if file is None and any(directory.glob("*.wandb")):
        text = f"{directory} was not sent: its .wandb file is not a file of this user"
        raise TrackerUnavailableError(text, is_outage=False)
    described, first = (None, None) if file is None else _head(file)
    if described is None and first is not None:
        raise TrackerUnavailableError(f"{file} is damaged: it has rows, and does not say which run they are of")
    return described


def first_row(directory: Path) -> Row | None:
    """Return the first row of a directory's file; None if there is none."""
    file = file_in(directory)
    return None if file is None else _head(file)[1]


def _head(file: Path) -> tuple[Any, Row | None]:
    """Return the record with which the run was opened, and the first row. What a file begins with stays as it is."""
    described = first = None
    for kind, record in map(vendor.parse_record, records(file)) if file not in _heads else ():
        described = record if kind == "run" and described is None else described
        first = row_of(record) if kind == "history" and first is None else first
        if described is not None and first is not None:
            _heads[file] = described, first
            break
    return _heads.get(file, (described, first))


def started_at(directory: Path) -> float | None:
    """Return when the run was opened, in seconds since the epoch; None if that is not known."""
    described = description(directory)
    return None if described is None else float(described.start_time.ToMicroseconds() / 1e6)


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


def records(path: Path, block: int = 0) -> Iterator[bytes]:
    """Yield the records that begin at this block of 32 KiB or later.

    A torn end, as a kill leaves it, is left out. So is a damaged record, with a warning.

    Raises:
        OSError: The file cannot be read, or is another user's.
    """
    yield from (record for _, record in records_from(path, block * _BLOCK))


def records_from(path: Path, position: int, *, is_written: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the records from a position in the file on, each with the position behind it. One block is in memory.

    Args:
        path: The file.
        position: 0, that of a block, or the last one that was yielded.
        is_written: Whether a process still writes: what looks damaged has not been written completely.
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
