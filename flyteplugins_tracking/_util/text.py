"""Texts of other packages, and addresses, made fit to be shown and stored."""

from __future__ import annotations

import re

# All but tabs and line ends. A terminal obeys some of them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A user, such as a mail address, with a password that may have any character, as those of databases and of careless
# users have; or a token. Not an @ in a path.
CREDENTIALS = re.compile(r"(?<=://)(?:[^/:]*:.*@|(?:[^/\s@]*@)+)", re.DOTALL)


def printable(text: str) -> str:
    """Return a text of another process without characters that a terminal obeys."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, without its full stop; the name of its type if it has no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def without_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment, so that it can be shown and stored."""
    return re.split(r"[?#]", CREDENTIALS.sub("", address.strip()), maxsplit=1)[0].rstrip("/")


def has_credentials(address: str) -> bool:
    """Whether an address has a user or a password before its host."""
    return CREDENTIALS.search(address) is not None
