"""The trackers here: installed, reachable, and with a key. What is special about one is in its `examine`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

from flyteplugins_tracking.doctor.report import TrackerState
from flyteplugins_tracking.doctor.versions import OWN, requirements, version
from flyteplugins_tracking.trackers.diagnostics import Examination, Finding, Level
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers

_DEFAULT = "wandb"
# How long servers may take to answer, all together.
_ANSWER_S = 5.0


def examine_trackers(name: str | None, *, asks: bool) -> tuple[tuple[TrackerState, ...], list[Finding]]:
    """The state of each tracker, and what is wrong with those that are meant to be used.

    Those are the one that is named; else those that somebody has set up here; else the default one; else all.

    Args:
        name: Look at this one alone.
        asks: Whether to ask their servers.

    Raises:
        ConfigError: There is none of that name.
    """
    if name is not None:
        find_tracker(name)
    names, level = ([name], "error") if name else (names_of_trackers(), "warning")
    states, examinations, findings = _examined(names, cast(Level, level))
    installed = [state.name for state in states if state.version is not None]
    meant = [name] if name else _meant(states, installed)
    answers = _ask({n: examinations[n] for n in installed if examinations[n].reach and n in meant} if asks else {})
    for state in states:
        findings += _of_missing(state, is_named=state.name == name)
        if state.name in meant and state.name in installed:
            findings += _of_tracker(state, examinations[state.name], answers.get(state.name))
    if not installed and name is None:
        findings.append(Finding("error", "no tracker is installed", f'pip install "{OWN}[{_DEFAULT}]"'))
    reached = {n: answer == "" for n, answer in answers.items()}
    return tuple(replace(state, reachable=reached.get(state.name)) for state in states), findings


def _examined(names: Sequence[str], level: Level) -> tuple[list[TrackerState], dict[str, Examination], list[Finding]]:
    states, examinations, findings = [], {}, []
    for name in names:
        try:
            tracker = find_tracker(name)
            found = tracker.examine()
            states.append(_state(name, tracker, found))
        except (Exception, SystemExit) as error:  # another package's, and a broken one is what the doctor is for
            findings.append(
                Finding(level, f"tracker {name!r} cannot be examined: {str(error) or type(error).__name__}", "")
            )
            continue
        examinations[name] = found
    return states, examinations, findings


def _state(name: str, tracker: Any, found: Examination) -> TrackerState:
    return TrackerState(
        name=name,
        title=tracker.title,
        version=_version(tracker),
        install=f"pip install {tracker.distribution or tracker.package}",
        place=found.place,
        credentials=found.credentials,
        is_chosen=found.is_chosen,
    )


def _version(tracker: Any) -> str | None:
    package = tracker.package
    if package is None:
        return ""
    if find_spec(package) is None:
        return None
    of_extra = [distribution for extra, distribution, _ in requirements() if extra == tracker.name]
    return next((found for found in map(version, (package, *of_extra)) if found), "")


def _meant(states: Sequence[TrackerState], installed: Sequence[str]) -> Sequence[str]:
    chosen = [state.name for state in states if state.is_chosen]
    return chosen or ([_DEFAULT] if _DEFAULT in installed else installed)


def _of_missing(state: TrackerState, *, is_named: bool) -> list[Finding]:
    if state.version is not None or not (is_named or state.is_chosen):
        return []
    why = "" if is_named else ", though it is set up here"
    return [Finding("error" if is_named else "warning", f"{state.title} is not installed{why}", state.install)]


def _of_tracker(state: TrackerState, found: Examination, answer: str | None) -> list[Finding]:
    if not answer:
        return list(found.findings)
    text = f"{state.title}: the server at {state.place} cannot be used: {answer}"
    mend = "check its address and the network (a proxy by HTTPS_PROXY); or go on without: if_unavailable='degrade'"
    return [*found.findings, Finding("error", text, mend)]


def _ask(examinations: Mapping[str, Examination]) -> dict[str, str]:
    """Ask all servers, side by side: "" for those that can be used, else the reason."""
    answers: dict[str, str] = {}

    def ask(name: str, reach: Any) -> None:
        try:
            reach(_ANSWER_S)
            answers[name] = ""
        except Exception as error:
            answers[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=ask, args=(n, e.reach), daemon=True) for n, e in examinations.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ANSWER_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"it does not answer within {_ANSWER_S:.0f} s"
    return {name: answers.get(name, late) for name in examinations}
