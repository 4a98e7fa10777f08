"""Trackio's diagnosis for the doctor, without an import of the client."""

from __future__ import annotations

import os

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, check_directory, found_key, server
from flyteplugins_tracking.trackers.trackio import default_directory, without_token


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    url, folder = os.environ.get("TRACKIO_SERVER_URL"), default_directory()
    if not url:
        return Diagnosis(
            place=folder,
            is_chosen=any(name.startswith("TRACKIO_") for name in os.environ),
            diagnostics=check_directory(
                folder, "error", f"Trackio keeps runs in {folder}", "export TRACKIO_DIR=/a/directory"
            ),
        )
    address, name = without_credentials(url), "TRACKIO_WRITE_TOKEN"
    credentials = found_key(name, os.environ.get(name)) or found_key("TRACKIO_SERVER_URL", without_token(url)[1])
    missing = Diagnostic(
        "error",
        f"Trackio: {address} wants a write token, and {name} is not set",
        f"export {name}=..., or secret= of tracking_init; `trackio show` prints it",
    )
    return Diagnosis(
        place=address,
        credentials=credentials,
        is_chosen=True,
        reach=server("a Trackio", f"{address}/version", lambda _, text: '"api_version"' in text),
        diagnostics=() if credentials else (missing,),
    )
