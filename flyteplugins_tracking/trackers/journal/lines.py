"""The records of trackers whose rows are plain values: a line is a mapping, with a row, a call, an event or the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flyteplugins_tracking.trackers.journal.files import Entry

# Made once: `json.dumps` with these arguments would make one for each row.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def encode(line: Mapping[str, Any]) -> bytes:
    """Return a line as a record: JSON, which a reader cannot be made to run.

    Raises:
        TypeError: JSON cannot hold a value.
        ValueError: JSON cannot hold a value.
    """
    try:
        return _encode(line).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise ValueError("a value is nested too deeply, or contains itself") from None


def decode(record: bytes) -> Mapping[str, Any]:
    """Return the line of a record.

    Raises:
        ValueError: It is no line.
    """
    try:
        line = json.loads(record.decode("utf-8", "surrogatepass"))
    except RecursionError:
        line = None
    if not isinstance(line, dict):
        raise ValueError("a record is no line")
    return line


def decode_all(entries: Sequence[Entry]) -> list[Mapping[str, Any]]:
    """Return the lines of records. One that is no line is left out: its writer was no version of this package."""
    lines = []
    for entry in entries:
        with suppress(ValueError):
            lines.append(decode(entry.data))
    return lines


def exit_code_in(lines: Sequence[Mapping[str, Any]]) -> int:
    """Return the status that a run's lines end with; 1 if its process was killed before it could tell."""
    return next((line["exit_code"] for line in reversed(lines) if "exit_code" in line), 1)
