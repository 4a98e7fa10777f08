"""What a tracker tells the doctor: what it has found, and how to see whether a server answers. Never a key."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]
# How much of an answer is read: who it is is told in its first lines.
_MOST_BYTES = 65_536
_LARGEST_FILE = 1_000_000
NO_WORKING_DIRECTORY = "the working directory has been removed"


@dataclass(frozen=True)
class Diagnostic:
    """Something that is wrong, or worth knowing.

    Attributes:
        level: "error": what is asked for cannot work. "warning": it may not be what is meant. "note": good to know.
        text: What is wrong, with the value.
        fix: What to do, as a command where there is one.
    """

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What a tracker finds in its environment, without an effect on anything.

    Attributes:
        place: Where runs would go: an address without credentials, or a directory.
        credentials: Where a key was found: see `found_key`.
        is_chosen: Whether somebody has set this tracker up here: by a key, a server or another variable.
        reach: Asks the server, within so many seconds and without a key, and raises what says why it cannot be used.
            None where there is nothing to ask.
        diagnostics: What is wrong.
    """

    place: str | None = None
    credentials: str | None = None
    is_chosen: bool = False
    reach: Callable[[float], object] | None = None
    diagnostics: tuple[Diagnostic, ...] = ()


class Answer(NamedTuple):
    """What an HTTP server has answered."""

    status: int
    text: str


class NotReachedError(Exception):
    """A server does not answer, or not as it should: the text says why."""


def found_key(where: str, key: str) -> str:
    """How a key is shown: where it was found and how long it is, and nothing of it."""
    return f"{where} ({len(key)} characters)"


def without_credentials(address: str) -> str:
    """An address that may be shown: without user, password and query."""
    # Up to the last @: the passwords that databases' addresses have may contain any other character.
    address = re.sub(r"(?<=://).*@", "", address.strip())
    return re.split(r"[?#]", address, maxsplit=1)[0].rstrip("/")


def is_small_file(path: str) -> bool:
    """Whether `path` can be read at once. A pipe or a device might never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_FILE


def settings_of(path: str, section: str) -> dict[str, str]:
    """What a file of settings has in a section: nothing where it cannot be read."""
    import configparser  # which torch does not load, nor most ranks need

    parser = configparser.RawConfigParser()
    try:
        if is_small_file(path):
            parser.read(path)
        return dict(parser.items(section))
    except (configparser.Error, OSError, ValueError):
        return {}


def ask(url: str, timeout_s: float, data: bytes | None = None) -> Answer:
    """Send one request without credentials; a POST where there is `data`.

    Raises:
        NotReachedError: There is no answer, or only that something behind a proxy has failed.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.lower().startswith(("https://", "http://")):
        raise NotReachedError("this is no address of a server: it begins with neither https:// nor http://")
    headers = {"Content-Type": "application/json", "User-Agent": "flyteplugins-tracking"}
    try:
        with urlopen(Request(url, data, headers), timeout=timeout_s) as answer:  # noqa: S310 its scheme is looked at
            return Answer(answer.status, answer.read(_MOST_BYTES).decode(errors="replace"))
    except HTTPError as error:
        if error.code >= 500:
            raise NotReachedError(f"it answers HTTP {error.code}") from None
        return Answer(error.code, error.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        raise NotReachedError(f"it does not answer: {getattr(error, 'reason', None) or error}") from None


def why_unwritable(directory: str) -> str | None:
    """Why files cannot be written below `directory`, which need not be there yet; None where they can."""
    try:
        place = os.path.abspath(os.path.expanduser(directory))
    except FileNotFoundError:
        return NO_WORKING_DIRECTORY
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is no directory"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to"
