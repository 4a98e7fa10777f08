"""The interfaces of a tracking service: `Tracker`, the `RunRequest` for one run, and the `Handle` of an open run.

A third party's tracker is a class that inherits from `Tracker`, or has the same members. It is passed as `tracker=`, or
found by its name: see `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page, RunPlan
from flyteplugins_tracking._util.record import Record
from flyteplugins_tracking.trackers.config import TrackingConfig, own_values
from flyteplugins_tracking.trackers.diagnostics import Diagnosis

Feature = Literal["shared", "resume", "offline", "media", "system metrics", "sweeps", "config file", "download_logs"]
"""The features that a service may lack: docs/reference/trackers.md describes them."""


class Sigterm(Protocol):
    """What is known of SIGTERM, at which the library calls `Handle.end_early`. A tracker may use these members."""

    @property
    def terminated(self) -> bool:
        """Whether the job is being terminated."""

    @property
    def terminated_at(self) -> float | None:
        """When SIGTERM came, in seconds of `time.monotonic`; None if it has not. It bounds a run's end: `ending`."""

    @property
    def interrupted_at(self) -> float | None:
        """When Ctrl-C came while a run is closed, which it bounds too; None if it has not."""

    def before_row(self) -> None:
        """Count a row, and listen again if an asyncio loop of the function's has taken the signals over. Fast."""


class NoSigterm:
    """That of a run which is opened outside of a decorated function, where the library listens for no signal."""

    terminated = False
    terminated_at: float | None = None
    interrupted_at: float | None = None

    def before_row(self) -> None:
        """Do nothing."""


class RunRequest(Record):
    """The values that a tracker needs to open one rank's run.

    Attributes:
        plan: The plan of this rank, which opens a run.
        planned_run_id: The run's id in the job's plan, which all ranks know. `plan.run_id` differs from it if another
            process has that run open.
        config: The user's arguments.
        info: This rank; None outside a distributed job.
        has_other_writers: Whether other processes may write to the run too, now or later: the ranks of a job that
            share it, jobs with roles, the tasks that a Flyte task calls, or the task that has called it.
        run_metadata: The values to add to the run's config: the hyperparameters of a trial, and below "tracking_init"
            the job's shape, its restarts, and the Flyte execution.
        read_secret: Returns the API key; None if the user has not passed a secret. A tracker calls it at most once.
        may_prompt: Whether this process may ask the user for a key in its terminal.
        sigterm: What is known of SIGTERM. The handle calls its methods: `ClientHandle` does.
        deadline: When the run must be open, in seconds of `time.monotonic`.
        ask_to_stop: Asks the function to leave its loop, on all ranks. To be called, from any thread, when a user stops
            the run at the service. Its argument is called if the function does not use `should_stop()`, or if the ranks
            do not agree.
        earlier: The journals, files with kept rows, that `send` sends. Empty in a job: there the handle looks on this
            disk.
    """

    plan: RunPlan
    planned_run_id: str | None
    config: TrackingConfig
    info: DistributedInfo | None
    has_other_writers: bool
    run_metadata: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool
    sigterm: Sigterm
    deadline: float
    ask_to_stop: Callable[[Callable[[], object]], object] = lambda otherwise: otherwise()
    earlier: Sequence[Any] = ()

    @property
    def group(self) -> str | None:
        """The run's group: the user's, or the planned one."""
        return self.config.group or self.plan.group

    @property
    def restart_count(self) -> int:
        """How many attempts of the run came before, told by the launcher, by Flyte, and by the file of `run_file=`."""
        count: int = own_values(self.run_metadata).get("restart_count", 0)
        return count

    @property
    def primary_name(self) -> str:
        """The primary in messages: "rank 3", or "local rank 3" with rank_scope="worker"."""
        return f"{'local rank' if self.config.rank_scope == 'worker' else 'rank'} {self.config.primary_rank}"

    @property
    def leads_node(self) -> bool:
        """Whether this rank does what one rank of its node does. True if the ranks of the node are unknown."""
        return self.config.run_mode == "auto" or self.info is None or self.info.local_rank in (0, None)

    @property
    def measures_node(self) -> bool:
        """Whether this rank logs metrics of the system: one of each node does.

        A task that continues a run does not, and who sends what others have logged.
        """
        if self.earlier:
            return False
        is_placed = self.info is not None and self.info.local_rank is not None
        return self.leads_node if is_placed else self.plan.primary


class Handle(Protocol):
    """An open run.

    Attributes:
        id: The run's id in the plan.
        run: The vendor's own run object.
    """

    id: str
    run: Any

    @property
    def url(self) -> str | None:
        """The address of the run's page; None if it is unknown."""
        return None if self.run is self else getattr(self.run, "url", None)

    @property
    def files(self) -> str | None:
        """The local directory with the run's files; None if this process has not written them."""
        return None

    def unsent(self) -> Sequence[str]:
        """Return the local directories with data that the service has not received. Called after `finish`."""
        return ()

    def how_to_send(self, directory: str) -> str:  # noqa: ARG002 subclasses need it
        """Return the command that sends the data in such a directory."""
        return ""

    def await_writers(self, exit_code: int) -> None:  # noqa: ARG002 as they all have it
        """Wait for the rows of the run's other writers, before `finish`: `finish_timeout_s` after the last."""
        return

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:  # noqa: ARG002
        """Keep with the run what has happened to its job. Called on the primary, from any thread.

        Args:
            name: "failure": why the job has failed, before the run is ended. "hang": where its ranks are. "stop": who
                has asked for its stop. Of a role, `roles/{role}/failure`, ...
            values: What the summary gains: `failure/rank`, `failure/host`, `failure/type`, `failure/message`; or
                `hang/verdict`; `stop/reason`, `stop/step`.
            text: The traceback, the stacks of all ranks, or a sentence.
        """
        return

    def forget_event(self, name: str, keys: Sequence[str]) -> None:  # noqa: ARG002
        """Remove what an earlier attempt has kept with `record_event`, as far as the service can.

        Args:
            name: "failure", or of a role `roles/{role}/failure`: this attempt has succeeded.
            keys: The keys of its values.
        """
        return

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Log these values with the run's next row, and not as a row of their own: the function counts its rows.

        Called on the primary, from another thread. They take the place of what still waits. What waits when the run
        ends is kept with its last row, or in its summary. By default, nothing is logged.
        """
        return

    @property
    def is_disabled(self) -> bool:
        """Whether the client drops all rows, since the user has turned it off."""
        return False

    def how_to_view(self) -> str:
        """Return the page of the run that has ended, or the command that shows it; empty if the client prints it."""
        return self.url or ""

    def finish(self, exit_code: int) -> None:
        """End the run with the function's status: 0 is success, anything else is failure. Called once, and last."""

    def mark_preempting(self, timeout_s: float) -> None:  # noqa: ARG002
        """Prepare for the end of the process: the user's handler for SIGTERM is called next, and may end it.

        Tell the service, and send what can be sent within `timeout_s` seconds. Called from any thread.
        """
        return

    def end_early(self, exit_code: int) -> None:
        """End the run before its function has ended: SIGTERM has come, and SIGKILL will. Called from any thread.

        The function may continue, and calls that log must not raise. Keep what they log: `finish` follows, if the
        process lives, and sends it. Does nothing if the run has ended already.
        """


class Tracker(Protocol):
    """A tracking service. Its module is imported on every rank, but the vendor's `package` only in `open`.

    Attributes:
        name: The tracker's name in `tracker=`.
        title: The service's name in messages.
        package: The vendor's module, which `open` needs; None for none.
        distribution: The name that `pip install` takes, if it differs from `package`.
        run_id_variables: The service's own variables that choose a run. The first one that is set counts.
        arguments: The names of the tracker's own arguments of `tracking_init`, which are in `config.options`.
        unsupported: The features that the service lacks, with the reason. Using one is refused at decoration.
        takes_roles: Whether several jobs can write to a run, with `roles=` and `role=`. Those of W&B can.
    """

    name: str
    title: str
    package: str | None = None
    distribution: str = ""
    run_id_variables: tuple[str, ...] = ()
    arguments: Collection[str] = frozenset()
    unsupported: Mapping[Feature, str] = {}
    takes_roles: bool = False

    def forced_run_id(self) -> str | None:
        """Return the id that the service gives to the next run, such as a sweep's trial; None if it forces none."""
        return None

    def check(self, config: TrackingConfig) -> None:
        """Refuse arguments that cannot work, at decoration. Their names and `unsupported` are checked already.

        Raises:
            ConfigError: An argument cannot work.
        """

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:  # noqa: ARG002 subclasses need it
        """Return the address of a page.

        Args:
            config: The user's arguments.
            page: The run or group; None for the whole project.

        Returns:
            The host's address if the page's is unknown; None if the service has no pages.
        """
        return None

    def place(self, config: TrackingConfig) -> Mapping[str, str | None]:
        """Return where a call with these arguments has its run, and where another run may have the same id.

        Args:
            config: The user's arguments.

        Returns:
            Names and values, without secrets.
        """
        return {"project": config.project, "server": self.page(config, None)}

    def resumes(self, config: TrackingConfig) -> bool:  # noqa: ARG002 subclasses need it
        """Return whether a restart of the job may go on in its run. If not, it needs no id that the job keeps."""
        return True

    def link(self, config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:  # noqa: ARG002
        """Return the values to add to flytekit's task template, so that the console links to `pages`.

        Args:
            config: The user's arguments.
            pages: The pages; None if they are unknown. Their ids are only the plan's suffixes: they go after
                `config.id`, or after the backend's name of the task's execution.
        """
        address = self.page(config, None)
        return {} if address is None else {"link_type": f"tracking-{self.name}", f"{self.name}_page": address}

    def export_run(self, run: Any) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return the run's "id" and the arguments with which a child task continues the run, as plain values.

        Returns:
            None if other processes cannot continue the run.
        """
        return None

    def on_inactive_rank(
        self,
        config: TrackingConfig,  # noqa: ARG002
        info: DistributedInfo | None,  # noqa: ARG002
    ) -> Callable[[], object] | None:
        """Keep the vendor from opening a run by itself. Called on a rank without a run, before its function.

        Returns:
            A function that undoes this when the decorated function has ended; None if there is nothing to undo.
        """
        return None

    def diagnose(self) -> Diagnosis:
        """Return how the service is set up here, for `python -m flyteplugins_tracking`. Must not change anything."""
        return Diagnosis()

    def open(self, request: RunRequest) -> Handle:
        """Open this rank's run. If a run with its id exists, continue it.

        Raises:
            TrackerUnavailableError: The service is away; or, with `is_outage=False`, it refuses or there is no key.
        """
        ...


def template_values(
    name: str, config: TrackingConfig, pages: Sequence[Page], place: Mapping[str, object], above: str = ""
) -> Mapping[str, str]:
    """Return what `Tracker.link` returns for a tracker that has link templates of its own on the backend.

    Args:
        name: The tracker's name.
        config: The user's arguments.
        pages: The pages to link to.
        place: The values that say where the pages are, by their names in the templates.
        above: The template for the page above the runs, instead of `pages`: "host", for example.
    """
    types = [f"tracking-{name}-{above}"] if above else dict.fromkeys(_templates(name, config, pages))
    of_known_group = any(kind.startswith(f"tracking-{name}-group-id") for kind in types)
    values = {**place, "id": config.id, "group": (config.group or config.id) if of_known_group else None}
    return {
        "link_type": ",".join(types),
        **{f"{name}_{key}": str(value) for key, value in values.items() if value is not None},
    }


def _templates(name: str, config: TrackingConfig, pages: Sequence[Page]) -> Iterator[str]:
    for page in pages:
        known = config.id if page.kind == "run" else config.group or config.id
        suffix = "" if page.kind == "group" and config.group else page.id
        yield f"tracking-{name}{'-group' if page.kind == 'group' else ''}{'-id' if known else ''}{suffix}"
