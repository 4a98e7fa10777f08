"""The trackers and the installed packages: what is set up in this environment, and what does not work together.

A tracker's own checks are in its `diagnose`. The versions are from the packages' metadata: none is imported.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, Level
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers

OWN = "flyteplugins-tracking"
_DEFAULT = "wandb"
# How long the servers may take to answer. They are asked at the same time.
_ANSWER_S = 5.0
_SHOWN = re.compile(r"flytekit|flyte|torch|(flyteplugins|flytekitplugins)-.+|transformers|accelerate|lightning")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;\s]*)\s*;\s*extra == ['\"](\w+)['\"]")
# Extras for development: they depend on the other extras.
_DEVELOPMENT_EXTRAS = ("dev", "examples")
_OTHER_DECORATORS = ("flyteplugins-wandb", "flytekitplugins-wandb", "flyteplugins-mlflow", "flyteplugins-trackio")


def trackers(name: str | None, *, asks: bool) -> tuple[list[dict[str, Any]], list[Diagnostic]]:
    """Return the state of each tracker, and the problems of the trackers that the user means.

    The user means the tracker `name`. Without a name: the trackers that are set up here; if there are none, the default
    tracker; if that is not installed, all trackers.

    Args:
        name: The only tracker to examine; None for all trackers.
        asks: Whether to ask the servers.

    Raises:
        ConfigError: There is no tracker of that name.
    """
    if name is not None:
        find_tracker(name)
    states, diagnoses, problems = _examined([name] if name else names_of_trackers(), "error" if name else "warning")
    installed = [state["name"] for state in states if state["version"] is not None]
    chosen = [state["name"] for state in states if state["is_chosen"]]
    meant = [name] if name else chosen or ([_DEFAULT] if _DEFAULT in installed else installed)
    reaches = {each: reach for each in installed if asks and each in meant and (reach := diagnoses[each].reach)}
    answers = _ask(reaches)
    for state in states:
        each, title = state["name"], state["title"]
        if each in answers:
            state["reachable"] = answers[each] == ""
        if each in installed and each in meant:
            problems += diagnoses[each].diagnostics
        elif each == name:
            problems.append(Diagnostic("error", f"{title} is not installed", state["install"]))
        elif each in meant:
            problems.append(Diagnostic("warning", f"{title} is not installed, but it is set up here", state["install"]))
        if answers.get(each):
            text = f"{title}: the server at {state['place']} cannot be used: {answers[each]}"
            fix = "check its address and the network (a proxy by HTTPS_PROXY); or log to local files"
            problems.append(Diagnostic("error", text, f"{fix}: if_unavailable='degrade'"))
    if not installed and name is None:
        problems.append(Diagnostic("error", "no tracker is installed", f'pip install "{OWN}[{_DEFAULT}]"'))
    return states, problems


def _examined(
    names: Sequence[str], level: Level
) -> tuple[list[dict[str, Any]], dict[str, Diagnosis], list[Diagnostic]]:
    states, diagnoses, problems = [], {}, []
    for name in names:
        try:
            tracker = find_tracker(name)
            diagnosis = tracker.diagnose()
            state = {
                "name": name,
                "title": tracker.title,
                "version": _version_of(tracker),
                "install": f"pip install {tracker.distribution or tracker.package}",
                "place": diagnosis.place,
                "credentials": diagnosis.credentials,
                "is_chosen": diagnosis.is_chosen,
                "reachable": None,
            }
        except (Exception, SystemExit) as error:  # another package's tracker may be broken
            text = f"tracker {name!r} cannot be examined: {str(error) or type(error).__name__}"
            problems.append(Diagnostic(level, text))
            continue
        states.append(state)
        diagnoses[name] = diagnosis
    return states, diagnoses, problems


def _version_of(tracker: Tracker) -> str | None:
    """Return the version of the vendor's package; "" if it is unknown, None if the package is not installed."""
    if tracker.package is None:
        return ""
    if find_spec(tracker.package) is None:
        return None
    names = [tracker.package, *(distribution for extra, distribution, _ in _requirements() if extra == tracker.name)]
    return next((installed for installed in map(_version, names) if installed), "")


def _ask(reaches: Mapping[str, Callable[[float], object]]) -> dict[str, str]:
    """Ask all servers at the same time. Return "" for each that can be used, else the reason why not."""
    answers = dict.fromkeys(reaches, f"it does not answer within {_ANSWER_S:.0f} s")

    def ask(name: str) -> None:
        try:
            reaches[name](_ANSWER_S)
            answers[name] = ""
        except Exception as error:
            answers[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in reaches]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ANSWER_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)  # a late answer does not change it


def versions() -> dict[str, str]:
    """Return the versions of Python, this library, and the packages that it works with."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _SHOWN.fullmatch(name):
            found.setdefault(name, distribution.version)
    own = {OWN: _version(OWN) or "not installed", "python": platform.python_version()}
    return own | {name: found[name] for name in sorted(found) if name != OWN}


def check_versions(installed_versions: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the installed packages that do not work together."""
    for extra, distribution, required in _requirements():
        installed = _version(distribution)
        if installed is not None and not _fits(installed, required):
            text = f"{distribution} {installed} is installed, but this library needs {required}"
            yield Diagnostic("warning", text, f'pip install --upgrade "{OWN}[{extra}]"')
    for name in _OTHER_DECORATORS:
        if name in installed_versions:
            text = f"{name} is installed: do not stack its decorators with these. They do not know of each other"
            fix = "from flyteplugins_tracking.compat.wandb import wandb_init" if name.endswith("wandb") else ""
            yield Diagnostic("note", text, fix)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield the requirements of this library's extras: extra, distribution and versions."""
    texts = metadata.requires(OWN) or [] if _version(OWN) else []
    for match in filter(None, (_REQUIREMENT.fullmatch(text.strip()) for text in texts)):
        if match[3] not in _DEVELOPMENT_EXTRAS:
            yield match[3], match[1], match[2]


def _fits(installed: str, required: str) -> bool:
    """Whether a version meets a requirement with `<` and `>=`. The extras use no other operators."""
    bounds = re.findall(r"(<|>=)([\d.]+)", required)
    return all((_numbers(installed) < _numbers(bound)) is (operator == "<") for operator, bound in bounds)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
