"""W&B's diagnosis for the doctor. It reads the sources that `wandb` reads, without importing it: that has effects."""

from __future__ import annotations

import functools
import json
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from flyteplugins_tracking._util.url import without_credentials
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, NotReachedError
from flyteplugins_tracking.trackers.journal import how_to_send
from flyteplugins_tracking.trackers.wandb import vendor

_SERVER = "https://api.wandb.ai"
# W&B's own service has two names: a key that netrc has for one is valid for the other.
_OTHER_NAMES = {"api.forge.coreweave.com": "api.wandb.ai"}
_NOT_ONLINE = ("offline", "disabled", "dryrun")
_MODES = (*_NOT_ONLINE, "online", "shared", "run")
# https://github.com/wandb/wandb/blob/v0.31.0/wandb/sdk/lib/wbauth/validation.py
_SHORTEST_KEY = 40


def diagnose() -> Diagnosis:
    """Return how this tracker is set up in the environment, and what is wrong."""
    stored = _stored_settings()
    mode = os.environ.get("WANDB_MODE") or stored.get("mode") or "online"
    server = os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or vendor.default_server(_SERVER)
    address = without_credentials(server)
    where, key = _key(address, stored)
    is_online = mode not in _NOT_ONLINE
    return Diagnosis(
        place=address if is_online else f"{'nowhere' if mode == 'disabled' else _directory()} ({mode})",
        credentials=diagnostics.found_key(where, key) if key else where or None,
        is_chosen=bool(where) or any(name.startswith("WANDB_") for name in os.environ),
        reach=functools.partial(_reach, address) if is_online else None,
        diagnostics=(*_of_key(where, key, is_online), *_of_mode(mode), *_of_address(server), *_of_surroundings(mode)),
    )


def _stored_settings() -> Mapping[str, str]:
    """Return the settings that `wandb init`, `wandb login --host` and `wandb offline` store. The directory's win."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or os.path.join("~", ".config", "wandb")
    stored: dict[str, str] = {}
    for path in (os.path.join(os.path.expanduser(folder), "settings"), os.path.join(_directory(), "settings")):
        stored |= diagnostics.settings_of(path, "default")
    return stored


def _directory() -> str:
    base = os.path.expanduser(os.environ.get("WANDB_DIR") or os.curdir)
    hidden = os.path.join(base, ".wandb")
    return hidden if os.path.isdir(hidden) else os.path.join(base, "wandb")


def _key(address: str, stored: Mapping[str, str]) -> tuple[str, str]:
    """Return where the key was found, and the key. The key is empty for a token of another kind."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY", os.environ["WANDB_API_KEY"]
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "WANDB_IDENTITY_TOKEN_FILE", ""
    if stored.get("api_key"):
        return "W&B's settings file", stored["api_key"]
    path = os.path.expanduser(os.environ.get("NETRC") or os.path.join("~", ".netrc"))
    if not diagnostics.is_small_file(path):
        return "", ""
    with suppress(OSError, netrc.NetrcParseError, ValueError):
        host, known = urlsplit(address).netloc, netrc.netrc(path)
        entry = known.authenticators(host) or known.authenticators(_OTHER_NAMES.get(host, host))
        return (path, entry[2] or "") if entry and entry[2] else ("", "")
    return "", ""


def _of_key(where: str, key: str, is_online: bool) -> Iterator[Diagnostic]:
    if not where and is_online:
        yield Diagnostic(
            "error",
            "W&B: there is no API key: WANDB_API_KEY is not set, and no netrc file has one for its server",
            "wandb login, or export WANDB_API_KEY=..., or secret= of tracking_init; or WANDB_MODE=offline",
        )
    secret = key.strip().partition("-")[2] or key.strip()
    if key and len(secret) < _SHORTEST_KEY and secret.count(".") != 2:
        yield Diagnostic(
            "error",
            f"W&B: the API key of {where} has {len(key.strip())} characters, and W&B requires at least {_SHORTEST_KEY}",
            "copy it again from https://wandb.ai/authorize, then wandb login --relogin",
        )
    elif key != key.strip():
        yield Diagnostic(
            "warning",
            f"W&B: the API key of {where} has spaces or a line end around it, which W&B refuses",
            f'export WANDB_API_KEY="$(echo ${where})"' if where == "WANDB_API_KEY" else "wandb login --relogin",
        )


def _of_address(server: str) -> Iterator[Diagnostic]:
    if server != server.strip():
        yield Diagnostic(
            "error",
            "W&B: WANDB_BASE_URL has spaces or a line end around it, which W&B refuses",
            'export WANDB_BASE_URL="$(echo $WANDB_BASE_URL)"',
        )


def _of_mode(mode: str) -> Iterator[Diagnostic]:
    if mode not in _MODES:
        yield Diagnostic(
            "error", f"W&B: WANDB_MODE must be one of {', '.join(sorted(_MODES))}, got {mode}", "unset WANDB_MODE"
        )
    elif mode == "disabled":
        yield Diagnostic("warning", "W&B: WANDB_MODE=disabled: nothing is logged", "unset WANDB_MODE, or wandb online")
    elif mode in _NOT_ONLINE:
        yield Diagnostic(
            "warning",
            f"W&B: WANDB_MODE={mode}: runs stay in {_directory()} and nothing is sent",
            f"unset WANDB_MODE, or wandb online; afterwards: {how_to_send(_directory())}/offline-run-*",
        )


def _of_surroundings(mode: str) -> Iterator[Diagnostic]:
    if os.environ.get("WANDB_SERVICE"):
        yield Diagnostic(
            "warning",
            "W&B: WANDB_SERVICE is set: a process above this one has W&B open. This library's runs do not use it; "
            "a run that wandb.init opens outside of this library ends with that process",
            "unset WANDB_SERVICE",
        )
    why = diagnostics.why_unwritable(_directory())
    if why == diagnostics.NO_WORKING_DIRECTORY and mode != "disabled":
        yield Diagnostic("error", f"W&B keeps its files in {_directory()}: {why}", "export WANDB_DIR=/a/directory")
    elif why is not None and mode != "disabled":
        text = f"W&B keeps its files in the directory for temporary files, not in {_directory()}: {why}"
        yield Diagnostic("warning", text, "export WANDB_DIR=/a/directory")


def _reach(address: str, timeout_s: float) -> None:
    """Ask the server whose key this is, without sending one: every W&B server answers that."""
    answer = diagnostics.ask(f"{address}/graphql", timeout_s, b'{"query": "query Viewer { viewer { id } }"}')
    with suppress(ValueError):
        reply = json.loads(answer.text)
        if isinstance(reply, dict) and {"data", "errors"} & reply.keys():
            return
    raise NotReachedError(f"it answers HTTP {answer.status}, and not as a W&B server does")
