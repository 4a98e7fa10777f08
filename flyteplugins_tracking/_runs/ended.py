"""A run that has ended, as a platform shows it. A rank without a run does not load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo


@dataclass(frozen=True)
class EndedRun:
    """The values that a platform needs to show a run that has ended.

    Attributes:
        tracker: The tracker's name.
        id: The run's id.
        url: The run's page; None if it has none.
        exit_code: The status that the run ended with.
        summary: The run's last values.
        info: The rank that had the run; None outside a distributed job.
        is_first: Whether it is the job's first run, whose primary reports those of all ranks.
        other_runs: The number of runs that the job has besides the first.
        attempt: The attempt of the task, from 0.
    """

    tracker: str
    id: str
    url: str | None
    exit_code: int
    summary: Mapping[str, Any]
    info: DistributedInfo | None
    is_first: bool
    other_runs: int
    attempt: int
