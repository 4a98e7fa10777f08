"""Texts of other packages, made fit for a message."""

from __future__ import annotations


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, without its full stop; the name of its type if it has no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
