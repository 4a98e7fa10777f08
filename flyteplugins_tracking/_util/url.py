"""Addresses that may hold credentials."""

from __future__ import annotations

import re

# A user, with a password that may have any character but a line end, as those of databases and of careless users have;
# or a token. Not an @ in a path.
CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/@:]*:.*@|(?:[^/\s@]*@)+)")


def without_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment, so that it can be shown and stored."""
    return re.split(r"[?#]", CREDENTIALS.sub("", address.strip()), maxsplit=1)[0].rstrip("/")


def has_credentials(address: str) -> bool:
    """Whether an address has a user or a password before its host."""
    return CREDENTIALS.search(address) is not None
