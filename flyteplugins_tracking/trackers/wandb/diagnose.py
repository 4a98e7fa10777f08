"""W&B's diagnosis for the doctor. It reads the sources that `wandb` reads, without importing it: that has effects."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, Key, Level
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.wandb import vendor

_SERVER = "https://api.wandb.ai"
# W&B's own service has two names: a key that netrc has for one is valid for the other.
_OTHER_NAMES = {"api.forge.coreweave.com": "api.wandb.ai"}
_NOT_ONLINE = ("offline", "disabled", "dryrun")
_ONLINE = ("online", "shared", "run")
# https://github.com/wandb/wandb/blob/v0.31.0/wandb/sdk/lib/wbauth/validation.py
_SHORTEST_KEY = 40
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
    server = os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or vendor.default_server(_SERVER)
    address, is_online = without_credentials(server), mode not in _NOT_ONLINE
    netrc_file = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    elsewhere = {
        "WANDB_IDENTITY_TOKEN_FILE": "" if os.environ.get("WANDB_IDENTITY_TOKEN_FILE") else None,
        netrc_file: _netrc_key(netrc_file, urlsplit(address).netloc),
        "W&B's settings file": stored.get("api_key"),
    }
    key = diagnostics.find_key("WANDB_API_KEY", elsewhere=elsewhere)
    url, is_wandb = f"{address}/graphql", r'[1-4]\d\d \s*{.*"(data|errors)"\s*:'
    return Diagnosis(
        place=address if is_online else f"{'nowhere' if mode == 'disabled' else directory} ({mode})",
        credentials=key and str(key),
        is_chosen=key is not None or any(name.startswith("WANDB_") for name in os.environ),
        reach=diagnostics.server("a W&B", url, is_wandb, data=_VIEWER) if is_online else None,
        diagnostics=(*_of_key(key, is_online), *_of_files(mode, directory), *vendor.PARTS.limits()),
    )


def _netrc_key(file: str, host: str) -> str | None:
    with suppress(OSError, netrc.NetrcParseError, ValueError):
        if os.path.isfile(file):  # reading a pipe might never end
            known = netrc.netrc(file)
            entry = known.authenticators(host) or known.authenticators(_OTHER_NAMES.get(host, host))
            return (entry and entry[2]) or None
    return None


def _of_key(key: Key | None, is_online: bool) -> Iterator[Diagnostic]:
    value = key.value.strip() if key else ""
    secret = value.partition("-")[2] or value
    if key is None and is_online:
        fix = "wandb login, or export WANDB_API_KEY=..., or secret= of tracking_init; or WANDB_MODE=offline"
        yield Diagnostic("error", "W&B: there is no API key: WANDB_API_KEY is not set, and netrc has none", fix)
    elif key and value and len(secret) < _SHORTEST_KEY and secret.count(".") != 2:
        text = f"W&B: the API key of {key.place} has {len(value)} characters, and W&B requires {_SHORTEST_KEY}"
        yield Diagnostic("error", text, "copy it again from https://wandb.ai/authorize, then wandb login --relogin")
    levels: dict[str, Level] = {"WANDB_API_KEY": "warning", "WANDB_BASE_URL": "error"}
    for name, level in levels.items():
        if os.environ.get(name, "") != os.environ.get(name, "").strip():
            text = f"W&B: {name} has spaces or a line end around it, which W&B refuses"
            yield Diagnostic(level, text, f'export {name}="$(echo ${name})"')


def _of_files(mode: str, directory: str) -> Iterator[Diagnostic]:
    unset = "unset WANDB_MODE, or wandb online"
    if mode not in (*_NOT_ONLINE, *_ONLINE):
        text = f"W&B: WANDB_MODE must be one of {', '.join(sorted((*_NOT_ONLINE, *_ONLINE)))}, got {mode}"
        yield Diagnostic("error", text, "unset WANDB_MODE")
    elif mode == "disabled":
        yield Diagnostic("warning", "W&B: WANDB_MODE=disabled: nothing is logged", unset)
    elif mode in _NOT_ONLINE:
        text = f"W&B: WANDB_MODE={mode}: runs stay in {directory} and nothing is sent"
        yield Diagnostic("warning", text, f"{unset}; afterwards: {how_to_send(directory)}/offline-run-*")
    if os.environ.get("WANDB_SERVICE"):
        text = "WANDB_SERVICE is set: a run that wandb.init opens outside of this library ends with the process above"
        yield Diagnostic("warning", f"W&B: {text}", "unset WANDB_SERVICE")
    why = diagnostics.why_unwritable(directory)
    if why is not None and mode != "disabled":
        is_gone = why == diagnostics.NO_WORKING_DIRECTORY  # otherwise wandb has another
        place = directory if is_gone else f"the directory for temporary files, not in {directory}"
        text = f"W&B keeps its files in {place}: {why}"
        yield Diagnostic("error" if is_gone else "warning", text, "export WANDB_DIR=/a/directory")
