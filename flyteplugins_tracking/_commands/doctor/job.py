"""This process's place in its job, the directories that it needs, and the ids and the runs of the job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, plan
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnostic, check_directory

_START = "torchrun --nproc-per-node=2 train.py, or: srun --ntasks=2 python train.py"
# How many ranks are listed one by one.
_MOST_NAMED = 4
# No job has more. A larger number is a mistake, and planning for it would take all memory.
_MOST_RANKS = 100_000


def check_job(info: DistributedInfo | None, error: str | None, variables: Env, env: Env) -> Iterator[Diagnostic]:
    """Yield the problems of this process's place in its job.

    Args:
        info: This rank; None outside a job, and if the variables contradict each other.
        error: How they contradict each other; None if they do not.
        variables: Those that the launchers' detectors have read.
        env: All variables.
    """
    if error is not None:
        yield Diagnostic("error", error, f"unset {' '.join(variables)}, or start with: {_START}")
    elif info is None:
        yield Diagnostic("note", "no launcher was detected: this process counts as the only one, and has a run", _START)
        if env.get("SLURM_JOB_ID"):
            text = "this process is not in a step with several tasks: each process that is started here counts as the"
            text = f"SLURM_JOB_ID={env['SLURM_JOB_ID']}, and {text} only one"
            yield Diagnostic("warning", text, "srun python train.py, in the sbatch script")
    else:
        yield from _check_rank(info, env)


def _check_rank(info: DistributedInfo, env: Env) -> Iterator[Diagnostic]:
    for size, counted in ((info.local_world_size, "ranks on this worker"), (info.num_workers, "workers")):
        if size is not None and size > info.world_size:
            text = f"{info.launcher} reports {size} {counted}, but only {info.world_size} ranks in all"
            yield Diagnostic("warning", text, f"start with: {_START}")
    if info.world_size > _MOST_RANKS:
        yield Diagnostic("warning", f"{info.launcher} reports {info.world_size} ranks", f"start with: {_START}")
    if info.launcher == "kubeflow" and "PET_NPROC_PER_NODE" not in env and "LOCAL_RANK" not in env:
        text = f"LOCAL_RANK is not set: rank {info.rank} of {info.world_size} counts as the only process of its node"
        yield Diagnostic("warning", text, "torchrun train.py in each pod; or set LOCAL_RANK in each process")
    if info.world_size == 1:
        return
    if info.worker_index is None or info.local_rank is None:
        text = f"{info.launcher} does not report the worker (node) of rank {info.rank}: rank_scope='worker' is refused"
        fix = "start with torchrun or srun; or set NODE_RANK, LOCAL_RANK, RANK and WORLD_SIZE in each process"
        yield Diagnostic("warning", text, fix)
    slurms = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    values = {"MASTER_ADDR": slurms if info.launcher == "slurm" else "the host of rank 0", "MASTER_PORT": "29500"}
    missing = [name for name in values if not env.get(name)]
    if missing and find_spec("torch") is not None:
        text = f"{' and '.join(missing)} not set: torch.distributed's env:// cannot start a process group"
        yield Diagnostic("warning", text, "export " + " ".join(f'{name}="{values[name]}"' for name in missing))


def check_directories() -> Iterator[Diagnostic]:
    """Yield the directories that trackers and this library need, and that cannot be used."""
    text = "the working directory, where trackers keep files"
    fix = "cd to another; or export WANDB_DIR=... PLUTO_DIR=... TRACKIO_DIR=..."
    yield from check_directory(os.curdir, "warning", text, fix)
    text = "the home directory, where trackers keep caches and settings"
    yield from check_directory("~", "warning", text, "export HOME=/a/directory")
    from flyteplugins_tracking.trackers.node_group import socket_directory

    try:
        socket_directory()  # of the sockets by which the ranks of a node share a run: see `trackers.node_group`
    except OSError as error:
        text = f"run_mode='shared' needs a directory for temporary files: {error.strerror}"
        yield Diagnostic("warning", text, "export TMPDIR=/a/directory")


def base_id(
    info: DistributedInfo | None, env: Env, trackers: Sequence[str]
) -> tuple[str | None, str, list[Diagnostic]]:
    """Return the base id of the runs of these trackers, where it comes from, and the problems with it.

    The id is None if it is known only when a run is opened.
    """
    from flyteplugins_tracking._job.identity import from_launcher
    from flyteplugins_tracking.trackers.registry import find_tracker

    chosen = []
    for tracker in map(find_tracker, trackers):
        chosen += [(tracker, name) for name in tracker.run_id_variables if env.get(name)][:1]
    if chosen:
        variable = chosen[0][1]
        return env[variable], variable, [problem for pair in chosen for problem in _check_id(*pair, env)]
    if "FLYTE_INTERNAL_EXECUTION_ID" in env:
        return None, "the name of the Flyte execution and node, or run and action", []
    if info is None:
        return None, "a random id", []
    if info.launcher == "torchelastic":
        return None, "the rendezvous id and a token that the ranks agree on", []
    try:
        return None, f"{info.launcher}: this time {from_launcher(info, env, agreement=True).base_id}", []
    except IdentityError as error:
        text = f"{error} Only run_mode='auto' with rank_scope='global' works without one"
        fix = "pass id= to tracking_init: the same on every rank, and a new one for each job"
        return None, "id= of tracking_init", [Diagnostic("warning", text, fix)]


def _check_id(tracker: Tracker, variable: str, env: Env) -> Iterator[Diagnostic]:
    """Yield what is wrong with an id from a variable. An exported id is the run of every job started afterwards."""
    from flyteplugins_tracking.trackers.config import TrackingConfig

    value = env[variable]
    try:
        tracker.check(TrackingConfig(id=value))
    except ConfigError as error:
        yield Diagnostic("error", f"{variable}={value}: {error}", f"unset {variable}, or choose another id")
        return
    if value not in (env.get("KONDUKTOR_JOB_NAME"), env.get("FLYTE_INTERNAL_EXECUTION_ID")):
        text = f"{variable}={value}: every job with this variable writes to the same runs"
        yield Diagnostic("warning", text, f"unset {variable}, unless you intend this")


def plan_rows(
    info: DistributedInfo | None, base_id: str | None, primary_rank: int, ranks: Sequence[DistributedInfo | None]
) -> list[dict[str, Any]]:
    """Return one row for each mode and scope; none for more than `_MOST_RANKS` ranks.

    Args:
        info: This rank; None outside a distributed job.
        base_id: The base id; None if it is unknown.
        primary_rank: As for `tracking_init`.
        ranks: All ranks; empty if they are unknown. The other workers then count as equal in size.
    """
    if info is not None and info.world_size > _MOST_RANKS:
        return []
    world = ranks or ([None] if info is None else _world(info))
    return [_row(world, m, s, base_id or "{base}", primary_rank) for m in RUN_MODES for s in RANK_SCOPES]


def _world(info: DistributedInfo) -> list[DistributedInfo]:
    """Return all ranks. The number of ranks of this one's worker is known: the other workers share the rest equally."""
    if info.worker_index is None or info.local_rank is None:
        return [DistributedInfo(rank, info.world_size, launcher=info.launcher) for rank in range(info.world_size)]
    size = min(info.local_world_size or math.ceil(info.world_size / (info.num_workers or 1)), info.world_size)
    others = (info.num_workers or math.ceil(info.world_size / size)) - 1
    rest = range(info.world_size - size if others else 0)
    sizes = [len(rest[index::others]) for index in range(others)]
    sizes.insert(info.worker_index, info.world_size - len(rest))
    return list(iter_ranks([size for size in sizes if size > 0], launcher=info.launcher))


def _row(
    ranks: Sequence[DistributedInfo | None], run_mode: RunMode, rank_scope: RankScope, base_id: str, primary_rank: int
) -> dict[str, Any]:
    writers: dict[str, list[int]] = {}
    groups: dict[str, None] = {}
    error = None
    try:
        for info in ranks:
            planned = plan(info, run_mode, rank_scope, base_id, primary_rank=primary_rank)
            if planned.opens:
                writers.setdefault(planned.run_id or "", []).append(info.rank if info else 0)
            if planned.opens and planned.group:
                groups[planned.group] = None
    except TopologyError as refusal:
        error, writers, groups = str(refusal), {}, {}
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
    """Return one pattern for texts that differ in their numbers, such as `a-{0..3}`; empty for none."""
    parts = []
    for column in zip(*(re.split(r"(\d+)", text) for text in texts), strict=True):
        values = set(column)
        parts.append(column[0] if len(values) == 1 else f"{{{min(map(int, values))}..{max(map(int, values))}}}")
    return "".join(parts)


def _writers(writers: Sequence[Sequence[int]], world_size: int) -> str:
    if not writers:
        return "-"
    if len(writers) == world_size:
        return "each rank its own"
    if len(writers) == 1:
        return f"all {world_size} ranks" if len(writers[0]) == world_size else f"rank {writers[0][0]}"
    if sum(map(len, writers)) == world_size:
        sizes = sorted({len(ranks) for ranks in writers})
        return f"the {' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))} ranks of each worker"
    return f"ranks {named([ranks[0] for ranks in writers])}"


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: `0-3` for a range, and at most four numbers otherwise."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MOST_NAMED - 1]))}, ..., {ranks[-1]}"
