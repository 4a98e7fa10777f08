"""Pluto's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Iterator
from contextlib import suppress

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, NotReachedError

# https://github.com/Trainy-ai/pluto, _DEFAULT_URL_API of version 0.0.29.
_SERVER = "https://pluto-api.trainy.ai"
_SERVERS = ("APP", "API", "INGEST", "PY")


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    servers = {name: _variable(f"URL_{name}") for name in _SERVERS}
    address = without_credentials(servers["API"] or _SERVER)
    where, key = _key()
    return Diagnosis(
        place=address,
        credentials=diagnostics.found_key(where, key) if key else None,
        is_chosen=bool(key) or any(servers.values()),
        reach=functools.partial(_reach, address),
        diagnostics=(*_of_key(key), *_of_servers(servers), *_of_files()),
    )


def _variable(name: str) -> str | None:
    return os.environ.get(f"PLUTO_{name}") or os.environ.get(f"MLOP_{name}")


def _key() -> tuple[str, str]:
    """Return where the key was found, and the key: a variable, or the file of `pluto login` on Linux."""
    for name in ("PLUTO_API_KEY", "MLOP_API_TOKEN"):
        if os.environ.get(name):
            return name, os.environ[name]
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    path = os.path.join(base, "python_keyring", "keyring_pass.cfg")
    with suppress(LookupError, ValueError):
        return path, base64.decodebytes(diagnostics.settings_of(path, "pluto")["pluto"].encode()).decode()
    return "", ""


def _of_key(key: str) -> Iterator[Diagnostic]:
    if not key:
        yield Diagnostic(
            "error",
            "Pluto: there is no API key: PLUTO_API_KEY is not set, and `pluto login` has not stored a key in a file",
            "pluto login, or export PLUTO_API_KEY=..., or secret= of tracking_init",
        )


def _of_servers(servers: dict[str, str | None]) -> Iterator[Diagnostic]:
    missing = [f"PLUTO_URL_{name}" for name, value in servers.items() if not value]
    if missing and len(missing) < len(servers):
        yield Diagnostic(
            "error",
            f"Pluto: {', '.join(missing)} not set, but the others are: a part of each run goes to Pluto's own servers",
            f"export {' '.join(f'{name}=...' for name in missing)}",
        )


def _of_files() -> Iterator[Diagnostic]:
    folder = _variable("DIR") or os.curdir
    why = diagnostics.why_unwritable(folder)
    if why is not None:
        yield Diagnostic("error", f"Pluto keeps its files in {folder}: {why}", "export PLUTO_DIR=/a/directory")


def _reach(address: str, timeout_s: float) -> None:
    """Send the client's first request, which asks for the key's owner, without a key."""
    answer = diagnostics.ask(f"{address}/api/slug", timeout_s, b"")
    if answer.status not in (200, 400, 401, 403):
        raise NotReachedError(f"it answers HTTP {answer.status}, and not as a Pluto server does")
