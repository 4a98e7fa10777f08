"""W&B's diagnosis for the doctor. It reads the sources that `wandb` reads, without importing it: that has effects."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.journal import how_to_send
from flyteplugins_tracking.trackers.wandb import vendor

_SERVER = "https://api.wandb.ai"
# W&B's own service has two names: a key that netrc has for one is valid for the other.
_OTHER_NAMES = {"api.forge.coreweave.com": "api.wandb.ai"}
_NOT_ONLINE = ("offline", "disabled", "dryrun")
_MODES = (*_NOT_ONLINE, "online", "shared", "run")
# https://github.com/wandb/wandb/blob/v0.31.0/wandb/sdk/lib/wbauth/validation.py
_SHORTEST_KEY = 40
# Every W&B server answers this question, whose key it is, also without a key.
_VIEWER = b'{"query": "query Viewer { viewer { id } }"}'
_ANSWER = re.compile(r'\s*{.*"(data|errors)"\s*:', re.DOTALL)


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    base = os.path.expanduser(os.environ.get("WANDB_DIR") or os.curdir)
    hidden = os.path.join(base, ".wandb")
    directory = hidden if os.path.isdir(hidden) else os.path.join(base, "wandb")
    stored: dict[str, str] = {}  # what `wandb init`, `wandb login --host` and `wandb offline` store
    for folder in (os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", directory):  # the last wins
        stored |= diagnostics.settings_of(os.path.join(os.path.expanduser(folder), "settings"), "default")
    mode = os.environ.get("WANDB_MODE") or stored.get("mode") or "online"
    server = os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or vendor.default_server(_SERVER)
    address, is_online = without_credentials(server), mode not in _NOT_ONLINE
    where, key = _key(address, stored)
    reach = None
    if is_online:
        reach = diagnostics.server("a W&B", f"{address}/graphql", lambda _, text: _ANSWER.match(text), _VIEWER)
    return Diagnosis(
        place=address if is_online else f"{'nowhere' if mode == 'disabled' else directory} ({mode})",
        credentials=diagnostics.found_key(stored={where: key}) or where or None,
        is_chosen=bool(where) or any(name.startswith("WANDB_") for name in os.environ),
        reach=reach,
        diagnostics=(
            *_of_key(where, key, is_online),
            *_of_variables(mode, server, directory),
            *vendor.PARTS.limits(),
        ),
    )


def _key(address: str, stored: Mapping[str, str]) -> tuple[str, str]:
    """Return where the key was found, and the key. The key is empty for a token of another kind."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY", os.environ["WANDB_API_KEY"]
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "WANDB_IDENTITY_TOKEN_FILE", ""
    path = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    with suppress(OSError, netrc.NetrcParseError, ValueError):
        if os.path.isfile(path):  # reading a pipe might never end
            host, known = urlsplit(address).netloc, netrc.netrc(path)
            entry = known.authenticators(host) or known.authenticators(_OTHER_NAMES.get(host, host))
            if entry and entry[2]:
                return path, entry[2]
    return ("W&B's settings file", stored["api_key"]) if stored.get("api_key") else ("", "")


def _of_key(where: str, key: str, is_online: bool) -> Iterator[Diagnostic]:
    secret = key.strip().partition("-")[2] or key.strip()
    if not where and is_online:
        text = "there is no API key: WANDB_API_KEY is not set, and no netrc file has one for its server"
        fix = "wandb login, or export WANDB_API_KEY=..., or secret= of tracking_init; or WANDB_MODE=offline"
        yield Diagnostic("error", f"W&B: {text}", fix)
    elif key and len(secret) < _SHORTEST_KEY and secret.count(".") != 2:
        text = f"the API key of {where} has {len(key.strip())} characters, and W&B requires at least {_SHORTEST_KEY}"
        fix = "copy it again from https://wandb.ai/authorize, then wandb login --relogin"
        yield Diagnostic("error", f"W&B: {text}", fix)
    elif key != key.strip():
        text = f"the API key of {where} has spaces or a line end around it, which W&B refuses"
        fix = f'export WANDB_API_KEY="$(echo ${where})"' if where == "WANDB_API_KEY" else "wandb login --relogin"
        yield Diagnostic("warning", f"W&B: {text}", fix)


def _of_variables(mode: str, server: str, directory: str) -> Iterator[Diagnostic]:
    if mode not in _MODES:
        text = f"WANDB_MODE must be one of {', '.join(sorted(_MODES))}, got {mode}"
        yield Diagnostic("error", f"W&B: {text}", "unset WANDB_MODE")
    elif mode == "disabled":
        yield Diagnostic("warning", "W&B: WANDB_MODE=disabled: nothing is logged", "unset WANDB_MODE, or wandb online")
    elif mode in _NOT_ONLINE:
        text = f"W&B: WANDB_MODE={mode}: runs stay in {directory} and nothing is sent"
        fix = f"unset WANDB_MODE, or wandb online; afterwards: {how_to_send(directory)}/offline-run-*"
        yield Diagnostic("warning", text, fix)
    if server != server.strip():
        text = "W&B: WANDB_BASE_URL has spaces or a line end around it, which W&B refuses"
        yield Diagnostic("error", text, 'export WANDB_BASE_URL="$(echo $WANDB_BASE_URL)"')
    if os.environ.get("WANDB_SERVICE"):
        text = (
            "W&B: WANDB_SERVICE is set: a process above this one has W&B open. This library's runs do not use it; "
            "a run that wandb.init opens outside of this library ends with that process"
        )
        yield Diagnostic("warning", text, "unset WANDB_SERVICE")
    why = diagnostics.why_unwritable(directory)
    if why is not None and mode != "disabled":
        is_gone = why == diagnostics.NO_WORKING_DIRECTORY  # otherwise wandb has another
        place = f"in {directory}" if is_gone else f"in the directory for temporary files, not in {directory}"
        text = f"W&B keeps its files {place}: {why}"
        yield Diagnostic("error" if is_gone else "warning", text, "export WANDB_DIR=/a/directory")
