"""W&B's ids, addresses and variables, without `wandb`: a rank without a run loads no more than these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from flyteplugins_tracking._util.checks import check_no_password
from flyteplugins_tracking._util.proc import environment
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.config import TrackingConfig

# Our argument: wandb.init has a setting for it.
HOST = "host"
# A run id and a project must not contain these: https://docs.wandb.ai/models/ref/python/functions/init
_NOT_IN_AN_ID = "/\\#?%:"
_APP = "https://wandb.ai"
# The pages of W&B's own services, by the addresses of the servers that clients talk to.
_APPS = {"https://api.wandb.ai": _APP, "https://api.forge.coreweave.com": "https://forge.coreweave.com/wandb"}


def forced_run_id() -> str | None:
    """The id of every run that is opened in a trial of a sweep, whatever id was asked for."""
    return os.environ.get("WANDB_RUN_ID", "").strip() or None if os.environ.get("WANDB_SWEEP_ID", "").strip() else None


def drop_empty_variables() -> None:
    """Have W&B's variables that are empty, as templates leave them, count as not set: wandb refuses some of them."""
    for name in [name for name, value in environment().items() if name.startswith("WANDB_") and not value.strip()]:
        os.environ.pop(name, None)


def check_characters(subject: str, text: str | None, place: str) -> None:
    """Refuse an id or a project with a character that W&B does not accept.

    Args:
        subject: What it is, in the message.
        text: The id or the project.
        place: What W&B does not accept the character in.

    Raises:
        ConfigError: It has one.
    """
    bad = sorted(set(text or "") & set(_NOT_IN_AN_ID))
    if bad:
        raise ConfigError(
            f"{subject} {text!r} contains {' '.join(bad)}, which W&B does not accept in {place}: use letters, digits, "
            "- and _"
        )


def check_host(host: object) -> None:
    """Refuse a `host=` that is not an address, or holds a password.

    Raises:
        ConfigError: It is not.
    """
    if host is not None and not (isinstance(host, str) and host.startswith(("https://", "http://"))):
        raise ConfigError(f"host= must be an address such as 'https://wandb.example.com', got {host!r}")
    check_no_password("host=", host, "set WANDB_BASE_URL where the task runs")


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user has set in the `settings=` of these arguments: a mapping, or a `wandb.Settings`."""
    settings = options.get("settings") or {}
    if isinstance(settings, Mapping):
        return dict(settings)
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def app(config: TrackingConfig) -> str:
    """The address that people open: `host=`, or that of the server that the client talks to."""
    base_url = given_settings(config.options).get("base_url")
    server = os.environ.get("WANDB_APP_URL") or os.environ.get("WANDB_BASE_URL") or base_url or _APP
    address = str(config.options.get(HOST) or server).rstrip("/")
    return without_credentials(_APPS.get(address, address))


def api_of(host: str) -> str | None:
    """Return the address of the API for the address of the pages; None for W&B's own service, which wandb knows."""
    return None if host.rstrip("/") in _APPS.values() else host


def quoted(name: str) -> str:
    """Quote a name for an address. Flyte's templates ({{...}}) stay as they are."""
    return quote(name, safe="{}")
