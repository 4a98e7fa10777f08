"""Pluto's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import base64
import os
from contextlib import suppress

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic

# https://github.com/Trainy-ai/pluto, _DEFAULT_URL_API of version 0.0.29.
_SERVER = "https://pluto-api.trainy.ai"
_SERVERS = ("APP", "API", "INGEST", "PY")


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    servers = {name: _variable(f"URL_{name}") for name in _SERVERS}
    address = without_credentials(servers["API"] or _SERVER)
    credentials, folder = _credentials(), _variable("DIR") or os.curdir
    problems = [
        *diagnostics.check_directory(
            folder, "error", f"Pluto keeps its files in {folder}", "export PLUTO_DIR=/a/directory"
        )
    ]
    if not credentials:
        text = "there is no API key: PLUTO_API_KEY is not set, and `pluto login` has not stored a key in a file"
        fix = "pluto login, or export PLUTO_API_KEY=..., or secret= of tracking_init"
        problems.append(Diagnostic("error", f"Pluto: {text}", fix))
    missing = [f"PLUTO_URL_{name}" for name, value in servers.items() if not value]
    if missing and len(missing) < len(servers):
        text = f"{', '.join(missing)} not set, but the others are: a part of each run goes to Pluto's own servers"
        problems.append(Diagnostic("error", f"Pluto: {text}", f"export {' '.join(f'{name}=...' for name in missing)}"))
    return Diagnosis(
        place=address,
        credentials=credentials,
        is_chosen=bool(credentials) or any(servers.values()),
        # The client's first request: it asks for the key's owner.
        reach=diagnostics.server(
            "a Pluto", f"{address}/api/slug", lambda status, _: status in (200, 400, 401, 403), b""
        ),
        diagnostics=tuple(problems),
    )


def _variable(name: str) -> str | None:
    return os.environ.get(f"PLUTO_{name}") or os.environ.get(f"MLOP_{name}")


def _credentials() -> str | None:
    """Return where the key is: in a variable, or in the file of `pluto login` on Linux."""
    for name in ("PLUTO_API_KEY", "MLOP_API_TOKEN"):
        if os.environ.get(name):
            return diagnostics.found_key(name, os.environ[name])
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    path = os.path.join(base, "python_keyring", "keyring_pass.cfg")
    with suppress(ValueError):
        stored = diagnostics.settings_of(path, "pluto").get("pluto", "")
        return diagnostics.found_key(path, base64.decodebytes(stored.encode()).decode())
    return None
