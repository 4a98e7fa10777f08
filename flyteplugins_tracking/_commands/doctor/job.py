"""What is wrong with this process's place in its job, with the id of its runs, and with the directories it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from flyteplugins_tracking._commands.doctor.plans import MOST_RANKS
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking.errors import ConfigError, IdentityError
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnostic, check_directory

_START = "torchrun --nproc-per-node=2 train.py, or: srun --ntasks=2 python train.py"


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
    if info.world_size > MOST_RANKS:
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
    from flyteplugins_tracking.trackers.peers.sockets import socket_directory

    try:
        socket_directory()  # of the sockets by which the ranks of a node share a run: see `trackers.peers`
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
