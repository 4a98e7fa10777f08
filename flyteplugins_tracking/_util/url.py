"""Addresses that may hold credentials."""

from __future__ import annotations

import re


def without_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment, so that it can be shown."""
    # Up to the last @: the passwords in addresses of databases may contain any other character.
    address = re.sub(r"(?<=://).*@", "", address.strip())
    return re.split(r"[?#]", address, maxsplit=1)[0].rstrip("/")


def has_credentials(address: str) -> bool:
    """Whether an address has a user or a password before its host."""
    return "@" in address.partition("://")[2].partition("/")[0]
