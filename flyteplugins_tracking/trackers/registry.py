"""The search for a tracker by its name, and the check of its arguments.

A third party's tracker is registered under the entry point group `flyteplugins_tracking.trackers`.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._util.checks import check_arguments, check_choice, check_name, check_run_id
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Feature, Tracker
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig

ENTRY_POINTS = "flyteplugins_tracking.trackers"
BUILT_IN = {name: f"flyteplugins_tracking.trackers.{name}" for name in ("wandb", "pluto", "mlflow", "trackio")}
# Of each, the module with `join_clients_calls`.
_JOINING = {"wandb": "wandb.inner", "pluto": "pluto.run", "mlflow": "mlflow.run", "trackio": "trackio.vendor"}
# A tracker that knows nothing of roles takes none.
_MEMBERS = [name for name in vars(Tracker) if not name.startswith("_") and name != "takes_roles"] + ["name", "title"]


class _Waiting(PerProcess):
    """The runs of `flyteplugins-tracking run` that wait for the script's own call of a client, as `wandb.init`.

    Attributes:
        openers: What opens each run with the call's arguments, by tracker.
        lock: Held while one is opened: another thread's call joins that run then.
    """

    def __init__(self) -> None:
        self.openers: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        self.lock = threading.RLock()


waiting = register(_Waiting())


def open_waiting(tracker: str, arguments: Mapping[str, Any]) -> bool:
    """Open the run that waits for the script's call. Returns whether there was one; perhaps another rank has it.

    Args:
        tracker: The tracker's name.
        arguments: What the call says, as arguments of `tracking_init`. Those of the command take precedence.

    Raises:
        TrackingError: The run cannot be opened.
    """
    with waiting.lock:
        opener = waiting.openers.get(tracker)
        if opener is not None:
            opener(arguments)
            waiting.openers.clear()
        return opener is not None


def join_clients_calls(tracker: str, config: TrackingConfig | None = None) -> None:
    """Have a client's own functions join the run, or open the waiting one. Called when the client is loaded."""
    importlib.import_module(f"flyteplugins_tracking.trackers.{_JOINING[tracker]}").join_clients_calls(config)


def names_of_trackers() -> list[str]:
    """Return the names for `tracker=`: of the built-in trackers and of those that other packages have registered."""
    return list(dict.fromkeys([*BUILT_IN, *_registered()]))


def find_tracker(tracker: str | Tracker) -> Tracker:
    """Return the tracker of this name; or `tracker` itself, if it is a tracker object.

    Raises:
        ConfigError: There is no tracker of that name, or the object is not a tracker.
    """
    if not isinstance(tracker, str):
        return _as_tracker(tracker, "tracker=")
    if tracker in BUILT_IN:
        built_in: Tracker = importlib.import_module(BUILT_IN[tracker]).TRACKER
        return built_in
    registered = _registered()
    check_choice("tracker", tracker, [*BUILT_IN, *registered])
    source = f"the entry point {tracker!r} of {ENTRY_POINTS}"
    try:
        loaded = registered[tracker].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
    return _as_tracker(loaded, source)


def check_config(config: TrackingConfig) -> None:
    """Refuse arguments that the config's tracker does not support, at decoration.

    Raises:
        ConfigError: The tracker does not support an argument.
    """
    tracker = find_tracker(config.tracker)
    check_arguments(f"tracking_init(tracker={tracker.name!r})", config.options, {*tracker.arguments, *OWN_ARGUMENTS})
    for feature, (argument, is_requested) in _FEATURE_ARGUMENTS.items():
        if feature in tracker.unsupported and is_requested(config):
            raise ConfigError(f"{tracker.title} does not support {argument}: {tracker.unsupported[feature]}")
    if config.has_roles and not getattr(tracker, "takes_roles", False):
        argument = f"roles={list(config.roles)}" if config.roles is not None else f"role={config.role!r}"
        raise ConfigError(
            f"{tracker.title} does not support {argument}: jobs share a run with W&B only. Leave out roles= and role=; "
            "for a run each in one group, pass the same group= in all of these jobs, and an id= of its own in each"
        )
    tracker.check(config)
    check_run_id("id", config.id)
    for name in ("project", "group", "name"):
        check_name(name, getattr(config, name))


def propagated_to(config: TrackingConfig, propagated: Mapping[str, Any]) -> TrackingConfig:
    """Return `config`, with propagated arguments for those that it does not set.

    Propagated arguments may be for several trackers: this leaves out those that only another tracker takes.

    Raises:
        ConfigError: An argument cannot work.
    """
    if not propagated:
        return config
    tracker = find_tracker(config.tracker if "tracker" in config.given else propagated.get("tracker", config.tracker))
    foreign = {name for name in propagated if name not in tracker.arguments and name not in OWN_ARGUMENTS}
    foreign = _known_to_any(foreign)
    foreign |= {"download_logs"} & tracker.unsupported.keys()
    merged = config.with_defaults({name: value for name, value in propagated.items() if name not in foreign})
    check_config(merged)
    return merged


def check_propagated(config: TrackingConfig) -> None:
    """Refuse arguments that no tracker supports, if the config does not name its tracker.

    Raises:
        ConfigError: No tracker supports an argument.
    """
    if "tracker" in config.given:
        check_config(config)
        return
    default_arguments = find_tracker(config.tracker).arguments
    known = {name: value for name, value in config.options.items() if name in default_arguments}
    others = config.options.keys() - known.keys()
    allowed = _known_to_any(others) | {name for built_in in BUILT_IN for name in find_tracker(built_in).arguments}
    check_arguments("tracking_init", others, allowed | OWN_ARGUMENTS)
    check_config(replace(config, options=known))


# The argument that requests each feature, and whether a config has it.
_FEATURE_ARGUMENTS: dict[Feature, tuple[str, Callable[[TrackingConfig], bool]]] = {
    "shared": ("run_mode='shared'", lambda config: config.run_mode == "shared"),
    # By default, the error of a tracker that cannot do it is raised.
    "offline": (
        "if_unavailable='degrade'",
        lambda config: config.if_unavailable == "degrade" and "if_unavailable" in config.given,
    ),
    "config file": ("config= with the path of a file", lambda config: isinstance(config.config, str)),
    "download_logs": ("download_logs=True", lambda config: config.download_logs),
}


def _known_to_any(names: Collection[str]) -> set[str]:
    """Return those of `names` that are a tracker's own arguments. Loads registered trackers only if necessary."""
    known, unknown = set[str](), set(names)
    for tracker in (*BUILT_IN, *_registered()):
        if not unknown:
            break
        with suppress(Exception):  # a registered tracker may be broken, and the user may not use it
            known |= unknown.intersection(find_tracker(tracker).arguments)
            unknown -= known
    return known


@functools.cache
def _registered() -> dict[str, Any]:
    from importlib.metadata import entry_points  # slow, and the built-in trackers do not need it

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _as_tracker(candidate: Any, source: str) -> Tracker:
    try:
        tracker: Tracker = candidate() if isinstance(candidate, type) else candidate
    except TypeError as error:
        raise ConfigError(f"{source}: {candidate.__name__}() fails: {error}. Pass an object of the class") from error
    missing = [name for name in _MEMBERS if not hasattr(tracker, name)]
    if missing:
        raise ConfigError(
            f"{source} must be a tracker, got a {type(tracker).__name__} without {', '.join(missing)}: let its class "
            "inherit from flyteplugins_tracking.trackers.Tracker"
        )
    return tracker
