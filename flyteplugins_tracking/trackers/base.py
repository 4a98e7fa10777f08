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
from flyteplugins_tracking.trackers.diagnostics import Diagnosis

Feature = Literal[
    "shared", "resume", "offline", "media", "system metrics", "sweeps", "config file", "allow_config", "download_logs"
]
"""What a service may be without. See docs/trackers.md."""


class SigtermWatch(Protocol):
    """The part of the watch for SIGTERM that a tracker needs. It calls `Handle.finish_on_signal` on a SIGTERM."""

    @property
    def terminated(self) -> bool:
        """Whether the job is being terminated."""

    def reinstall(self) -> None:
        """Install our handler again, if the function has replaced it. Cheap: a tracker calls it for each row, first."""

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Wait until the user's handler has run, which may end the process.

        A tracker calls it before it opens a run again that a signal has ended.

        Args:
            any_thread: Wait in other threads than the main thread too.
        """


class Unwatched:
    """The `watch` of a run that is opened outside of a decorated function: no signal is watched for."""

    terminated = False

    def reinstall(self) -> None:
        """Do nothing."""

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RunRequest:
    """All that a tracker needs to open one rank's run.

    Attributes:
        plan: What this rank does; it opens a run.
        planned_run_id: The run's id by the job's plan, which all its ranks know. `plan.run_id` differs if another
            process has that run open.
        config: What the user asked for.
        info: This rank; None outside a distributed job.
        has_other_writers: Whether processes that are none of the job's present ranks may write to the run, now or
            later: other nodes of an elastic job, the tasks that a Flyte task calls, or the one that has called it.
        run_metadata: What the run's config gains: the job's shape, its restarts, the Flyte execution.
        read_secret: Gives the API key, or None where the user named no secret. For the tracker to call once, if at all.
        may_prompt: Whether somebody sits at this process's terminal, alone, and can be asked for a key.
        watch: Watches for SIGTERM. See `SigtermWatch` for what a tracker calls, and when.
        deadline: When the run must be open, in seconds of `time.monotonic`.
    """

    plan: RunPlan
    planned_run_id: str | None
    config: TrackingConfig
    info: DistributedInfo | None
    has_other_writers: bool
    run_metadata: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool
    watch: SigtermWatch
    deadline: float

    @property
    def is_retry(self) -> bool:
        """Whether this is a later attempt of the job, after a restart of its workers or a retry of Flyte's."""
        flyte = self.run_metadata.get("flyte") or {}
        return bool(self.run_metadata.get("restart_count") or flyte.get("attempt"))


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

    def how_to_view(self) -> str:
        """The page of the run that has ended, or the command that shows it; empty if the client prints it itself."""
        return self.url or ""

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
        unsupported: What it cannot do, and why. What is asked for all the same is refused at decoration.
    """

    name: str
    title: str
    package: str | None = None
    distribution: str = ""
    run_id_variables: tuple[str, ...] = ()
    arguments: Collection[str] = frozenset()
    unsupported: Mapping[Feature, str] = {}

    def forced_run_id(self) -> str | None:
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

    def export_run(self, run: Any) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Its "id", and the arguments that a task goes on in it with: plain values. None where none can."""
        return None

    def on_inactive_rank(
        self,
        config: TrackingConfig,  # noqa: ARG002
        info: DistributedInfo | None,  # noqa: ARG002
    ) -> Callable[[], object] | None:
        """Called on a rank that gets no run, before its function: keep the vendor from making one by itself.

        Returns:
            What undoes it when the function has ended.
        """
        return None

    def diagnose(self) -> Diagnosis:
        """What the doctor shows of the service here: where runs go, where a key is, what is wrong. No effects."""
        return Diagnosis()

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
