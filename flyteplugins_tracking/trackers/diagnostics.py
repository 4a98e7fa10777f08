"""A tracker's diagnosis for the doctor: what is wrong, and whether the server answers. It never holds a key."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]
# The part of an answer that is read: its first lines identify the server.
_MOST_BYTES = 65_536
_LARGEST_FILE = 1_000_000
NO_WORKING_DIRECTORY = "the working directory has been removed"


class Diagnostic(NamedTuple):
    """A problem, or a fact worth knowing.

    Attributes:
        level: "error": it cannot work. "warning": it may not be what the user means. "note": good to know.
        text: The problem, with the value.
        fix: What to do, if possible as a command.
    """

    level: Level
    text: str
    fix: str = ""


class Diagnosis(NamedTuple):
    """How a tracker is set up in this environment.

    Attributes:
        place: Where runs go: an address without credentials, or a directory.
        credentials: Where a key was found, as `found_key` describes it.
        is_chosen: Whether this tracker is set up here: by a key, a server or another variable.
        reach: Asks the server, without a key, within the seconds that it is called with. It raises an error that says
            why the server cannot be used. None if there is no server.
        diagnostics: The problems.
    """

    place: str | None = None
    credentials: str | None = None
    is_chosen: bool = False
    reach: Callable[[float], object] | None = None
    diagnostics: tuple[Diagnostic, ...] = ()


class Answer(NamedTuple):
    """The answer of an HTTP server."""

    status: int
    text: str


class NotReachedError(Exception):
    """A server does not answer, or answers with an error. The text says why."""


def found_key(where: str, key: str) -> str:
    """Describe a key without showing a part of it: where it was found, and its length."""
    return f"{where} ({len(key)} characters)"


def is_small_file(path: str) -> bool:
    """Whether `path` is a regular file of less than 1 MB. Reading a pipe or a device might never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_FILE


def settings_of(path: str, section: str) -> dict[str, str]:
    """Return a section of a file of settings; empty if it cannot be read."""
    import configparser  # slow, and few ranks need it

    parser = configparser.RawConfigParser()
    try:
        if is_small_file(path):
            parser.read(path)
        return dict(parser.items(section))
    except (configparser.Error, OSError, ValueError):
        return {}


def ask(url: str, timeout_s: float, data: bytes | None = None) -> Answer:
    """Send one request without credentials: a POST if there is `data`, else a GET.

    Raises:
        NotReachedError: The server does not answer, or a proxy answers for a server that has failed.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.lower().startswith(("https://", "http://")):
        raise NotReachedError("the address must begin with https:// or http://")
    headers = {"Content-Type": "application/json", "User-Agent": "flyteplugins-tracking"}
    try:
        with urlopen(Request(url, data, headers), timeout=timeout_s) as answer:  # noqa: S310 the scheme is checked
            return Answer(answer.status, answer.read(_MOST_BYTES).decode(errors="replace"))
    except HTTPError as error:
        if error.code >= 500:
            raise NotReachedError(f"it answers HTTP {error.code}") from None
        return Answer(error.code, error.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        raise NotReachedError(f"it does not answer: {getattr(error, 'reason', None) or error}") from None


def why_unwritable(directory: str) -> str | None:
    """Return why files cannot be written below `directory`, which need not exist yet; None if they can."""
    try:
        place = os.path.abspath(os.path.expanduser(directory))
    except FileNotFoundError:
        return NO_WORKING_DIRECTORY
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is not a directory"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to"
