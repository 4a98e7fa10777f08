"""Read a `.wandb` file: the records that wandb-core has written, also from the end of a file.

The file is a log in the format of LevelDB after a header of 7 bytes. wandb has no reader for Python.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 32 * 1024
_FRAGMENT = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def file_in(directory: Path) -> Path | None:
    """Return the `.wandb` file of a run's directory; None if there is none."""
    return next(directory.glob("*.wandb"), None)


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
    """Yield the records that begin at this block of 32 KiB or later. A torn end, as a kill leaves it, ends them."""
    with path.open("rb") as file:
        file.seek(block * _BLOCK)
        data = file.read()
    position, parts, is_begun = 0 if block else _HEADER, b"", False
    while position + _FRAGMENT.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _FRAGMENT.size:  # padding at the end of a block
            position += left
            continue
        checksum, length, kind = _FRAGMENT.unpack_from(data, position)
        position += _FRAGMENT.size
        fragment = data[position : position + length]
        if len(fragment) < length or checksum != zlib.crc32(bytes([kind]) + fragment):
            return
        position += length
        if kind in (_FULL, _FIRST):
            parts, is_begun = fragment, True
        elif is_begun:
            parts += fragment
        if kind in (_FULL, _LAST) and is_begun:
            yield parts
            is_begun = False
