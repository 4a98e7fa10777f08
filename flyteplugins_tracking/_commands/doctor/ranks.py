"""Sends the other ranks' reports to rank 0, through the launcher's store if there is one.

The keys are the doctor's own. The doctor takes no part in the agreement on a run id.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flyteplugins_tracking._commands.doctor.report import RankDiagnostic, Report
from flyteplugins_tracking._commands.doctor.versions import OWN
from flyteplugins_tracking._job.board import Board, job_board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

# How long rank 0 waits for the others' reports; and how long they wait until it has printed. They must not end before:
# torchrun ends all ranks when one ends with an error.
_REPORT_S = 30.0
_PRINTING_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class RankReport:
    """The report of another rank: its place in the job, its installed versions and its diagnostics."""

    info: DistributedInfo
    versions: Mapping[str, str]
    diagnostics: tuple[Diagnostic, ...]


# By rank.
RankReports = Mapping[int, RankReport]


def board_of(info: DistributedInfo) -> tuple[Board | None, list[RankDiagnostic]]:
    """Return the board that all ranks share, and what is wrong if the job needs one and has none."""
    board = None
    try:
        board = job_board(info, os.environ, f"doctor/{info.restart_count}")
    except (ModuleNotFoundError, RuntimeError):
        pass  # a job without torch, or a store that does not answer
    except (ImportError, OSError) as error:  # torch lacks a shared library
        text = f"torch cannot be imported: {error}"
        return None, [RankDiagnostic(Diagnostic("error", text, "pip install --force-reinstall torch"))]
    if board is not None or info.launcher != "torchelastic" or info.num_workers == 1:
        return board, []
    text = f"the agents of {info.num_workers} nodes share no reachable store, so the ranks cannot agree on a run id"
    fix = "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or pass id= to tracking_init"
    return None, [RankDiagnostic(Diagnostic("error", text, fix))]


def send(board: Board, info: DistributedInfo, report: Report) -> int | None:
    """Send this rank's report to rank 0, and wait until that has printed it.

    Returns:
        The exit status of the job; None if rank 0 has not printed within 60 s.
    """
    message = {
        "info": dict(info),
        "versions": _all_versions(report),
        "diagnostics": [entry.diagnostic._asdict() for entry in report.diagnostics],
    }
    with suppress(RuntimeError):
        board.append(json.dumps(message))
        deadline = time.monotonic() + _PRINTING_S
        while time.monotonic() < deadline:
            status = board.get("status")
            if status is not None:
                return int(status)
            time.sleep(_POLL_S)
    return None


def gather(board: Board | None, info: DistributedInfo) -> RankReports | None:
    """Return the reports that the other ranks send within 30 s; None without a board."""
    if board is None:
        return None
    texts: list[str] = []
    with suppress(RuntimeError):
        texts = board.wait_for_texts(info.world_size - 1, _REPORT_S)
    messages = {message["info"]["rank"]: message for message in map(json.loads, texts)}
    return {rank: _rank_report(replace(info, rank=rank), messages[rank]) for rank in sorted(messages)}


def send_status(board: Board | None, status: int) -> None:
    """Send the exit status of the job to the other ranks, after rank 0 has printed."""
    if board is not None:
        with suppress(RuntimeError):
            board.put("status", str(status))


def merged(report: Report, info: DistributedInfo, reports: RankReports | None) -> tuple[RankDiagnostic, ...]:
    """Return the diagnostics of all ranks: each one once, with the ranks that have it."""
    if reports is None:
        text = f"the ranks of {info.launcher} do not share a store: the others print their own errors, on stderr"
        return (*report.diagnostics, RankDiagnostic(Diagnostic("note", text)))
    if not reports:
        return (*report.diagnostics, *_silent(info, reports))
    workers = {0: info.worker_index, **{rank: other.info.worker_index for rank, other in reports.items()}}
    ranks_of: dict[Diagnostic, list[int]] = {entry.diagnostic: [0] for entry in report.diagnostics}
    for rank, other in sorted(reports.items()):
        for diagnostic in (*other.diagnostics, *_other_versions(report, other)):
            ranks_of.setdefault(diagnostic, []).append(rank)
    return (
        *(_rank_diagnostic(diagnostic, ranks, workers) for diagnostic, ranks in ranks_of.items()),
        *_silent(info, reports),
    )


def _rank_report(info: DistributedInfo, message: Mapping[str, Any]) -> RankReport:
    """Return the report in a rank's message. If another version of this library sent it, it may hold only versions."""
    versions = message.get("versions", {})
    try:
        diagnostics = tuple(Diagnostic(**values) for values in message["diagnostics"])
        return RankReport(DistributedInfo(**message["info"]), versions, diagnostics)
    except (LookupError, TypeError, TrackingError):
        unknown = replace(info, local_rank=None, local_world_size=None, worker_index=None)
        return RankReport(unknown, versions, ())


def _all_versions(report: Report) -> dict[str, str]:
    trackers = {state.name: state.version or "none" for state in report.trackers if state.version != ""}
    return {**trackers, **report.versions}


def _other_versions(report: Report, other: RankReport) -> Iterator[Diagnostic]:
    our_versions = _all_versions(report)
    for name in sorted(our_versions.keys() | other.versions.keys()):
        ours, theirs = our_versions.get(name, "none"), other.versions.get(name, "none")
        if ours != theirs:
            level: Any = "error" if name == OWN else "warning"
            fix = "start every rank in the same image or virtual environment"
            yield Diagnostic(level, f"{name} is {theirs} there, and {ours} on rank 0", fix)


def _rank_diagnostic(diagnostic: Diagnostic, ranks: Sequence[int], workers: Mapping[int, int | None]) -> RankDiagnostic:
    if len(ranks) == len(workers):
        return RankDiagnostic(diagnostic)
    their_workers: Iterable[int] = {index for rank in ranks if (index := workers[rank]) is not None}
    return RankDiagnostic(diagnostic, tuple(ranks), tuple(sorted(their_workers)))


def _silent(info: DistributedInfo, reports: RankReports) -> Iterator[RankDiagnostic]:
    silent = tuple(rank for rank in range(1, info.world_size) if rank not in reports)
    if silent:
        text = f"no report within {_REPORT_S:g} s"
        fix = "look at the log of these ranks: the doctor may not be installed there"
        yield RankDiagnostic(Diagnostic("warning", text, fix), silent)
