"""The installed versions, from the metadata of the packages: none is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata

from flyteplugins_tracking.trackers.diagnostics import Diagnostic

OWN = "flyteplugins-tracking"
_SHOWN = re.compile(r"flytekit|flyte|torch|(flyteplugins|flytekitplugins)-.+|transformers|accelerate|lightning")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;\s]*)\s*;\s*extra == ['\"](\w+)['\"]")
# Extras for development: they depend on the other extras.
_DEVELOPMENT_EXTRAS = ("dev", "examples")
_OTHER_DECORATORS = ("flyteplugins-wandb", "flytekitplugins-wandb", "flyteplugins-mlflow", "flyteplugins-trackio")


def versions() -> dict[str, str]:
    """Return the versions of Python, this library, and the packages that it works with."""
    installed = {"python": platform.python_version(), OWN: version(OWN) or "not installed"}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _SHOWN.fullmatch(name):
            installed.setdefault(name, distribution.version)
    return dict(sorted(installed.items(), key=lambda item: (item[0] not in ("python", OWN), item[0])))


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> Iterator[tuple[str, str, str]]:
    """Yield the requirements of this library's extras: extra, distribution and versions."""
    try:
        texts = metadata.requires(OWN) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        match = _REQUIREMENT.fullmatch(text.strip())
        if match and match[3] not in _DEVELOPMENT_EXTRAS:
            yield match[3], match[1], match[2]


def check_versions(installed_versions: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the installed packages that do not work together."""
    for extra, distribution, required in requirements():
        installed = version(distribution)
        if installed is not None and not _fits(installed, required):
            text = f"{distribution} {installed} is installed, but this library needs {required}"
            yield Diagnostic("warning", text, f'pip install --upgrade "{OWN}[{extra}]"')
    for name in _OTHER_DECORATORS:
        if name in installed_versions:
            text = f"{name} is installed: do not stack its decorators with these. They do not know of each other"
            fix = "from flyteplugins_tracking.compat.wandb import wandb_init" if name.endswith("wandb") else ""
            yield Diagnostic("note", text, fix)


def _fits(installed: str, required: str) -> bool:
    """Whether a version meets a requirement with `<` and `>=`. The extras use no other operators."""
    version_numbers = _numbers(installed)
    for operator, bound in re.findall(r"(<|>=)([\d.]+)", required):
        if (version_numbers < _numbers(bound)) is not (operator == "<"):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
