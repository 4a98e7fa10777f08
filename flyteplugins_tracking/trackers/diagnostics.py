"""A tracker's diagnosis for the doctor: what is wrong, and whether the server answers. It never holds a key."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]
# The part of an answer that is read: its first lines identify the server.
_MOST_BYTES = 65_536
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


def found_key(*variables: str, stored: Mapping[str, str | None] | None = None) -> str | None:
    """Describe the first key without showing a part of it: where it was found, and its length. None if there is none.

    Args:
        *variables: The variables that may hold a key.
        stored: The keys that were found elsewhere, by their place.
    """
    keys = {**{name: os.environ.get(name) for name in variables}, **(stored or {})}
    return next((f"{where} ({len(key)} characters)" for where, key in keys.items() if key), None)


def settings_of(path: str, section: str) -> dict[str, str]:
    """Return a section of a file of settings; empty if it cannot be read."""
    import configparser  # slow, and few ranks need it

    parser = configparser.RawConfigParser()
    try:
        if os.path.isfile(path):  # reading a pipe or a device might never end
            parser.read(path)
        return dict(parser.items(section))
    except (configparser.Error, OSError, ValueError):
        return {}


def server(
    service: str, url: str, is_right: Callable[[int, str], object], data: bytes | None = None
) -> Callable[[float], None]:
    """Return a function for `Diagnosis.reach`, which sends one request without credentials.

    Args:
        service: What the server should be, such as "a W&B".
        url: The address to ask.
        is_right: Whether the status and the text of an answer are such a server's.
        data: The body of a POST; None for a GET.

    Returns:
        A function that raises a ConnectionError: the server does not answer, or not as it should.
    """

    def reach(timeout_s: float) -> None:
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        if not url.lower().startswith(("https://", "http://")):
            raise ConnectionError("the address must begin with https:// or http://")
        headers = {"Content-Type": "application/json", "User-Agent": "flyteplugins-tracking"}
        try:
            try:
                answer = urlopen(Request(url, data, headers), timeout=timeout_s)  # noqa: S310 the scheme is checked
            except HTTPError as error:
                answer = error
            with answer:
                status, text = answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
        except (OSError, ValueError, HTTPException) as error:
            raise ConnectionError(f"it does not answer: {getattr(error, 'reason', None) or error}") from None
        if status >= 500:  # a proxy answers so for a server that has failed
            raise ConnectionError(f"it answers HTTP {status}")
        if not is_right(status, text):
            raise ConnectionError(f"it answers HTTP {status}, and not as {service} server does")

    return reach


def check_directory(directory: str, level: Level, text: str, fix: str) -> tuple[Diagnostic, ...]:
    """Return the diagnostic `text`, with the reason, if files cannot be written below `directory`."""
    why = why_unwritable(directory)
    return () if why is None else (Diagnostic(level, f"{text}: {why}", fix),)


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
