"""Which versions are installed, told by their metadata: nothing of them is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata

from flyteplugins_tracking.trackers.diagnostics import Diagnostic

OWN = "flyteplugins-tracking"
_SHOWN = re.compile(r"flytekit|flyte|torch|(flyteplugins|flytekitplugins)-.+|transformers|accelerate|lightning")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;\s]*)\s*;\s*extra == ['\"](\w+)['\"]")
# What depends on the others, and says nothing of its own about them.
_NO_USERS = ("dev", "examples")
_OTHER_DECORATORS = ("flyteplugins-wandb", "flytekitplugins-wandb", "flyteplugins-mlflow", "flyteplugins-trackio")


def versions() -> dict[str, str]:
    """Of Python, this library, and what it works with."""
    found = {"python": platform.python_version(), OWN: version(OWN) or "not installed"}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _SHOWN.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items(), key=lambda item: (item[0] not in ("python", OWN), item[0])))


def version(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> Iterator[tuple[str, str, str]]:
    """What this library's extras want: extra, distribution and versions."""
    try:
        texts = metadata.requires(OWN) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        match = _REQUIREMENT.fullmatch(text.strip())
        if match and match[3] not in _NO_USERS:
            yield match[3], match[1], match[2]


def check_versions(found: Mapping[str, str]) -> Iterator[Diagnostic]:
    """What is installed and does not go together."""
    for extra, distribution, wanted in requirements():
        installed = version(distribution)
        if installed is not None and not _fits(installed, wanted):
            text = f"{distribution} {installed} is installed, and this library is made for {wanted}"
            yield Diagnostic("warning", text, f'pip install --upgrade "{OWN}[{extra}]"')
    for name in _OTHER_DECORATORS:
        if name in found:
            text = f"{name} is installed: its decorators and these do not know of each other. Do not stack them"
            fix = "from flyteplugins_tracking.compat.wandb import wandb_init" if name.endswith("wandb") else ""
            yield Diagnostic("note", text, fix)


def _fits(installed: str, wanted: str) -> bool:
    """As far as `<` and `>=` go, which is what the extras have."""
    have = _numbers(installed)
    for operator, bound in re.findall(r"(<|>=)([\d.]+)", wanted):
        if (have < _numbers(bound)) is not (operator == "<"):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
