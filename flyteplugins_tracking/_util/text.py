"""Texts of other packages, made fit for a message."""

from __future__ import annotations

import re

# All but tabs and line ends. A terminal obeys some of them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return a text of another process without characters that a terminal obeys."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, without its full stop; the name of its type if it has no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
