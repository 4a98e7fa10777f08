"""The doctor's report, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.pools import Pool
from flyteplugins_tracking.trackers.diagnostics import Diagnostic


@dataclass(frozen=True)
class Detected:
    """This process's place in its job.

    Attributes:
        info: This rank; None outside a job, and if the variables contradict each other.
        variables: The variables that were read, with their values.
        error: Why the variables do not give a rank; None if they do.
        pool: The pool whose worker this process is, and how that was found; None for no pool.
        child_of: The rank that has started this process, which is not a rank itself; None for none.
    """

    info: DistributedInfo | None
    variables: Mapping[str, str]
    error: str | None = None
    pool: Pool | None = None
    child_of: int | None = None


@dataclass(frozen=True)
class RunIds:
    """The base id of the runs, `{base}`.

    Attributes:
        base_id: The id; None if it is known only when a run is opened.
        source: Where the id comes from, as text.
    """

    base_id: str | None
    source: str


@dataclass(frozen=True)
class PlanRow:
    """The runs of one mode and scope in this world.

    Attributes:
        run_mode: The mode.
        rank_scope: The scope.
        runs: The number of runs; 0 if this job cannot use the mode and scope.
        ids: The ids of the runs, as a pattern.
        groups: The groups of the runs, as a pattern; None for none.
        writers: The ranks that write to the runs, as text.
        error: Why this job cannot use the mode and scope; None if it can.
    """

    run_mode: str
    rank_scope: str
    runs: int
    ids: str
    groups: str | None
    writers: str
    error: str | None = None


@dataclass(frozen=True)
class TrackerState:
    """The state of one tracker in this environment.

    Attributes:
        name: The tracker's name.
        title: The service's name.
        version: The version of the vendor's package; "" if it is unknown, None if the package is not installed.
        install: The command that installs the package.
        place: Where runs would go.
        credentials: Where a key was found, and its length.
        is_chosen: Whether the tracker is set up here.
        reachable: Whether the server answers; None if the doctor has not asked it.
    """

    name: str
    title: str
    version: str | None
    install: str
    place: str | None = None
    credentials: str | None = None
    is_chosen: bool = False
    reachable: bool | None = None


@dataclass(frozen=True)
class RankDiagnostic:
    """A diagnostic, and the ranks that have it.

    Attributes:
        diagnostic: The diagnostic.
        ranks: The ranks; None for all that have reported.
        workers: The workers (nodes) of these ranks.
    """

    diagnostic: Diagnostic
    ranks: tuple[int, ...] | None = None
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything that the doctor prints.

    Attributes:
        detected: This process's place in its job.
        ids: The base id of the runs.
        plans: The runs of each mode and scope.
        trackers: The trackers' states.
        versions: The installed versions, by distribution.
        diagnostics: The problems, and facts worth knowing.
        ranks_heard: The number of ranks whose diagnostics are included.
    """

    detected: Detected
    ids: RunIds
    plans: tuple[PlanRow, ...]
    trackers: tuple[TrackerState, ...]
    versions: Mapping[str, str]
    diagnostics: tuple[RankDiagnostic, ...]
    ranks_heard: int = 1

    @property
    def status(self) -> int:
        """The exit status."""
        return int(any(entry.diagnostic.level == "error" for entry in self.diagnostics))
