"""What a tracker is, and how it is found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flyteplugins_tracking.config import TrackingConfig, check_choice
from flyteplugins_tracking.lifecycle import RunRequest
from flyteplugins_tracking.policy import Page


class Handle(Protocol):
    """An open run."""

    @property
    def run(self) -> Any:
        """The vendor's own object."""

    @property
    def files(self) -> str | None:
        """The local directory with the run's files, where this process has written them."""

    def summary(self) -> Mapping[str, Any]:
        """The run's last values, as far as this process knows them. Called before `finish`."""

    def unsent(self) -> Sequence[str]:
        """The local directories that hold what the service has not got. Called after `finish`."""

    def how_to_send(self, directory: str) -> str:
        """The command that sends what is in such a directory."""

    def finish(self, exit_code: int) -> None:
        """End the run, which the function's end is: 0 is success, anything else is failure. Called once, and last."""

    def end_early(self, exit_code: int) -> None:
        """End the run while the function may go on: the job is being terminated. Called from another thread.

        What the function logs from then on must not raise; it opens the run again where that can be done. Where the run
        has ended already, this does nothing.
        """


class Tracker(Protocol):
    """One tracking service. Its module is imported on every rank: the vendor's `package` only in `open`."""

    name: str
    title: str  # what people call it
    package: str
    run_id_variables: tuple[str, ...]

    def imposed_id(self) -> str | None:
        """The id that the service gives to what is opened now, whatever is asked for: in a trial of its sweep."""

    def check(self, config: TrackingConfig) -> None:
        """Refuse, at decoration, what cannot work.

        Raises:
            ConfigError: It cannot.
        """

    def page(self, config: TrackingConfig, page: Page | None) -> str:
        """The address of a run or a group, None for the whole project; the host's where it cannot be told."""

    def link(self, config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:
        """What flytekit's task template gains so that the console links to `pages`: text values, own key names.

        Their ids lack what is before the plan's suffix: `config.id`, or what the backend calls the task's execution.
        None for pages that are not known.
        """

    def pass_on(self, run: Any) -> Mapping[str, Any] | None:
        """Its "id", and the arguments that a task goes on in it with: plain values. None where none can."""

    def open(self, request: RunRequest) -> Handle:
        """Open this rank's run; to go on with it where the id exists.

        Raises:
            TrackerUnavailableError: The service, or a key for it, is not there.
            TrackerNotInstalledError: The vendor's package is not installed.
        """


_BUILT_IN = {"wandb": "flyteplugins_tracking.trackers.wandb"}


def find_tracker(name: str) -> Tracker:
    """The tracker called `name`.

    Raises:
        ConfigError: There is none of that name.
    """
    check_choice("tracker", name, _BUILT_IN)
    tracker: Tracker = importlib.import_module(_BUILT_IN[name]).TRACKER
    return tracker
