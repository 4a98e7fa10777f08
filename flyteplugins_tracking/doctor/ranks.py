"""How rank 0 hears what the other ranks have found: through the store of their launcher, where there is one.

The keys are the doctor's own. Nobody takes part in the agreement on a run id.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking.doctor.report import OfRanks, Report
from flyteplugins_tracking.doctor.versions import OWN
from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.diagnostics import Finding

# How long rank 0 waits for the others to tell; and how long they wait for it to print, before they end: as soon as one
# ends with a status, torchrun ends them all.
_TELLING_S = 10.0
_PRINTING_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True)
class There:
    """Another rank: its place, what is installed there, and what it has found."""

    info: DistributedInfo
    versions: Mapping[str, str]
    findings: tuple[Finding, ...]


Told = Mapping[int, There]


def store_of(info: DistributedInfo) -> tuple[Any, list[OfRanks]]:
    """The store that all ranks share, if there is one, and what is wrong where there should be."""
    from flyteplugins_tracking._job.store import job_store

    store = None
    try:
        store = job_store(info, os.environ)
    except ModuleNotFoundError:
        pass  # a job without torch
    except (ImportError, OSError) as error:  # a library that torch needs
        return None, [
            OfRanks(Finding("error", f"torch cannot be imported: {error}", "pip install --force-reinstall torch"))
        ]
    if store is not None or info.launcher != "torchelastic" or info.num_workers == 1:
        return store, []
    text = f"the agents of {info.num_workers} nodes share no store that can be reached, so no run id is agreed on"
    mend = "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or pass id= to tracking_init"
    return None, [OfRanks(Finding("error", text, mend))]


def tell(store: Any, info: DistributedInfo, report: Report) -> int | None:
    """Tell rank 0, and wait until it has printed. Returns its status; None where it has not printed."""
    told = {
        "info": dict(info),
        "versions": _all_versions(report),
        "findings": [asdict(found.finding) for found in report.findings],
    }
    with suppress(RuntimeError):
        store.set(f"{_prefix(info)}/{info.rank}", json.dumps(told))
        store.add(f"{_prefix(info)}/told", 1)
        store.wait([f"{_prefix(info)}/verdict"], timedelta(seconds=_PRINTING_S))
        return int(store.get(f"{_prefix(info)}/verdict"))
    return None


def gather(store: Any, info: DistributedInfo) -> Told | None:
    """What the other ranks tell within the deadline, by rank. None where they cannot."""
    if store is None:
        return None
    told: dict[int, There] = {}
    with suppress(RuntimeError):
        end = time.monotonic() + _TELLING_S
        while store.add(f"{_prefix(info)}/told", 0) < info.world_size - 1 and time.monotonic() < end:
            time.sleep(_POLL_S)
        for rank in range(1, info.world_size):
            if store.check([f"{_prefix(info)}/{rank}"]):
                told[rank] = _there(replace(info, rank=rank), json.loads(store.get(f"{_prefix(info)}/{rank}")))
    return told


def give_verdict(store: Any, info: DistributedInfo, status: int) -> None:
    """Tell the others that all is printed, and with which status the job ends."""
    if store is not None:
        with suppress(RuntimeError):
            store.set(f"{_prefix(info)}/verdict", str(status))


def merged(report: Report, info: DistributedInfo, told: Told | None) -> tuple[OfRanks, ...]:
    """The findings of all ranks: each once, with those that have it."""
    if told is None:
        text = f"{info.launcher}'s ranks share no store: the others print their own errors, on stderr"
        return (*report.findings, OfRanks(Finding("note", text)))
    if not told:
        return (*report.findings, *_silent(info, told))
    workers = {0: info.worker_index, **{rank: there.info.worker_index for rank, there in told.items()}}
    having: dict[Finding, list[int]] = {found.finding: [0] for found in report.findings}
    for rank, there in sorted(told.items()):
        for finding in (*there.findings, *_other_versions(report, there)):
            having.setdefault(finding, []).append(rank)
    return (*(_of_ranks(finding, ranks, workers) for finding, ranks in having.items()), *_silent(info, told))


def _prefix(info: DistributedInfo) -> str:
    return f"flyteplugins_tracking/doctor/{info.restart_count}"


def _there(info: DistributedInfo, told: Mapping[str, Any]) -> There:
    """What a rank has told; of another version of this library, of which more may not be understood, its versions."""
    versions = told.get("versions", {})
    try:
        return There(DistributedInfo(**told["info"]), versions, tuple(Finding(**found) for found in told["findings"]))
    except (LookupError, TypeError, TrackingError):
        unknown = replace(info, local_rank=None, local_world_size=None, worker_index=None)
        return There(unknown, versions, ())


def _all_versions(report: Report) -> dict[str, str]:
    trackers = {state.name: state.version or "none" for state in report.trackers if state.version != ""}
    return {**trackers, **report.versions}


def _other_versions(report: Report, there: There) -> Iterator[Finding]:
    here = _all_versions(report)
    for name in sorted(here.keys() | there.versions.keys()):
        ours, theirs = here.get(name, "none"), there.versions.get(name, "none")
        if ours != theirs:
            level: Any = "error" if name == OWN else "warning"
            mend = "start every rank in the same image or virtual environment"
            yield Finding(level, f"{name} is {theirs} there, and {ours} on rank 0", mend)


def _of_ranks(finding: Finding, ranks: Sequence[int], workers: Mapping[int, int | None]) -> OfRanks:
    if len(ranks) == len(workers):
        return OfRanks(finding)
    of_workers: Iterable[int] = {index for rank in ranks if (index := workers[rank]) is not None}
    return OfRanks(finding, tuple(ranks), tuple(sorted(of_workers)))


def _silent(info: DistributedInfo, told: Told) -> Iterator[OfRanks]:
    silent = tuple(rank for rank in range(1, info.world_size) if rank not in told)
    if silent:
        text = f"nothing was told within {_TELLING_S:g} s"
        yield OfRanks(Finding("warning", text, "look at their log: the doctor may not be installed there"), silent)
