"""What is known of a call before anything runs: what it asks for, its task, its platform, and the world around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from flyteplugins_tracking._util.record import Record
from flyteplugins_tracking.trackers.config import TrackingConfig, is_disabled

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Tracker

# What a platform has not set.
_NOTHING: Mapping[str, Any] = {}


class Task(NamedTuple):
    """The facts about a Flyte task that are known when it is decorated. A plain function has those of the defaults.

    Attributes:
        has_workers: Whether it asks for workers of its own; None if that is unknown and makes no difference.
        timeout_s: How long an attempt may run, in seconds; None for no limit.
    """

    has_workers: bool | None = None
    timeout_s: float | None = None


class ExecutionContext(Record):
    """The platform's side of one call. Each platform has a subclass; what it does not override, it does not offer.

    Attributes:
        base_id: The base id that the platform gives; None for none.
        group: The group of the runs if the plan gives none. It is set if a retry cannot have the same base id.
        label: The name of this process among several that write to one run.
        propagated: Arguments that reach this function from outside. The decorator's own arguments take precedence.
        parents: The runs that the calling task has open, by tracker.
        has_children: Whether tasks that the function calls run in other processes.
        call_counts: The number of decorated functions that this attempt of the task has entered, by tracker; None to
            count them over the life of the process.
        can_persist: Whether `persist` works here. False if there is no storage, or if this machine's files stay.
        can_publish_files: Whether `publish_files` works here.
        run_metadata: The values that the platform adds to the run's config.
        attempt: How many attempts of the task came before.
        on_cluster: Whether nobody sits at this process's terminal.
        success_exceptions: The exceptions that end a function of this platform successfully.
    """

    base_id: str | None = None
    group: str | None = None
    label: str | None = None
    propagated: Mapping[str, Any] = _NOTHING
    parents: Mapping[str, Mapping[str, Any]] = _NOTHING
    has_children: bool = False
    call_counts: Counter[str] | None = None
    can_persist: bool = False
    can_publish_files: bool = False
    run_metadata: Mapping[str, Any] = _NOTHING
    attempt: int = 0
    on_cluster: bool = False
    success_exceptions: tuple[type[BaseException], ...] = ()

    def read_secret(self, secret: Any) -> str | None:  # noqa: ARG002
        """Return the value of one of the platform's secret objects; None to use the tracker's own credentials.

        Raises:
            TrackerUnavailableError: The secret is missing on a cluster.
        """
        return None

    def persist(self, directory: str) -> str:
        """Copy a local directory to storage that outlives this machine, and return the address."""
        raise NotImplementedError

    def publish_files(self, directory: str, run_id: str, is_async: bool) -> Any:
        """Make the files of a run an output of the task.

        Args:
            directory: The local directory with the run's files.
            run_id: The run's id.
            is_async: Whether to return an awaitable.
        """
        raise NotImplementedError

    def propagate_run(self, tracker: Tracker, run: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """Let the tasks that are called in the block continue `run`."""
        return nullcontext()


class ProcessContext(ExecutionContext):
    """A plain process: a script, a notebook, or a rank of a launcher."""


class World:
    """What is around the calls of this process. The test kit has a world without services, signals and other processes.

    Attributes:
        is_real: Whether there are any.
    """

    is_real = True

    def adapted(self, asked: Asked) -> Asked:
        """Return what a call gets here."""
        return asked


class Asked(Record):
    """What one call asks for.

    Attributes:
        config: The user's arguments.
        tracker: The tracker.
        context: The platform's side of the call.
        task: The task whose function is called.
        world: What is around the call.
    """

    config: TrackingConfig
    tracker: Tracker
    context: ExecutionContext
    task: Task
    world: World

    @property
    def is_disabled(self) -> bool:
        """Whether no rank has a run, because the user has turned tracking off. A test has its recorded runs.

        Raises:
            ConfigError: The variable has an unknown value.
        """
        return self.world.is_real and is_disabled()


# The real world, and those of the tests that run: the last one holds, in every thread.
worlds = [World()]


@contextmanager
def override(world: World) -> Iterator[None]:
    """Have another world around the functions that are called in the block, in every thread."""
    worlds.append(world)
    try:
        yield
    finally:
        worlds.remove(world)
