"""Trackio's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import functools
import json
import os
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, NotReachedError
from flyteplugins_tracking.trackers.trackio.options import default_directory


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    server_url = os.environ.get("TRACKIO_SERVER_URL")
    is_chosen = any(name.startswith("TRACKIO_") for name in os.environ)
    if not server_url:
        return _of_files(is_chosen)
    address, token = without_credentials(server_url), os.environ.get("TRACKIO_WRITE_TOKEN")
    with suppress(ValueError, LookupError):
        token = token or parse_qs(urlsplit(server_url).query)["write_token"][0]
    missing_token = Diagnostic(
        "error",
        f"Trackio: {address} wants a write token, and TRACKIO_WRITE_TOKEN is not set",
        "export TRACKIO_WRITE_TOKEN=..., or secret= of tracking_init; `trackio show` prints it",
    )
    where = "TRACKIO_WRITE_TOKEN" if os.environ.get("TRACKIO_WRITE_TOKEN") else "TRACKIO_SERVER_URL"
    return Diagnosis(
        place=address,
        credentials=diagnostics.found_key(where, token) if token else None,
        is_chosen=True,
        reach=functools.partial(_reach, address),
        diagnostics=() if token else (missing_token,),
    )


def _of_files(is_chosen: bool) -> Diagnosis:
    folder = default_directory()
    why = diagnostics.why_unwritable(folder)
    wrong = Diagnostic("error", f"Trackio keeps runs in {folder}: {why}", "export TRACKIO_DIR=/a/directory")
    return Diagnosis(place=folder, is_chosen=is_chosen, diagnostics=() if why is None else (wrong,))


def _reach(address: str, timeout_s: float) -> None:
    answer = diagnostics.ask(f"{address}/version", timeout_s)
    with suppress(ValueError):
        version = json.loads(answer.text)
        if isinstance(version, dict) and "api_version" in version:
            return
    raise NotReachedError(f"it answers HTTP {answer.status}, and not as a Trackio server does")
