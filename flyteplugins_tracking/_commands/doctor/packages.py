"""The trackers and the installed packages: what is set up in this environment, and what does not work together.

A tracker's own checks are in its `diagnose`. The versions are from the packages' metadata: none is imported.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers
from flyteplugins_tracking.trackers.vendor_parts import numbers

OWN = "flyteplugins-tracking"
_DEFAULT = "wandb"
# How long the servers may take to answer. They are asked at the same time.
_ANSWER_S = 5.0
_OTHER_DECORATORS = ("flyteplugins-wandb", "flytekitplugins-wandb", "flyteplugins-mlflow", "flyteplugins-trackio")
_FRAMEWORKS = ("accelerate", "flyte", "flytekit", "flytekitplugins-kfpytorch", "flyteplugins-pytorch", "lightning")
_SHOWN = sorted((*_FRAMEWORKS, "torch", "transformers", *_OTHER_DECORATORS))
# A requirement of an extra: distribution, versions and extra. Those for development depend on the other extras.
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*([^;\s]*)\s*;\s*extra == ['\"](?!dev|examples)(\w+)['\"]$", re.MULTILINE)


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
    examined: dict[str, tuple[Tracker, Diagnosis, str | None]] = {}
    states, problems = [], []
    for each in [name] if name else names_of_trackers():
        try:
            tracker = find_tracker(each)
            examined[each] = tracker, tracker.diagnose(), _version_of(tracker)
        except (Exception, SystemExit) as error:  # another package's tracker may be broken
            text = f"tracker {each!r} cannot be examined: {str(error) or type(error).__name__}"
            problems.append(Diagnostic("error" if name else "warning", text))
    installed = [each for each, (_, _, version) in examined.items() if version is not None]
    chosen = [each for each, (_, diagnosis, _) in examined.items() if diagnosis.is_chosen]
    meant = [name] if name else chosen or ([_DEFAULT] if _DEFAULT in installed else installed)
    answers = _ask({each: examined[each][1] for each in installed if asks and each in meant})
    for each, (tracker, diagnosis, version) in examined.items():
        install = f"pip install {tracker.distribution or tracker.package}"
        answer = answers.get(each)
        state = {
            "name": each,
            "title": tracker.title,
            "version": version,
            "install": install,
            "place": diagnosis.place,
            "credentials": diagnosis.credentials,
            "is_chosen": diagnosis.is_chosen,
            "reachable": None if answer is None else answer == "",
        }
        states.append(state)
        if each in installed and each in meant:
            problems += diagnosis.diagnostics
        elif each in meant:
            text = f"{tracker.title} is not installed{'' if name else ', but it is set up here'}"
            problems.append(Diagnostic("error" if name else "warning", text, install))
        if answer:
            text = f"{tracker.title}: the server at {diagnosis.place} cannot be used: {answer}"
            fix = "check its address and the network (a proxy by HTTPS_PROXY); or log to local files"
            problems.append(Diagnostic("error", text, f"{fix}: if_unavailable='degrade'"))
    if not installed and name is None:
        problems.append(Diagnostic("error", "no tracker is installed", f'pip install "{OWN}[{_DEFAULT}]"'))
    return states, problems


def _version_of(tracker: Tracker) -> str | None:
    """Return the version of the vendor's package; "" if it is unknown, None if the package is not installed."""
    if tracker.package is None:
        return ""
    if find_spec(tracker.package) is None:
        return None
    names = [tracker.package, *(each for each, (_, extra) in _requirements().items() if extra == tracker.name)]
    names.append(f"{tracker.package}-skinny")  # of MLflow, it is enough
    return next((installed for installed in map(_version, names) if installed), "")


def _ask(diagnoses: Mapping[str, Diagnosis]) -> dict[str, str]:
    """Ask all servers at the same time. Return "" for each that can be used, else the reason why not."""
    reaches = {name: diagnosis.reach for name, diagnosis in diagnoses.items() if diagnosis.reach is not None}
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
    own = {OWN: _version(OWN) or "not installed", "python": platform.python_version()}
    return own | {name: version for name in _SHOWN if (version := _version(name)) is not None}


def check_versions(installed_versions: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the installed packages that do not work together."""
    for distribution, (required, extra) in _requirements().items():
        version = _version(distribution) or ""
        # The extras have no other operators.
        fits = [
            (numbers(version) < numbers(bound)) is (operator == "<")
            for operator, bound in re.findall(r"(<|>=)([\d.]+)", required)
        ]
        if version and not all(fits):
            text = f"{distribution} {version} is installed, but this library needs {required}"
            yield Diagnostic("warning", text, f'pip install --upgrade "{OWN}[{extra}]"')
    for name in _OTHER_DECORATORS:
        if name in installed_versions:
            text = f"{name} is installed: do not stack its decorators with these. They do not know of each other"
            fix = "from flyteplugins_tracking.compat.wandb import wandb_init" if name.endswith("wandb") else ""
            yield Diagnostic("note", text, fix)


def _requirements() -> dict[str, tuple[str, str]]:
    """Return the versions that this library's extras require, and the extra, by distribution."""
    texts = metadata.requires(OWN) or () if _version(OWN) else ()
    # Extras that consist of others come before these: they are in the order of the alphabet, from `demo` to `wandb`.
    return {distribution: (required, extra) for distribution, required, extra in _REQUIREMENT.findall("\n".join(texts))}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
