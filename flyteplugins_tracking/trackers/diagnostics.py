"""A tracker's diagnosis: what is wrong with its setup, and whether the server answers. It never holds a key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple, get_args

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
# The part of an answer that is read: its first lines identify the server.
_MOST_BYTES = 65_536


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
        credentials: Where a key was found, as a variable or a file.
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


def find_key(*variables: str, elsewhere: Mapping[str, object]) -> str | None:
    """Return where a key is; None if there is none.

    Args:
        *variables: The variables that may hold a key.
        elsewhere: What was found in other places, by the place: anything false where nothing was.
    """
    found = {**{name: os.environ.get(name) for name in variables}, **elsewhere}
    return next((place for place, value in found.items() if value), None)


def settings_of(path: str, section: str) -> dict[str, str]:
    """Return a section of a file of settings; empty if it cannot be read."""
    import configparser  # slow, and few ranks need it

    parser = configparser.RawConfigParser()
    with suppress(configparser.Error, OSError, ValueError):
        if os.path.isfile(path := os.path.expanduser(path)):  # reading a pipe or a device might never end
            parser.read(path)
            return {name: value for name, value in parser.items(section) if value}
    return {}


def server(service: str, url: str, answer: str, *, data: bytes | None = None) -> Callable[[float], None]:
    """Return a function for `Diagnosis.reach`, which sends one request without credentials.

    Args:
        service: What the server should be, such as "a W&B".
        url: The address to ask.
        answer: The regular expression of such a server's answers: the status, a space and the text. A proxy answers for
            a server that has failed, with a status from 500 on.
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
            response = urlopen(Request(url, data, headers), timeout=timeout_s)  # noqa: S310 the scheme is checked
        except HTTPError as error:
            response = error
        except (OSError, ValueError, HTTPException) as error:
            raise ConnectionError(f"it does not answer: {getattr(error, 'reason', None) or error}") from None
        with response:
            text = f"{response.status} {response.read(_MOST_BYTES).decode(errors='replace')}"
        if not re.match(answer, text, re.DOTALL):
            raise ConnectionError(f"it answers HTTP {response.status}, and not as {service} server does")

    return reach


def check_directory(directory: str, level: Level, text: str, fix: str) -> tuple[Diagnostic, ...]:
    """Return the diagnostic `text`, with the reason, if files cannot be written below `directory`."""
    why = why_unwritable(directory)
    return () if why is None else (Diagnostic(level, f"{text}: {why}", fix),)


def why_unwritable(directory: str) -> str | None:
    """Return why files cannot be written below `directory`, which need not exist yet; None if they can."""
    place = os.path.abspath(os.path.expanduser(directory))
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is not a directory"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to"
