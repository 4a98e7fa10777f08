"""The trackers in this environment: whether they are installed, can be reached and have a key.

A tracker's own checks are in its `diagnose`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

from flyteplugins_tracking._commands.doctor.report import TrackerState
from flyteplugins_tracking._commands.doctor.versions import OWN, requirements, version
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, Level
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers

_DEFAULT = "wandb"
# How long the servers may take to answer. They are asked at the same time.
_ANSWER_S = 5.0


def diagnose_trackers(name: str | None, *, asks: bool) -> tuple[tuple[TrackerState, ...], list[Diagnostic]]:
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
    names, level = ([name], "error") if name else (names_of_trackers(), "warning")
    states, diagnoses, diagnostics = _examined(names, cast(Level, level))
    installed = [state.name for state in states if state.version is not None]
    meant = [name] if name else _meant(states, installed)
    answers = _ask({n: diagnoses[n] for n in installed if diagnoses[n].reach and n in meant} if asks else {})
    for state in states:
        diagnostics += _problems_if_missing(state, is_named=state.name == name)
        if state.name in meant and state.name in installed:
            diagnostics += _problems(state, diagnoses[state.name], answers.get(state.name))
    if not installed and name is None:
        diagnostics.append(Diagnostic("error", "no tracker is installed", f'pip install "{OWN}[{_DEFAULT}]"'))
    reached = {n: answer == "" for n, answer in answers.items()}
    return tuple(replace(state, reachable=reached.get(state.name)) for state in states), diagnostics


def _examined(names: Sequence[str], level: Level) -> tuple[list[TrackerState], dict[str, Diagnosis], list[Diagnostic]]:
    states, diagnoses, diagnostics = [], {}, []
    for name in names:
        try:
            tracker = find_tracker(name)
            diagnosis = tracker.diagnose()
            states.append(_state(name, tracker, diagnosis))
        except (Exception, SystemExit) as error:  # another package's tracker may be broken: report it
            diagnostics.append(
                Diagnostic(level, f"tracker {name!r} cannot be examined: {str(error) or type(error).__name__}", "")
            )
            continue
        diagnoses[name] = diagnosis
    return states, diagnoses, diagnostics


def _state(name: str, tracker: Any, diagnosis: Diagnosis) -> TrackerState:
    return TrackerState(
        name=name,
        title=tracker.title,
        version=_version(tracker),
        install=f"pip install {tracker.distribution or tracker.package}",
        place=diagnosis.place,
        credentials=diagnosis.credentials,
        is_chosen=diagnosis.is_chosen,
    )


def _version(tracker: Any) -> str | None:
    package = tracker.package
    if package is None:
        return ""
    if find_spec(package) is None:
        return None
    distributions = [distribution for extra, distribution, _ in requirements() if extra == tracker.name]
    return next((installed for installed in map(version, (package, *distributions)) if installed), "")


def _meant(states: Sequence[TrackerState], installed: Sequence[str]) -> Sequence[str]:
    chosen = [state.name for state in states if state.is_chosen]
    return chosen or ([_DEFAULT] if _DEFAULT in installed else installed)


def _problems_if_missing(state: TrackerState, *, is_named: bool) -> list[Diagnostic]:
    if state.version is not None or not (is_named or state.is_chosen):
        return []
    contrast = "" if is_named else ", but it is set up here"
    return [Diagnostic("error" if is_named else "warning", f"{state.title} is not installed{contrast}", state.install)]


def _problems(state: TrackerState, diagnosis: Diagnosis, answer: str | None) -> list[Diagnostic]:
    if not answer:
        return list(diagnosis.diagnostics)
    text = f"{state.title}: the server at {state.place} cannot be used: {answer}"
    fix = "check its address and the network (a proxy by HTTPS_PROXY); or log to local files: if_unavailable='degrade'"
    return [*diagnosis.diagnostics, Diagnostic("error", text, fix)]


def _ask(diagnoses: Mapping[str, Diagnosis]) -> dict[str, str]:
    """Ask all servers at the same time. Returns "" for each that can be used, else the reason why not."""
    answers: dict[str, str] = {}

    def ask(name: str, reach: Any) -> None:
        try:
            reach(_ANSWER_S)
            answers[name] = ""
        except Exception as error:
            answers[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=ask, args=(n, e.reach), daemon=True) for n, e in diagnoses.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ANSWER_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"it does not answer within {_ANSWER_S:.0f} s"
    return {name: answers.get(name, late) for name in diagnoses}
