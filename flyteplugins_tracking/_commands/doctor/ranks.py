"""The diagnostics of all ranks in rank 0's document, through the launcher's store if there is one.

The keys are the doctor's own. The doctor takes no part in the agreement on a run id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._commands.doctor.packages import OWN
from flyteplugins_tracking._job.board import Board, job_board
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

# How long rank 0 waits for the others' diagnostics; and how long they wait until it has printed. They must not end
# before: torchrun ends all ranks when one ends with an error.
_OTHERS_S = 30.0
_PRINTING_S = 60.0


def add(document: dict[str, Any], diagnostics: Iterable[Diagnostic], ranks: Any = None, workers: Any = ()) -> None:
    """Add diagnostics to the document: those of these ranks and their workers, or of all that are heard."""
    for diagnostic in diagnostics:
        document["diagnostics"].append({**diagnostic._asdict(), "ranks": ranks, "workers": workers})
        document["ok"] = document["ok"] and diagnostic.level != "error"


def board_of(info: DistributedInfo) -> tuple[Board | None, list[Diagnostic]]:
    """Return the board that all ranks share, and what is wrong if the job needs one and has none."""
    board = None
    try:
        board = job_board(info, os.environ, f"doctor/{info.restart_count}")
    except (ModuleNotFoundError, RuntimeError):
        pass  # a job without torch, or a store that does not answer
    except (ImportError, OSError) as error:  # torch lacks a shared library
        fix = "pip install --force-reinstall torch"
        return None, [Diagnostic("error", f"torch cannot be imported: {error}", fix)]
    if board is not None or info.launcher != "torchelastic" or info.num_workers == 1:
        return board, []
    text = f"the agents of {info.num_workers} nodes share no reachable store, so the ranks cannot agree on a run id"
    fix = "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or pass id= to tracking_init"
    return None, [Diagnostic("error", text, fix)]


def send(document: dict[str, Any], info: DistributedInfo, board: Board) -> int | None:
    """Send this rank's diagnostics to rank 0, and wait until that has printed them.

    Returns:
        The exit status of the job; None if rank 0 has not printed within 60 s.
    """
    message = {
        "info": dict(info),
        "versions": _all_versions(document),
        "diagnostics": [[entry["level"], entry["text"], entry["fix"]] for entry in document["diagnostics"]],
    }
    with suppress(RuntimeError):
        board.append(json.dumps(message))
        for status in _statuses(info, board).wait_for_texts(1, _PRINTING_S):
            return int(status)
    return None


def send_status(status: int, info: DistributedInfo, board: Board) -> None:
    """Send the exit status of the job to the other ranks, after rank 0 has printed."""
    with suppress(RuntimeError):
        _statuses(info, board).append(str(status))


def _statuses(info: DistributedInfo, board: Board) -> Board:
    return board.of_topic(f"doctor/{info.restart_count}/status")


def add_others(document: dict[str, Any], info: DistributedInfo, board: Board | None) -> list[DistributedInfo]:
    """Add the diagnostics that the other ranks send within 30 s: each one once, with the ranks that have it.

    Returns:
        All ranks; nothing if some have sent nothing.
    """
    if board is None:
        text = f"the ranks of {info.launcher} do not share a store: the others print their own errors, on stderr"
        add(document, [Diagnostic("note", text)])
        return []
    texts: list[str] = []
    with suppress(RuntimeError):
        texts = board.wait_for_texts(info.world_size - 1, _OTHERS_S)
    heard = {0: info}
    own = (Diagnostic(entry["level"], entry["text"], entry["fix"]) for entry in document["diagnostics"])
    ranks_of: dict[Diagnostic, list[int]] = {diagnostic: [0] for diagnostic in own}
    for message in sorted(map(json.loads, texts), key=lambda message: message["info"]["rank"]):
        rank = message["info"]["rank"]
        try:
            theirs = [Diagnostic(*parts) for parts in message["diagnostics"]]
            heard[rank] = DistributedInfo(**message["info"])
        except (LookupError, TypeError, TrackingError):  # another version of this library has sent it
            theirs = []
            heard[rank] = replace(info, rank=rank, local_rank=None, local_world_size=None, worker_index=None)
        for diagnostic in (*theirs, *_other_versions(_all_versions(document), message.get("versions", {}))):
            ranks_of.setdefault(diagnostic, []).append(rank)
    document.update(ranks_heard=len(heard), diagnostics=[])
    for diagnostic, ranks in ranks_of.items():
        workers = {index for rank in ranks if (index := heard[rank].worker_index) is not None}
        add(document, [diagnostic], *(() if len(ranks) == len(heard) else (ranks, sorted(workers))))
    silent = [rank for rank in range(1, info.world_size) if rank not in heard]
    if silent:
        fix = "look at the log of these ranks: the doctor may not be installed there"
        add(document, [Diagnostic("warning", f"no report within {_OTHERS_S:g} s", fix)], silent)
    return [] if silent else list(heard.values())


def _all_versions(document: dict[str, Any]) -> dict[str, str]:
    trackers = {state["name"]: state["version"] or "none" for state in document["trackers"] if state["version"] != ""}
    return {**trackers, **document["versions"]}


def _other_versions(ours: dict[str, str], theirs: dict[str, str]) -> Iterable[Diagnostic]:
    for name in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(name, "none"), theirs.get(name, "none")
        if our != their:
            fix = "start every rank in the same image or virtual environment"
            text = f"{name} is {their} there, and {our} on rank 0"
            yield Diagnostic("error" if name == OWN else "warning", text, fix)
