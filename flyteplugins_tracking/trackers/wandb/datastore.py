"""Read a `.wandb` file, also from its end, and write more records behind those of wandb-core.

The file is a log in the format of LevelDB after a header of 7 bytes. wandb has no reader for Python.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from flyteplugins_tracking._util.files import is_own_file, open_own, replace_whole
from flyteplugins_tracking._util.warn_once import WarnOnce

_warn_once = WarnOnce(logging.getLogger(__name__))
_START = b":W&B\xe1\xbe\x00"
_HEADER, _BLOCK = len(_START), 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def file_in(directory: Path) -> Path | None:
    """Return this user's `.wandb` file in a run's directory; None if there is none. Others may have made more there."""
    return next(filter(is_own_file, sorted(directory.glob("*.wandb"))), None)


def windows(path: Path, first_blocks: int = 8) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the file's last records, each time four times as many; and whether these are all records."""
    blocks = -(-path.stat().st_size // _BLOCK)
    count = first_blocks
    while True:
        skipped = max(0, blocks - count)
        yield list(records(path, skipped)), not skipped
        if not skipped:
            return
        count *= 4


def records(path: Path, block: int = 0) -> Iterator[bytes]:
    """Yield the records that begin at this block of 32 KiB or later.

    A torn end, as a kill leaves it, is left out. So is a damaged record, with a warning.

    Raises:
        OSError: The file cannot be read, or is another user's.
    """
    with open(open_own(path), "rb") as file:
        file.seek(block * _BLOCK)
        data = file.read()
    position, parts, is_begun, is_damaged = 0 if block else _HEADER, b"", False, False
    while position + _FRAGMENT.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _FRAGMENT.size:  # padding at the end of a block
            position += left
            continue
        kind, fragment = _fragment_at(data, position)
        if not kind:
            # Its length may be damaged too: then the next block is the next place where a fragment begins.
            end = position + _FRAGMENT.size + len(fragment)
            position = end if end % _BLOCK and _fragment_at(data, end)[0] else position + left
            is_begun, is_damaged = False, True
            continue
        if is_damaged:
            _warn_once(str(path), "%s is damaged: the records at that place are left out", path)
        position += _FRAGMENT.size + len(fragment)
        if kind in (_FULL, _FIRST):
            parts, is_begun = fragment, True
        elif is_begun:
            parts += fragment
        if kind in (_FULL, _LAST) and is_begun:
            yield parts
            is_begun = False


def add(path: Path, more: Sequence[bytes]) -> None:
    """Write records behind those of a file that nobody writes anymore. What is torn or damaged in it is left out.

    Raises:
        OSError: The file cannot be read or written. It stays as it was.
    """
    content = bytearray(_START)
    for record in (*(records(path) if path.exists() else ()), *more):
        rest, is_first = record, True
        while is_first or rest:
            left = _BLOCK - len(content) % _BLOCK
            if left < _FRAGMENT.size:
                content += bytes(left)
                continue
            part, rest = rest[: left - _FRAGMENT.size], rest[left - _FRAGMENT.size :]
            kind = (_MIDDLE if rest else _LAST) if not is_first else (_FIRST if rest else _FULL)
            content += _FRAGMENT.pack(zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            is_first = False
    replace_whole(path, bytes(content), 0o644)


def _fragment_at(data: bytes, start: int) -> tuple[int, bytes]:
    """Return the kind and the bytes of the fragment at a place; a kind of 0 if it is torn or damaged."""
    begin = start + _FRAGMENT.size
    if begin > len(data):
        return 0, b""
    checksum, length, kind = _FRAGMENT.unpack_from(data, start)
    fragment = data[begin : begin + length]
    is_whole = len(fragment) == length and checksum == zlib.crc32(bytes([kind]) + fragment)
    return kind if is_whole and _FULL <= kind <= _LAST else 0, fragment
