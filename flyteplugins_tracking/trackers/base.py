"""What a tracker is, and how it is found by its name.

A third party's tracker is a class that inherits from `Tracker`, or has all that it has. It is passed as `tracker=`, or
registered under the entry point group `flyteplugins_tracking.trackers` and found by its name.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress

from flyteplugins_tracking.config import OWN_ARGUMENTS, check_arguments, check_choice
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Any, Protocol

    from flyteplugins_tracking.config import TrackingConfig
    from flyteplugins_tracking.entries import RunRequest
    from flyteplugins_tracking.findings import Examination
    from flyteplugins_tracking.modes import Feature as Feature
    from flyteplugins_tracking.policy import Page
    from flyteplugins_tracking.topology import DistributedInfo
else:
    Protocol = object

    def __getattr__(name: str) -> object:
        """`Feature`, for the annotations of a third party's tracker."""
        if name != "Feature":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from flyteplugins_tracking.modes import Feature

        return Feature


ENTRY_POINTS = "flyteplugins_tracking.trackers"


class Handle(Protocol):
    """An open run.

    Attributes:
        id: The run's id, as plans have it.
        run: The vendor's own object.
    """

    id: str
    run: Any

    @property
    def url(self) -> str | None:
        """The run's page, where it is known."""
        return None if self.run is self else getattr(self.run, "url", None)

    @property
    def files(self) -> str | None:
        """The local directory with the run's files, where this process has written them."""
        return None

    def summary(self) -> Mapping[str, Any]:
        """The run's last values, as far as this process knows them. Called before `finish`."""
        return {}

    def unsent(self) -> Sequence[str]:
        """The local directories that hold what the service has not got. Called after `finish`."""
        return ()

    def how_to_send(self, directory: str) -> str:  # noqa: ARG002 as they all have it
        """The command that sends what is in such a directory."""
        return ""

    def finish(self, exit_code: int) -> None:
        """End the run, which the function's end is: 0 is success, anything else is failure. Called once, and last."""

    def finish_on_signal(self, exit_code: int) -> None:
        """End the run while the function may go on, since the job gets a SIGTERM. Called from another thread.

        What the function logs afterwards must not raise. It opens the run again if the service can do that. Does
        nothing if the run has ended already.
        """


class Tracker(Protocol):
    """One tracking service. Its module is imported on every rank: the vendor's `package` only in `open`.

    Attributes:
        name: What `tracker=` calls it.
        title: What people call it.
        package: The vendor's module, which `open` needs; None for none.
        distribution: What `pip install` takes for it, if that is another name.
        run_id_variables: The service's own variables that choose a run, the first one that is set.
        arguments: Its own arguments of `tracking_init`, which are `config.options`.
        lacks: What it cannot do, and why. What is asked for all the same is refused at decoration.
    """

    name: str
    title: str
    package: str | None = None
    distribution: str = ""
    run_id_variables: tuple[str, ...] = ()
    arguments: Collection[str] = frozenset()
    lacks: Mapping[Feature, str] = {}

    def imposed_id(self) -> str | None:
        """The id that the service gives to what is opened now, whatever is asked for: in a trial of its sweep."""
        return None

    def check(self, config: TrackingConfig) -> None:
        """Refuse, at decoration, what cannot work. Names of arguments and what it lacks are checked already.

        Raises:
            ConfigError: It cannot.
        """

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:  # noqa: ARG002 as they all have it
        """The address of a run or a group, None for the whole project; the host's where it cannot be told.

        None where the service has no pages.
        """
        return None

    def link(self, config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:  # noqa: ARG002
        """What flytekit's task template gains so that the console links to `pages`: text values, own key names.

        Their ids lack what is before the plan's suffix: `config.id`, or what the backend calls the task's execution.
        None for pages that are not known.
        """
        address = self.page(config, None)
        return {} if address is None else {"link_type": f"tracking-{self.name}", f"{self.name}_page": address}

    def pass_on(self, run: Any) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Its "id", and the arguments that a task goes on in it with: plain values. None where none can."""
        return None

    def stand_aside(
        self,
        config: TrackingConfig,  # noqa: ARG002
        info: DistributedInfo | None,  # noqa: ARG002
    ) -> Callable[[], object] | None:
        """Called on a rank that gets no run, before its function: keep the vendor from making one by itself.

        Returns:
            What undoes it when the function has ended.
        """
        return None

    def examine(self) -> Examination:
        """What the doctor shows of the service here: where runs go, where a key is, what is wrong. No effects."""
        from flyteplugins_tracking.findings import Examination

        return Examination()

    def open(self, request: RunRequest) -> Handle:
        """Open this rank's run; to go on with it where the id exists.

        Raises:
            TrackerUnavailableError: The service, or a key for it, is not there.
        """
        ...


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
        if feature in tracker.lacks:
            raise ConfigError(f"{_ASKING[feature]} cannot be had with {tracker.title}: {tracker.lacks[feature]}")
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
    foreign |= {name for name in ("allow_config", "download_logs") if name in tracker.lacks}
    config = wanted.over({name: value for name, value in propagated.items() if name not in foreign})
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


def link_types(name: str, config: TrackingConfig, pages: Sequence[Page]) -> Iterator[str]:
    """The names of the backend's templates for pages of runs and groups: see `Tracker.link`."""
    for page in pages:
        known = config.id if page.kind == "run" else config.group or config.id
        suffix = "" if page.kind == "group" and config.group else page.id
        yield f"tracking-{name}{'-group' if page.kind == 'group' else ''}{'-id' if known else ''}{suffix}"


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
    from importlib.metadata import entry_points

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
            f"inherit from {__name__}.Tracker"
        )
    return tracker
