"""How a tracker is found by its name, and which arguments it takes.

A third party's tracker is registered under the entry point group `flyteplugins_tracking.trackers`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flyteplugins_tracking._config.config import OWN_ARGUMENTS, TrackingConfig
from flyteplugins_tracking._util.checks import check_arguments, check_choice
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Feature, Tracker

ENTRY_POINTS = "flyteplugins_tracking.trackers"
_BUILT_IN = {name: f"flyteplugins_tracking.trackers.{name}" for name in ("wandb", "pluto", "mlflow", "trackio")}
_MEMBERS = [name for name in vars(Tracker) if not name.startswith("_")] + ["name", "title"]


def names_of_trackers() -> list[str]:
    """What `tracker=` can be: those that are built in, and those that other packages have registered."""
    return list(dict.fromkeys([*_BUILT_IN, *_registered()]))


def find_tracker(tracker: str | Tracker) -> Tracker:
    """The tracker of this name; or `tracker` itself, if it is one.

    Raises:
        ConfigError: There is none of that name, or it is none.
    """
    if not isinstance(tracker, str):
        return _as_tracker(tracker, "tracker=")
    if tracker in _BUILT_IN:
        built_in: Tracker = importlib.import_module(_BUILT_IN[tracker]).TRACKER
        return built_in
    registered = _registered()
    check_choice("tracker", tracker, [*_BUILT_IN, *registered])
    what = f"the entry point {tracker!r} of {ENTRY_POINTS}"
    try:
        loaded = registered[tracker].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    return _as_tracker(loaded, what)


def check_config(config: TrackingConfig) -> None:
    """Refuse, at decoration, what the tracker that is asked for cannot do.

    Raises:
        ConfigError: It cannot.
    """
    tracker = find_tracker(config.tracker)
    check_arguments(f"tracking_init(tracker={tracker.name!r})", config.options, {*tracker.arguments, *OWN_ARGUMENTS})
    for feature in _asked_for(config):
        if feature in tracker.unsupported:
            raise ConfigError(f"{tracker.title} does not support {_ASKING[feature]}: {tracker.unsupported[feature]}")
    tracker.check(config)


def propagated_to(wanted: TrackingConfig, propagated: Mapping[str, Any]) -> TrackingConfig:
    """What is `wanted`, with what is `propagated` where that says nothing.

    It may be meant for several trackers: what this one does not know and another one does is left out.

    Raises:
        ConfigError: It cannot work.
    """
    if not propagated:
        return wanted
    tracker = find_tracker(wanted.tracker if "tracker" in wanted.given else propagated.get("tracker", wanted.tracker))
    named = find_tracker(propagated.get("tracker", tracker))
    foreign = {name for name in propagated if name not in tracker.arguments and name not in OWN_ARGUMENTS}
    foreign = _known_to_any(foreign)
    if named.name != tracker.name:  # what has two trackers' name is meant for the one that is named
        foreign |= {*named.arguments} - OWN_ARGUMENTS
    foreign |= {name for name in ("allow_config", "download_logs") if name in tracker.unsupported}
    config = wanted.with_defaults({name: value for name, value in propagated.items() if name not in foreign})
    check_config(config)
    return config


def check_propagated(config: TrackingConfig) -> None:
    """Refuse what no decorated function could take, where it is not known for which tracker it is.

    Raises:
        ConfigError: None could.
    """
    if "tracker" in config.given:
        check_config(config)
        return
    of_default = find_tracker(config.tracker).arguments
    known = {name: value for name, value in config.options.items() if name in of_default}
    others = config.options.keys() - known.keys()
    allowed = _known_to_any(others) | {name for built_in in _BUILT_IN for name in find_tracker(built_in).arguments}
    check_arguments("tracking_init", others, allowed | OWN_ARGUMENTS)
    check_config(replace(config, options=known))


# How each is asked for by arguments.
_ASKING: dict[Feature, str] = {
    "shared": "run_mode='shared'",
    "offline": "if_unavailable='degrade'",
    "config file": "config= with the path of a file",
    "allow_config": "allow_config=True",
    "download_logs": "download_logs=True",
}


def _asked_for(config: TrackingConfig) -> Iterator[Feature]:
    asked: dict[Feature, bool] = {
        "shared": config.run_mode == "shared",
        "offline": config.if_unavailable == "degrade",
        "config file": isinstance(config.config, str),
        "allow_config": config.allow_config,
        "download_logs": config.download_logs,
    }
    return (feature for feature, is_asked in asked.items() if is_asked)


def _known_to_any(names: Collection[str]) -> set[str]:
    """Which of `names` are own arguments of a tracker; those that are registered are asked only if they must be."""
    known, unknown = set[str](), set(names)
    for tracker in (*_BUILT_IN, *_registered()):
        if not unknown:
            break
        with suppress(Exception):  # one that nobody has asked for may be broken
            known |= unknown.intersection(find_tracker(tracker).arguments)
            unknown -= known
    return known


@functools.cache
def _registered() -> dict[str, Any]:
    from importlib.metadata import entry_points  # slow, and the built-in trackers do not need it

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _as_tracker(given: Any, what: str) -> Tracker:
    try:
        tracker: Tracker = given() if isinstance(given, type) else given
    except TypeError as error:
        raise ConfigError(f"{what}: {given.__name__}() makes no tracker: {error}. Pass an object of it") from error
    missing = [name for name in _MEMBERS if not hasattr(tracker, name)]
    if missing:
        raise ConfigError(
            f"{what} is a {type(tracker).__name__}, and no tracker: it has no {', '.join(missing)}. Let its class "
            "inherit from flyteplugins_tracking.trackers.Tracker"
        )
    return tracker
