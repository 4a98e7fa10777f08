"""What a tracker is, what it opens a run with, and what an open run is.

A third party's tracker is a class that inherits from `Tracker`, or has all that it has. It is passed as `tracker=`, or
found by its name: see `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.plan import Page, RunPlan
from flyteplugins_tracking.trackers.diagnostics import Examination

Feature = Literal[
    "shared", "resume", "offline", "media", "system metrics", "sweeps", "config file", "allow_config", "download_logs"
]
"""What a service may be without. See docs/trackers.md."""


class SigtermWatch(Protocol):
    """The part of the watch for SIGTERM that a tracker needs. The watch calls `Handle.end_early` on a SIGTERM."""

    @property
    def terminated(self) -> bool:
        """Whether the job is being terminated."""

    def renew(self) -> None:
        """Put the handler back in front, if the function has replaced it. Cheap: called for each row."""

    def await_handler(self, any_thread: bool = False) -> None:
        """Wait until the signal's handler has run. Called before a run that was ended early is opened again.

        Args:
            any_thread: Wait in other threads than the main thread too.
        """


class Unwatched:
    """The `watch` of a run that is opened outside of a decorated function: no signal is watched for."""

    terminated = False

    def renew(self) -> None:
        """Do nothing."""

    def await_handler(self, any_thread: bool = False) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RunRequest:
    """All that a tracker needs to open one rank's run.

    Attributes:
        plan: What this rank does; it opens a run.
        known_id: The run's id by the job's plan, which all its ranks know; the one in `plan` is another where that one
            is open in another process.
        config: What the user asked for.
        info: This rank; None outside a distributed job.
        has_other_writers: Whether processes that are none of the job's present ranks may write to the run, now or
            later: other nodes of an elastic job, the tasks that a Flyte task calls, or the one that has called it.
        facts: What the run's config gains: the job's shape, its restarts, the Flyte execution.
        read_secret: Gives the API key, or None where the user named no secret. For the tracker to call once, if at all.
        may_prompt: Whether somebody sits at this process's terminal, alone, and can be asked for a key.
        watch: To be renewed whenever something is logged; and to be waited for before a run that was ended early is
            opened again, since a handler that is still to run may end the process.
        deadline: When the run must be open, in seconds of `time.monotonic`.
    """

    plan: RunPlan
    known_id: str | None
    config: TrackingConfig
    info: DistributedInfo | None
    has_other_writers: bool
    facts: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool
    watch: SigtermWatch
    deadline: float

    @property
    def is_retry(self) -> bool:
        """Whether this is a later attempt of the job, after a restart of its workers or a retry of Flyte's."""
        flyte = self.facts.get("flyte") or {}
        return bool(self.facts.get("restart_count") or flyte.get("attempt"))


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

    def end_early(self, exit_code: int) -> None:
        """End the run while the function may go on: the job is being terminated. Called from another thread.

        What the function logs from then on must not raise; it opens the run again where that can be done. Where the run
        has ended already, this does nothing.
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
        return Examination()

    def open(self, request: RunRequest) -> Handle:
        """Open this rank's run; to go on with it where the id exists.

        Raises:
            TrackerUnavailableError: The service, or a key for it, is not there.
        """
        ...


def link_types(name: str, config: TrackingConfig, pages: Sequence[Page]) -> Iterator[str]:
    """The names of the backend's templates for pages of runs and groups: see `Tracker.link`."""
    for page in pages:
        known = config.id if page.kind == "run" else config.group or config.id
        suffix = "" if page.kind == "group" and config.group else page.id
        yield f"tracking-{name}{'-group' if page.kind == 'group' else ''}{'-id' if known else ''}{suffix}"
