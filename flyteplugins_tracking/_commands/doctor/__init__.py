"""The doctor: prints the detected job, the runs it would have, and what looks wrong. It changes nothing.

Each rank examines its own process and machine. Rank 0 prints, also the diagnostics that the other ranks report to it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace

from flyteplugins_tracking._commands.doctor import ranks, text
from flyteplugins_tracking._commands.doctor.checks import check
from flyteplugins_tracking._commands.doctor.detection import base_id, detect
from flyteplugins_tracking._commands.doctor.plans import plan_rows
from flyteplugins_tracking._commands.doctor.report import RankDiagnostic, Report
from flyteplugins_tracking._commands.doctor.services import diagnose_trackers
from flyteplugins_tracking._commands.doctor.versions import check_versions, versions
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking.errors import ConfigError

# How long rank 0 may take to ask servers and to print. Launchers end all ranks when one ends with an error.
_PRINTING_S = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and return the exit status: 1 if it has an error. Wrong arguments exit with 2."""
    options = _parser().parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # other packages may print: that is not part of the document
            report = diagnose(options.tracker, offline=options.offline, primary_rank=options.primary_rank)
    except ConfigError as error:
        _parser().error(str(error))
    info = report.detected.info
    if info is None or info.world_size == 1:
        return _show(report, options.json)
    board, diagnostics = ranks.board_of(info)
    report = replace(report, diagnostics=(*report.diagnostics, *diagnostics))
    if info.rank != 0:
        return _report_to_rank_0(report, info, board)
    reports = ranks.gather(board, info)
    known_ranks = [info, *(other.info for other in (reports or {}).values())]
    status = _show(
        replace(
            report,
            diagnostics=ranks.merged(report, info, reports),
            plans=plan_rows(
                info,
                report.ids.base_id,
                known_ranks if len(known_ranks) == info.world_size else None,
                options.primary_rank,
            ),
            ranks_heard=len(known_ranks),
        ),
        options.json,
    )
    ranks.send_status(board, status)
    return status


def diagnose(tracker: str | None = None, *, offline: bool = False, primary_rank: int = 0) -> Report:
    """Return the report of this process.

    Args:
        tracker: The only tracker to examine. A problem with it is an error. None for all trackers.
        offline: Do not ask any server.
        primary_rank: As for `tracking_init`.

    Raises:
        ConfigError: There is no tracker of that name.
    """
    detected = detect(os.environ)
    # One process of a node asks the servers: thousands of requests at once could take them down.
    is_first = detected.info is None or detected.info.local_rank in (0, None)
    trackers, tracker_diagnostics = diagnose_trackers(tracker, asks=is_first and not offline)
    in_use = [state.name for state in trackers if state.is_chosen and state.version is not None]
    ids, id_diagnostics = base_id(detected.info, os.environ, in_use or [tracker or "wandb"])
    installed = versions()
    diagnostics = (
        *check(detected, os.environ),
        *id_diagnostics,
        *tracker_diagnostics,
        *check_versions(installed),
    )
    return Report(
        detected=detected,
        ids=ids,
        plans=plan_rows(detected.info, ids.base_id, primary_rank=primary_rank) if detected.error is None else (),
        trackers=trackers,
        versions=installed,
        diagnostics=tuple(map(RankDiagnostic, diagnostics)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flyteplugins-tracking",
        description="Print the detected job, the runs it would have, and what looks wrong. It changes nothing: run it "
        "instead of the training script, as in `torchrun ... -m flyteplugins_tracking`.",
        epilog="The exit status is 1 if there is an error, and 2 for wrong arguments.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tracker", metavar="NAME", help="examine only this tracker; a problem with it is an error")
    parser.add_argument(
        "--primary-rank",
        metavar="RANK",
        type=int,
        default=0,
        help="show the runs for this primary_rank= of tracking_init, for instance -1",
    )
    parser.add_argument("--offline", action="store_true", help="do not ask any server")
    # DeepSpeed's launcher and torch.distributed.launch add it to the arguments of a module. The variables have it too.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return parser


def _show(report: Report, as_json: bool) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have all characters of a path
    try:
        print(text.as_json(report) if as_json else text.as_text(report), end="", flush=True)  # noqa: T201 the document
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.status


def _report_to_rank_0(report: Report, info: DistributedInfo, board: Board | None) -> int:
    """Have rank 0 print this rank's report. Without a board, print this rank's errors on stderr."""
    job_status = None if board is None else ranks.send(board, info, report)
    if job_status is not None:
        return job_status
    for entry in report.diagnostics:
        if entry.diagnostic.level == "error":
            sys.stderr.write(text.as_line(entry, info))
    sys.stderr.flush()
    if report.status != 0:
        time.sleep(_PRINTING_S)
    return report.status
