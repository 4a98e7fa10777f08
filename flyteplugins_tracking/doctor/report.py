"""What the doctor has found, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking.trackers.diagnostics import Finding


@dataclass(frozen=True)
class Detected:
    """This process's place in its job.

    Attributes:
        info: None outside a job, and where it cannot be told.
        variables: Those that were read, and their values.
        error: Why it cannot be told.
    """

    info: DistributedInfo | None
    variables: Mapping[str, str]
    error: str | None = None


@dataclass(frozen=True)
class RunIds:
    """What `{base}` stands for.

    Attributes:
        base_id: None where it is known only when a run is opened.
        source: Where it is from, or will be.
    """

    base_id: str | None
    source: str


@dataclass(frozen=True)
class PlanRow:
    """Which runs one mode and scope give in this world.

    Attributes:
        runs: How many; 0 where it cannot be done.
        ids: Their ids, as a pattern.
        groups: Their groups, as a pattern; None for none.
        writers: Who writes to them.
        error: Why it cannot be done here.
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
    """One tracker here.

    Attributes:
        version: Of the vendor's package; "" where it has none that is known, None where it is not installed.
        install: What installs it.
        place: Where runs would go.
        credentials: Where a key was found, and its length.
        is_chosen: Whether somebody has set it up here.
        reachable: None where it was not asked.
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
class OfRanks:
    """A finding, and the ranks that have it; None for all that have told theirs."""

    finding: Finding
    ranks: tuple[int, ...] | None = None
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that is printed.

    Attributes:
        ranks_heard: Of how many ranks the findings are.
    """

    detected: Detected
    ids: RunIds
    plans: tuple[PlanRow, ...]
    trackers: tuple[TrackerState, ...]
    versions: Mapping[str, str]
    findings: tuple[OfRanks, ...]
    ranks_heard: int = 1

    @property
    def status(self) -> int:
        """The exit status."""
        return int(any(found.finding.level == "error" for found in self.findings))
