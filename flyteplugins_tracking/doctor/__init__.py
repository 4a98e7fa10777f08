"""The doctor: what was detected here, what it comes to, and what looks wrong. It changes nothing.

Each rank examines its own process and machine. Rank 0 prints: with what the others have found, where they can tell it.
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
from typing import Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking.doctor import ranks, text
from flyteplugins_tracking.doctor.checks import check
from flyteplugins_tracking.doctor.detection import base_id, detect
from flyteplugins_tracking.doctor.plans import plan_rows
from flyteplugins_tracking.doctor.report import OfRanks, Report
from flyteplugins_tracking.doctor.services import examine_trackers
from flyteplugins_tracking.doctor.versions import check_versions, versions
from flyteplugins_tracking.errors import ConfigError

# Launchers end all ranks as soon as one ends with a status: what rank 0 takes to ask servers and to print.
_PRINTING_S = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the doctor finds; the process's status: 1 where something is wrong, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # what another package prints is no part of the document
            report = examine(options.tracker, offline=options.offline)
    except ConfigError as error:
        _parser().error(str(error))
    info = report.detected.info
    if info is None or info.world_size == 1:
        return _show(report, options.json)
    store, findings = ranks.store_of(info)
    report = replace(report, findings=(*report.findings, *findings))
    if info.rank != 0:
        return _tell(report, info, store)
    told = ranks.gather(store, info)
    everyone = [info, *(there.info for there in (told or {}).values())]
    status = _show(
        replace(
            report,
            findings=ranks.merged(report, info, told),
            plans=plan_rows(info, report.ids.base_id, everyone if len(everyone) == info.world_size else None),
            ranks_heard=len(everyone),
        ),
        options.json,
    )
    ranks.give_verdict(store, info, status)
    return status


def examine(tracker: str | None = None, *, offline: bool = False) -> Report:
    """What this process finds.

    Args:
        tracker: Look at this one alone; it is to be usable.
        offline: Ask no server.

    Raises:
        ConfigError: There is no tracker of that name.
    """
    detected = detect(os.environ)
    # One process of a node asks for all: thousands at once would be a finding of their own.
    is_first = detected.info is None or detected.info.local_rank in (0, None)
    trackers, of_trackers = examine_trackers(tracker, asks=is_first and not offline)
    in_use = [state.name for state in trackers if state.is_chosen and state.version is not None]
    ids, of_ids = base_id(detected.info, os.environ, in_use or [tracker or "wandb"])
    found = versions()
    findings = (*check(detected, os.environ), *of_ids, *of_trackers, *check_versions(found))
    return Report(
        detected=detected,
        ids=ids,
        plans=plan_rows(detected.info, ids.base_id) if detected.error is None else (),
        trackers=trackers,
        versions=found,
        findings=tuple(map(OfRanks, findings)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flyteplugins-tracking",
        description="Print what is detected here, which runs there would be, and what looks wrong. It changes nothing: "
        "put it in the place of the training script, as in `torchrun ... -m flyteplugins_tracking`.",
        epilog="The exit status is 1 where something is wrong, and 2 for wrong arguments.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tracker", metavar="NAME", help="look at this tracker alone; it is to be usable")
    parser.add_argument("--offline", action="store_true", help="ask no server whether it is there")
    return parser


def _show(report: Report, as_json: bool) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # in a terminal without the letters of a path
    try:
        print(text.as_json(report) if as_json else text.as_text(report), end="", flush=True)  # noqa: T201 it does without
    except BrokenPipeError:  # its reader has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.status


def _tell(report: Report, info: DistributedInfo, store: Any) -> int:
    """What another rank does: rank 0 prints for it, or it prints its errors itself."""
    verdict = None if store is None else ranks.tell(store, info, report)
    if verdict is not None:
        return verdict
    for found in report.findings:
        if found.finding.level == "error":
            sys.stderr.write(text.as_line(found, info))
    sys.stderr.flush()
    if report.status != 0:
        time.sleep(_PRINTING_S)
    return report.status
