"""The doctor: prints the detected job, the runs it would have, and what looks wrong. It changes nothing.

Each rank diagnoses its own process and machine. Rank 0 gets the others' diagnostics through the launcher's store, if
there is one, and prints one document, which docs/doctor.md describes. The keys in the store are the doctor's own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from flyteplugins_tracking._commands.doctor import job, packages, printing
from flyteplugins_tracking._job.board import Board, job_board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.topology import Detection, RecordingEnv, examine
from flyteplugins_tracking.errors import ConfigError, TopologyError, TrackingError
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

# How long rank 0 waits for the others' diagnostics; and how long they wait until it has printed. They must not end
# before: torchrun ends all ranks when one ends with an error.
_OTHERS_S = 30.0
_RANK_0_S = 60.0
# How long rank 0 may take to ask servers and to print, if the ranks share no store.
_PRINTING_S = 6.0
_LEVELS = ("error", "warning", "note")


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
            info, document, found = _diagnose(options)
    except ConfigError as error:
        parser.error(str(error))
    versions = {state["name"]: state["version"] or "none" for state in document["trackers"]} | document["versions"]
    message = {"info": document["detected"]["job"] or {}, "versions": versions, "diagnostics": found}
    board = None
    if info is not None and info.world_size > 1:
        board = _board_of(info, found)
        if info.rank > 0:
            return _leave_to_rank_0(message, info, board)
    if info is None or board is None:
        return _print(document, [message], info, options)
    texts: list[str] = []
    with suppress(RuntimeError):
        texts = board.wait_for_texts(info.world_size - 1, _OTHERS_S)
    status = _print(document, [message, *map(json.loads, texts)], info, options, awaited=range(info.world_size))
    with suppress(RuntimeError):
        _statuses(board, info).append(str(status))
    return status


def _diagnose(options: argparse.Namespace) -> tuple[DistributedInfo | None, dict[str, Any], list[Diagnostic]]:
    """Return this rank, the document about this process, and what looks wrong here.

    Raises:
        ConfigError: There is no tracker of the name `options.tracker`.
    """
    env, detection, error = RecordingEnv(os.environ), Detection(), None
    try:
        detection = examine(env)
    except TopologyError as contradiction:
        error = str(contradiction)
    info, pool, parent = detection.info, detection.pool, detection.parent
    # One process of a node asks the servers: thousands of requests at once could take them down.
    is_first = info is None or info.local_rank in (0, None)
    trackers, of_trackers = packages.trackers(options.tracker, asks=is_first and not options.offline)
    in_use = [state["name"] for state in trackers if state["is_chosen"] and state["version"] is not None]
    run_id, source, of_id = job.base_id(info, os.environ, in_use or [options.tracker or "wandb"])
    versions = packages.versions()
    document = {
        "schema": 1,
        "detected": {
            "job": None if info is None else dict(info),
            "variables": env.read,
            "error": error,
            "pool": None if pool is None else {"name": pool.name, "reason": pool.reason},
            "child_of": None if parent is None else parent.rank,
        },
        "base_id": {"base_id": run_id, "source": source},
        "trackers": trackers,
        "versions": versions,
    }
    of_job = [*job.check_job(info, error, env.read, os.environ), *job.check_directories()]
    return info, document, [*of_job, *of_id, *of_trackers, *packages.check_versions(versions)]


def _board_of(info: DistributedInfo, found: list[Diagnostic]) -> Board | None:
    """Return the board that all ranks share; None if there is none, with the reason or the consequence in `found`."""
    board, is_needed = None, info.launcher == "torchelastic" and info.num_workers != 1
    try:
        board = job_board(info, os.environ, f"doctor/{info.restart_count}")
    except (ModuleNotFoundError, RuntimeError):
        pass  # a job without torch, or a store that does not answer
    except (ImportError, OSError) as error:  # torch lacks a shared library
        is_needed = False
        fix = "pip install --force-reinstall torch"
        found.append(Diagnostic("error", f"torch cannot be imported: {error}", fix))
    if board is None and is_needed:
        text = f"the agents of {info.num_workers} nodes share no reachable store, so the ranks cannot agree on a run id"
        fix = "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or pass id= to tracking_init"
        found.append(Diagnostic("error", text, fix))
    if board is None:
        text = f"the ranks of {info.launcher} do not share a store: the others print their own errors, on stderr"
        found.append(Diagnostic("note", text))
    return board


def _statuses(board: Board, info: DistributedInfo) -> Board:
    return board.of_topic(f"doctor/{info.restart_count}/status")


def _leave_to_rank_0(message: Mapping[str, Any], info: DistributedInfo, board: Board | None) -> int:
    """Have rank 0 print this rank's diagnostics, and return its exit status.

    Without a board, or if rank 0 has not printed within 60 s, print this rank's errors on stderr.
    """
    if board is not None:
        with suppress(RuntimeError):
            board.append(json.dumps(message))
            for status in _statuses(board, info).wait_for_texts(1, _RANK_0_S):
                return int(status)
    errors = [diagnostic for diagnostic in message["diagnostics"] if diagnostic.level == "error"]
    sys.stderr.write(printing.own_errors(errors, info.rank))
    sys.stderr.flush()
    if errors:
        time.sleep(_PRINTING_S)
    return int(bool(errors))


def _print(
    document: dict[str, Any],
    messages: Sequence[Mapping[str, Any]],
    info: DistributedInfo | None,
    options: argparse.Namespace,
    awaited: Sequence[int] = (),
) -> int:
    """Print the document with the diagnostics of all messages, each one once. Return the exit status.

    Args:
        document: What this process has found.
        messages: Those of all ranks that have sent one, with this process's as the first.
        info: This rank.
        options: The arguments of the command.
        awaited: The ranks of which a message was expected.
    """
    ranks_of: dict[Diagnostic, list[int]] = {}
    worker_of: dict[int, int | None] = {}
    places, entries = [], []
    for message in sorted(messages, key=lambda message: message["info"].get("rank", 0)):
        rank, theirs = message["info"].get("rank", 0), []
        worker_of[rank] = message["info"].get("worker_index")
        with suppress(LookupError, TypeError, TrackingError):  # another version of this library has sent it
            theirs = [Diagnostic(*parts) for parts in message["diagnostics"]]
            places.append(DistributedInfo(**message["info"]))
        theirs += _other_versions(messages[0]["versions"], message.get("versions", {}))
        for diagnostic in dict.fromkeys(theirs):
            ranks_of.setdefault(diagnostic, []).append(rank)
    silent = [rank for rank in awaited if rank not in worker_of]
    if silent:
        fix = "look at the log of these ranks: the doctor may not be installed there"
        ranks_of[Diagnostic("warning", f"no report within {_OTHERS_S:g} s", fix)] = silent
    for diagnostic, ranks in sorted(ranks_of.items(), key=lambda item: _LEVELS.index(item[0].level)):
        of_all = ranks == list(worker_of)
        workers = [] if of_all else sorted({index for rank in ranks if (index := worker_of.get(rank)) is not None})
        entries.append({**diagnostic._asdict(), "ranks": None if of_all else ranks, "workers": workers})
    document["diagnostics"] = entries
    document["ok"] = not any(diagnostic.level == "error" for diagnostic in ranks_of)
    document["ranks_heard"] = len(worker_of)
    all_ranks = places if len(places) == len(awaited) else ()
    document["plans"] = []
    if document["detected"]["error"] is None:
        document["plans"] = job.plan_rows(info, document["base_id"]["base_id"], options.primary_rank, all_ranks)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have all characters of a path
    try:
        text = printing.as_json(document) if options.json else printing.as_text(document)
        print(text, end="", flush=True)  # noqa: T201 the document
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(not document["ok"])


def _other_versions(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Diagnostic]:
    for name in sorted({*ours, *theirs}):
        our, their = ours.get(name, "none"), theirs.get(name, "none")
        if our != their:
            fix = "start every rank in the same image or virtual environment"
            text = f"{name} is {their} there, and {our} on rank 0"
            yield Diagnostic("error" if name == packages.OWN else "warning", text, fix)
