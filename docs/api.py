"""Writes the reference of the public names from their docstrings, as plain Markdown: `make includes`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import flyteplugins_tracking as package
from flyteplugins_tracking import testing, trackers

# The names of each section of the page, and those that need no section.
PUBLIC = {
    "The decorator": (
        *("tracking_init", "tracking_run", "get_run", "tracking_config"),
        *("heartbeat", "should_stop", "request_stop"),
    ),
    "Ranks and runs": (
        *("get_distributed_info", "DistributedInfo", "override_distributed_info"),
        *("plan", "RunPlan"),
    ),
    "Values of all ranks": ("prefix_metrics", "process_group"),
    "Sweeps": ("tracking_sweep", "tracking_sweep_config", "get_sweep_id", "get_sweep_parameters"),
}
TYPES = (
    *("RunMode", "RankScope", "TrackingError", "ConfigError", "TopologyError", "IdentityError"),
    *("TrackerUnavailableError", "TrackerNotInstalledError"),
)
# What no guide says: shown whole.
_WHOLE = {"tracking_config"}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$", re.MULTILINE)


def of_package() -> str:
    """The names that are imported from the package: a heading for each section, and one for each name."""
    sections = [f"## {title}\n\n{_entries(package, names)}" for title, names in PUBLIC.items()]
    return "\n\n".join([*sections, f"## Types and errors\n\n{_lines(package, TYPES)}"])


def of_testing() -> str:
    """A line for each name of the test kit."""
    return _lines(testing, testing.__all__)


def of_trackers() -> str:
    """What a tracker of one's own is made of."""
    first = ("Tracker", "ClientHandle", "Handle", "RunRequest")
    names = (*first, *(name for name in trackers.__all__ if name not in first))
    return _lines(trackers, names)


def _entries(module: Any, names: Iterable[str]) -> str:
    return "\n\n".join("\n".join(_entry(name, getattr(module, name))) for name in names)


def _lines(module: Any, names: Iterable[str]) -> str:
    """A line for each name: `help()` has the rest."""
    return "\n".join(f"- `{name}`: {_first_line(getattr(module, name))}" for name in names)


def _first_line(value: Any) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        return (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return f"One of {', '.join(f'`{choice!r}`' for choice in value.__args__)}."


def _entry(name: str, value: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    if name == "tracking_init":
        yield "Give the decorated function its run. Its arguments are [above](#arguments)."
    else:
        first, *lines = _body(inspect.getdoc(value) or "", is_whole=name in _WHOLE)
        yield f"`{name}{_signature(value)}`: {first}" if inspect.isroutine(value) else first
        lines += _members(value) if inspect.isclass(value) else ()
        yield from ("", *lines) if lines else ()


def _signature(value: Any) -> str:
    parameters = list(inspect.signature(value).parameters.values())
    shown = [str(one.replace(annotation=one.empty)) for one in parameters]
    by_name = [at for at, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY]
    if by_name:
        shown.insert(by_name[0], "*")
    return f"({', '.join(shown)})"


def _body(documented: str, is_whole: bool = False) -> Iterator[str]:
    """What it is, what is returned, and a class's attributes. `help()` has the rest."""
    first, *rest = _SECTION.split(documented)
    yield _joined(first if is_whole else first.partition("\n\n")[0])
    for kind, text in zip(rest[::2], rest[1::2], strict=True):
        if kind == "Attributes":
            for name, told in re.findall(r"^    (\S[^:]*): ((?:.*\n?)(?:^ {8}.*\n?)*)", text, re.MULTILINE):
                yield f"- `{name}`: {_first_sentence(_joined(told))}"
        elif kind in ("Returns", "Yields"):
            yield f"{kind}: {_joined(text)}"


def _members(kind: type) -> Iterator[str]:
    """Its methods and properties, each with the first part of its docstring."""
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        parameters = [str(one.name) for one in inspect.signature(function).parameters.values()][1:]
        call = "" if isinstance(value, property) else f"({', '.join(parameters)})"
        yield f"- `{name}{call}`: {' '.join(next(_body(inspect.getdoc(function) or '')).split())}"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?]) (?=[A-Z`])", text, maxsplit=1)[0]


def _joined(text: str) -> str:
    """Paragraphs of one line each. Lists stay lists."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        one if one.lstrip().startswith(("- ", "1. ")) else " ".join(one.split()) for one in paragraphs
    ).strip()
