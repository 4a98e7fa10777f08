"""Print the detected job, the runs that it would have, and what looks wrong. It changes nothing.

Start it instead of the training script: `torchrun ... -m flyteplugins_tracking`. The exit status is 1 if there is an
error, and 2 for wrong arguments. `flyteplugins-tracking send --help` is about sending what local directories have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from flyteplugins_tracking._commands.doctor import printing
from flyteplugins_tracking._commands.doctor.examine import MOST_RANKS, OWN, examine_process
from flyteplugins_tracking._job.board import Board, job_board
from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, plan
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
    """Print the diagnosis, and return the exit status: 1 if it has an error. Wrong arguments exit with 2.

    Each rank examines its own process and machine. Rank 0 gets the others' documents through the launcher's store, if
    there is one, and prints one document, which docs/reference/commands.md describes. The keys in the store are the
    doctor's own.
    """
    parser = argparse.ArgumentParser("flyteplugins-tracking", description=__doc__)
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
            info, document = examine_process(options.tracker, asks=not options.offline)
    except ConfigError as error:
        parser.error(str(error))
    board = None if info is None or info.world_size == 1 else _board_of(info, document["diagnostics"])
    if info is not None and info.rank > 0:
        return _leave_to_rank_0(document, info, board)
    documents, awaited = [document], range(0)
    if info is not None and board is not None:
        awaited = range(info.world_size)
        with suppress(RuntimeError):
            documents += map(json.loads, board.wait_for_texts(info.world_size - 1, _OTHERS_S))
    diagnostics, known = _merged(documents, awaited)
    ranks = known if known and len(known) == len(awaited) else _assumed_ranks(info)
    base_id = document["base_id"]["base_id"]
    document |= {
        "diagnostics": diagnostics,
        "ok": all(entry["level"] != "error" for entry in diagnostics),
        "ranks_heard": len(documents),
        "plans": [] if document["detected"]["error"] else _rows_of_runs(ranks, base_id, options.primary_rank),
    }
    printing.write(document, as_json=options.json)
    status = int(not document["ok"])
    if info is not None and board is not None:
        with suppress(RuntimeError):
            _statuses(board, info).append(str(status))
    return status


def _board_of(info: DistributedInfo, found: list[Diagnostic]) -> Board | None:
    """Return the board that all ranks share; None if there is none, with the reason or the consequence in `found`."""
    is_needed = info.launcher == "torchelastic" and info.num_workers != 1
    try:
        board = job_board(info, os.environ, f"doctor/{info.restart_count}")
        if board is not None:
            return board
    except (ModuleNotFoundError, RuntimeError):
        pass  # a job without torch, or a store that does not answer
    except (ImportError, OSError) as error:  # torch lacks a shared library
        is_needed = False
        text = f"torch cannot be imported: {error}"
        found.append(Diagnostic("error", text, "pip install --force-reinstall torch"))
    if is_needed:
        text = f"the agents of {info.num_workers} nodes share no reachable store, so the ranks cannot agree on a run id"
        fix = "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or pass id= to tracking_init"
        found.append(Diagnostic("error", text, fix))
    text = f"the ranks of {info.launcher} do not share a store: the others print their own errors, on stderr"
    found.append(Diagnostic("note", text))
    return None


def _statuses(board: Board, info: DistributedInfo) -> Board:
    return board.of_topic(f"doctor/{info.restart_count}/status")


def _leave_to_rank_0(document: Mapping[str, Any], info: DistributedInfo, board: Board | None) -> int:
    """Have rank 0 print this rank's diagnostics, and return its exit status.

    Without a board, or if rank 0 has not printed within 60 s, print this rank's errors on stderr.
    """
    if board is not None:
        with suppress(RuntimeError):
            board.append(json.dumps(document))
            for status in _statuses(board, info).wait_for_texts(1, _RANK_0_S):
                return int(status)
    errors = [each for each in document["diagnostics"] if each.level == "error"]
    sys.stderr.write(printing.own_errors(errors, info.rank))
    if errors:
        time.sleep(_PRINTING_S)
    return int(bool(errors))


def _merged(
    documents: Sequence[Mapping[str, Any]], awaited: Sequence[int]
) -> tuple[list[dict[str, Any]], Sequence[DistributedInfo | None]]:
    """Return the diagnostics of all documents, each one once, and the ranks whose place is known.

    Args:
        documents: Those of all ranks that have sent one, with this process's as the first.
        awaited: The ranks of which a document was expected.
    """
    ranks_of: dict[Diagnostic, list[int]] = {}
    worker_of: dict[int, int | None] = {}
    places, entries = [], []
    jobs = [(document["detected"]["job"] or {"rank": 0}, document) for document in documents]
    for job, document in sorted(jobs, key=lambda pair: pair[0]["rank"]):
        worker_of[job["rank"]] = job.get("worker_index")
        found = []
        with suppress(LookupError, TypeError, TrackingError):  # another version of this library has sent it
            found += [Diagnostic(*parts) for parts in document["diagnostics"]]
            places.append(DistributedInfo(**job))
        found += _other_versions(_versions(documents[0]), _versions(document))
        for diagnostic in dict.fromkeys(found):
            ranks_of.setdefault(diagnostic, []).append(job["rank"])
    silent = [rank for rank in awaited if rank not in worker_of]
    if silent:
        fix = "look at the log of these ranks: the doctor may not be installed there"
        ranks_of[Diagnostic("warning", f"no report within {_OTHERS_S:g} s", fix)] = silent
    for diagnostic, ranks in sorted(ranks_of.items(), key=lambda item: _LEVELS.index(item[0].level)):
        of_all = ranks == list(worker_of)
        workers = [] if of_all else sorted({index for rank in ranks if (index := worker_of.get(rank)) is not None})
        entries.append({**diagnostic._asdict(), "ranks": None if of_all else ranks, "workers": workers})
    return entries, places


def _versions(document: Mapping[str, Any]) -> dict[str, str]:
    clients = {state["name"]: state["version"] or "none" for state in document.get("trackers", ())}
    return {**clients, **document.get("versions", {})}


def _other_versions(own: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Diagnostic]:
    for name in sorted({*own, *theirs}):
        here, there = own.get(name, "none"), theirs.get(name, "none")
        if here != there:
            text, fix = f"{name} is {there} there, and {here} on rank 0", "start every rank in the same environment"
            yield Diagnostic("error" if name == OWN else "warning", text, fix)


def _assumed_ranks(info: DistributedInfo | None) -> list[DistributedInfo | None]:
    """Return all ranks of the job of `info`: the other workers share those that are not on this one equally.

    It is [None] outside a job, and empty for more than `MOST_RANKS` ranks.
    """
    if info is None:
        return [None]
    if info.world_size > MOST_RANKS:
        return []
    if info.worker_index is None or info.local_rank is None:
        return [DistributedInfo(rank, info.world_size, launcher=info.launcher) for rank in range(info.world_size)]
    size = min(info.local_world_size or math.ceil(info.world_size / (info.num_workers or 1)), info.world_size)
    others = (info.num_workers or math.ceil(info.world_size / size)) - 1
    rest = range(info.world_size - size if others else 0)
    sizes = [len(rest[index::others]) for index in range(others)]
    sizes.insert(info.worker_index, info.world_size - len(rest))
    return list(iter_ranks([size for size in sizes if size > 0], launcher=info.launcher))


def _rows_of_runs(
    ranks: Sequence[DistributedInfo | None], base_id: str | None, primary_rank: int
) -> list[dict[str, Any]]:
    """Return one row for each mode and scope; none if there are no ranks.

    Args:
        ranks: All ranks; [None] outside a job.
        base_id: The base id; None if it is unknown.
        primary_rank: As for `tracking_init`.
    """
    every = [(mode, scope) for mode in RUN_MODES for scope in RANK_SCOPES] if ranks else []
    return [_row(ranks, mode, scope, base_id or "{base}", primary_rank) for mode, scope in every]


def _row(
    ranks: Sequence[DistributedInfo | None], run_mode: RunMode, rank_scope: RankScope, base_id: str, primary_rank: int
) -> dict[str, Any]:
    writers: dict[str, list[int]] = {}
    groups: set[str] = set()
    error = None
    try:
        for info in ranks:
            planned = plan(info, run_mode, rank_scope, base_id, primary_rank=primary_rank)
            if planned.opens:
                writers.setdefault(planned.run_id or "", []).append(info.rank if info else 0)
                groups.add(planned.group or "")
    except TopologyError as refusal:
        error, writers, groups = str(refusal), {}, set()
    return {
        "run_mode": run_mode,
        "rank_scope": rank_scope,
        "runs": len(writers),
        "ids": _pattern(writers) or "-",
        "groups": _pattern(groups) or None,
        "writers": "this process" if ranks[0] is None else _writers(list(writers.values()), len(ranks)),
        "error": error,
    }


def _pattern(texts: Iterable[str]) -> str:
    """Return one pattern for strings that differ in their numbers, such as `a-{0..3}`; empty for none."""
    parts = []
    for column in zip(*(re.split(r"(\d+)", text) for text in texts), strict=True):
        values = set(column)
        parts.append(column[0] if len(values) == 1 else f"{{{min(map(int, values))}..{max(map(int, values))}}}")
    return "".join(parts)


def _writers(runs: Sequence[Sequence[int]], world_size: int) -> str:
    """Return who writes to these runs, each of which is given by its ranks."""
    if not runs:
        return "refused: see the diagnostics"
    if sum(map(len, runs)) < world_size:
        return printing.named("rank", [ranks[0] for ranks in runs])
    if len(runs) == world_size:
        return "each rank its own"
    if len(runs) == 1:
        return f"all {world_size} ranks"
    sizes = [len(ranks) for ranks in runs]
    return f"the {' to '.join(map(str, sorted({min(sizes), max(sizes)})))} ranks of each worker"
