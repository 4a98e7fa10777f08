"""Read what W&B wrote: the `.wandb` file of each run under a directory.

W&B ships no reader for Python. The file is a log in the format of LevelDB
(https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes; its records are protobufs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class StoredRun:
    """One `.wandb` file: what one process wrote to one run.

    Attributes:
        exit_code: None where the run was not finished.
    """

    path: Path
    id: str = ""
    group: str = ""
    project: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read_runs(directory: Path) -> list[StoredRun]:
    """All runs stored under `directory`, in the order of their start."""
    return sorted(
        (read_run(path) for path in directory.rglob("*.wandb")), key=lambda run: (run.path.parent.name, run.id)
    )


def read_run(path: Path) -> StoredRun:
    """The run stored in one `.wandb` file, as far as it was written."""
    from wandb.proto import wandb_internal_pb2

    run = StoredRun(path)
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        _add(run, record)
    return run


def _add(run: StoredRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.id, run.group, run.project = record.run.run_id, record.run.run_group, record.run.project
        run.name, run.tags = record.run.display_name, tuple(record.run.tags)
        run.config.update(_values(record.run.config.update))
    elif kind == "config":
        run.config.update(_values(record.config.update))
    elif kind == "history":
        run.rows.append(_values(record.history.item))
    elif kind == "summary":
        run.summary.update(_values(record.summary.update))
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """The log's records, each put together from its fragments. A torn end, as a kill leaves it, ends the log."""
    position, parts = _HEADER, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:  # padding at the end of a block
            position += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        fragment = data[position + 7 : position + 7 + length]
        if len(fragment) < length or checksum != zlib.crc32(bytes([kind]) + fragment):
            return
        position += 7 + length
        parts = fragment if kind in (_FULL, _FIRST) else parts + fragment
        if kind in (_FULL, _LAST):
            yield parts
