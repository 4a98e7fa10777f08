"""The rules for W&B's run ids and addresses. Does not import `wandb`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.errors import ConfigError

# Our argument: wandb.init has a setting for it.
HOST = "host"
# A run id must not contain these: https://docs.wandb.ai/models/ref/python/functions/init
_NOT_IN_AN_ID = "/\\#?%:"
_APP = "https://wandb.ai"
# The pages of W&B's own services, by the addresses of the servers that clients talk to.
_APPS = {"https://api.wandb.ai": _APP, "https://api.forge.coreweave.com": "https://forge.coreweave.com/wandb"}


def forced_run_id() -> str | None:
    """The id of every run that is opened in a trial of a sweep, whatever id was asked for."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def check_id(run_id: str | None) -> None:
    """Refuse an id with a character that W&B does not accept.

    Raises:
        ConfigError: It has one.
    """
    bad = sorted(set(run_id or "") & set(_NOT_IN_AN_ID))
    if bad:
        raise ConfigError(
            f"run id {run_id!r} contains {' '.join(bad)}, which W&B does not accept in an id: use letters, digits, "
            "- and _"
        )


def check_host(host: object) -> None:
    """Refuse a `host=` that is not an address.

    Raises:
        ConfigError: It is not.
    """
    if host is not None and not (isinstance(host, str) and host.startswith(("https://", "http://"))):
        raise ConfigError(f"host= must be an address such as 'https://wandb.example.com', got {host!r}")


def app(config: TrackingConfig) -> str:
    """The address that people open: `host=`, or that of the server that the client talks to."""
    settings = config.options.get("settings")
    base_url = settings.get("base_url") if isinstance(settings, Mapping) else getattr(settings, "base_url", None)
    server = os.environ.get("WANDB_APP_URL") or os.environ.get("WANDB_BASE_URL") or base_url or _APP
    address = str(config.options.get(HOST) or server).rstrip("/")
    return without_credentials(_APPS.get(address, address))


def api_of(host: str) -> str | None:
    """Return the address of the API for the address of the pages; None for W&B's own service, which wandb knows."""
    return None if host.rstrip("/") in _APPS.values() else host


def quoted(name: str) -> str:
    """Quote a name for an address. Flyte's templates ({{...}}) stay as they are."""
    return quote(name, safe="{}")
