"""W&B's diagnosis for the doctor. It reads the sources that `wandb` reads, without importing it: that has effects."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.vendor_parts import client_version, numbers

# The servers of W&B's own service, and the first client that uses the second one by default.
_SERVER, _LATER_SERVER, _FIRST_LATER = "https://api.wandb.ai", "https://api.forge.coreweave.com", [0, 31]
# W&B's own service has two names: a key that netrc has for one is valid for the other.
_OTHER_NAMES = {"api.forge.coreweave.com": "api.wandb.ai"}
_NOT_ONLINE = ("offline", "disabled", "dryrun")
# Every W&B server answers this question, whose key it is, also without a key.
_VIEWER = b'{"query": "query Viewer { viewer { id } }"}'


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    base = os.path.expanduser(os.environ.get("WANDB_DIR") or os.curdir)
    hidden = os.path.join(base, ".wandb")
    directory = hidden if os.path.isdir(hidden) else os.path.join(base, "wandb")
    stored: dict[str, str] = {}  # what `wandb init`, `wandb login --host` and `wandb offline` store
    for folder in (os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", directory):  # the last wins
        stored |= diagnostics.settings_of(os.path.join(folder, "settings"), "default")
    mode = os.environ.get("WANDB_MODE") or stored.get("mode") or "online"
    default = _LATER_SERVER if numbers(client_version("wandb")) >= _FIRST_LATER else _SERVER
    server = os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or default
    address, is_online = without_credentials(server), mode not in _NOT_ONLINE
    netrc_file = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    elsewhere = {
        "WANDB_IDENTITY_TOKEN_FILE": os.environ.get("WANDB_IDENTITY_TOKEN_FILE"),
        netrc_file: _netrc_key(netrc_file, urlsplit(address).netloc),
        "W&B's settings file": stored.get("api_key"),
    }
    key = diagnostics.find_key("WANDB_API_KEY", elsewhere=elsewhere)
    url, is_wandb = f"{address}/graphql", r'[1-4]\d\d \s*{.*"(data|errors)"\s*:'
    return Diagnosis(
        place=address if is_online else f"{'nowhere' if mode == 'disabled' else directory} ({mode})",
        credentials=key,
        is_chosen=key is not None or any(name.startswith("WANDB_") for name in os.environ),
        reach=diagnostics.server("a W&B", url, is_wandb, data=_VIEWER) if is_online else None,
        diagnostics=(*_of_key(key, is_online), *_of_files(mode, directory)),
    )


def _netrc_key(file: str, host: str) -> str | None:
    with suppress(OSError, netrc.NetrcParseError, ValueError):
        if os.path.isfile(file):  # reading a pipe might never end
            known = netrc.netrc(file)
            entry = known.authenticators(host) or known.authenticators(_OTHER_NAMES.get(host, host))
            return (entry and entry[2]) or None
    return None


def _of_key(key: str | None, is_online: bool) -> Iterator[Diagnostic]:
    if key is None and is_online:
        fix = "wandb login, or export WANDB_API_KEY=..., or secret= of tracking_init; or WANDB_MODE=offline"
        yield Diagnostic("error", "W&B: there is no API key: WANDB_API_KEY is not set, and netrc has none", fix)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        value = os.environ.get(name, "")
        if value != value.strip():
            text = f"W&B: {name} has spaces or a line end around it, which W&B refuses"
            yield Diagnostic("error", text, f'export {name}="$(echo ${name})"')


def _of_files(mode: str, directory: str) -> Iterator[Diagnostic]:
    if mode in _NOT_ONLINE:
        what = "nothing is logged" if mode == "disabled" else f"runs stay in {directory} and nothing is sent"
        send = "" if mode == "disabled" else f"; afterwards: {how_to_send(directory)}"
        yield Diagnostic("warning", f"W&B: WANDB_MODE={mode}: {what}", f"unset WANDB_MODE, or wandb online{send}")
    why = None if mode == "disabled" else diagnostics.why_unwritable(directory)
    if why is not None:
        text = f"W&B cannot keep its files in {directory}, and may have none, or another directory: {why}"
        yield Diagnostic("warning", text, "export WANDB_DIR=/a/directory")
