"""The doctor: prints the detected job, the runs it would have, and what looks wrong. It changes nothing.

Each rank diagnoses its own process and machine. The diagnosis is the JSON document that docs/doctor.md describes: rank
0 adds the diagnostics that the other ranks send to it (`ranks`), and prints it (`printing`).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from flyteplugins_tracking._commands.doctor import packages, printing, ranks
from flyteplugins_tracking._commands.doctor.job import base_id, check_directories, check_job
from flyteplugins_tracking._commands.doctor.plans import plan_rows
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.topology import Detection, RecordingEnv, examine
from flyteplugins_tracking.errors import ConfigError, TopologyError

# How long rank 0 may take to ask servers and to print. Launchers end all ranks when one ends with an error.
_PRINTING_S = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagnosis, and return the exit status: 1 if it has an error. Wrong arguments exit with 2."""
    parser = argparse.ArgumentParser(
        prog="flyteplugins-tracking",
        description="Print the detected job, the runs it would have, and what looks wrong. It changes nothing: run it "
        "instead of the training script, as in `torchrun ... -m flyteplugins_tracking`.",
        epilog="The exit status is 1 if there is an error, and 2 for wrong arguments. With `send` as the first "
        "argument, it sends what local directories have: see `send --help`.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tracker", metavar="NAME", help="examine only this tracker; a problem with it is an error")
    primary_help = "show the runs for this primary_rank= of tracking_init, for instance -1"
    parser.add_argument("--primary-rank", metavar="RANK", type=int, default=0, help=primary_help)
    parser.add_argument("--offline", action="store_true", help="do not ask any server")
    # DeepSpeed's launcher and torch.distributed.launch add it to the arguments of a module. The variables have it too.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # other packages may print: that is not part of the document
            info, document = _diagnose(options)
    except ConfigError as error:
        parser.error(str(error))
    board, all_ranks = None, []
    if info is not None and info.world_size > 1:
        board, problems = ranks.board_of(info)
        ranks.add(document, problems)
        if info.rank != 0:
            return _leave_to_rank_0(document, info, board)
        all_ranks = ranks.add_others(document, info, board)
    if document["detected"]["error"] is None:
        document["plans"] = plan_rows(info, document["base_id"]["base_id"], options.primary_rank, all_ranks)
    status = _print(document, options)
    if info is not None and board is not None:
        ranks.send_status(status, info, board)
    return status


def _diagnose(options: argparse.Namespace) -> tuple[DistributedInfo | None, dict[str, Any]]:
    """Return this rank, and the diagnosis of this process.

    Raises:
        ConfigError: There is no tracker of the name `options.tracker`.
    """
    env, found, error = RecordingEnv(os.environ), Detection(), None
    try:
        found = examine(env)
    except TopologyError as contradiction:
        error = str(contradiction)
    info, pool, parent = found.info, found.pool, found.parent
    # One process of a node asks the servers: thousands of requests at once could take them down.
    is_first = info is None or info.local_rank in (0, None)
    trackers, tracker_problems = packages.trackers(options.tracker, asks=is_first and not options.offline)
    in_use = [state["name"] for state in trackers if state["is_chosen"] and state["version"] is not None]
    run_id, source, id_problems = base_id(info, os.environ, in_use or [options.tracker or "wandb"])
    versions = packages.versions()
    document = {
        "schema": 1,
        "ok": True,
        "detected": {
            "job": None if info is None else dict(info),
            "variables": env.read,
            "error": error,
            "pool": None if pool is None else {"name": pool.name, "reason": pool.reason},
            "child_of": None if parent is None else parent.rank,
        },
        "base_id": {"base_id": run_id, "source": source},
        "plans": [],
        "trackers": trackers,
        "versions": versions,
        "ranks_heard": 1,
        "diagnostics": [],
    }
    ranks.add(document, check_job(info, error, env.read, os.environ))
    ranks.add(document, [*check_directories(), *id_problems, *tracker_problems, *packages.check_versions(versions)])
    return info, document


def _print(document: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the diagnosis, and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have all characters of a path
    try:
        text = printing.as_json(document) if options.json else printing.as_text(document)
        print(text, end="", flush=True)  # noqa: T201 the document
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(not document["ok"])


def _leave_to_rank_0(document: dict[str, Any], info: DistributedInfo, board: Any) -> int:
    """Have rank 0 print this rank's diagnostics. Without a board, print this rank's errors on stderr."""
    job_status = None if board is None else ranks.send(document, info, board)
    if job_status is not None:
        return job_status
    sys.stderr.write(printing.errors_of(document, info.rank))
    sys.stderr.flush()
    if not document["ok"]:
        time.sleep(_PRINTING_S)
    return int(not document["ok"])
