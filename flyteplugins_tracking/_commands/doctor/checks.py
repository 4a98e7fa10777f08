"""Checks of the job and of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from flyteplugins_tracking._commands.doctor.plans import MOST_RANKS
from flyteplugins_tracking._commands.doctor.report import Detected
from flyteplugins_tracking.trackers.diagnostics import Diagnostic, why_unwritable

Env = Mapping[str, str]
_START = "torchrun --nproc-per-node=2 train.py, or: srun --ntasks=2 python train.py"


def check(detected: Detected, env: Env) -> Iterator[Diagnostic]:
    """Yield the problems of the detected job, and of the directories that this library needs."""
    for find_problems in _CHECKS:
        yield from find_problems(detected, env)


def _contradiction(detected: Detected, _: Env) -> Iterator[Diagnostic]:
    if detected.error is not None:
        yield Diagnostic("error", detected.error, f"unset {' '.join(detected.variables)}, or start with: {_START}")


def _no_job(detected: Detected, env: Env) -> Iterator[Diagnostic]:
    if detected.info is not None or detected.error is not None:
        return
    yield Diagnostic("note", "no launcher was detected: this process counts as the only one, and has a run", _START)
    if env.get("SLURM_JOB_ID"):
        yield Diagnostic(
            "warning",
            f"SLURM_JOB_ID={env['SLURM_JOB_ID']}, and this process is not in a step with several tasks: each process "
            "that is started here counts as the only one",
            "srun python train.py, in the sbatch script",
        )


def _sizes(detected: Detected, _: Env) -> Iterator[Diagnostic]:
    info = detected.info
    if info is None:
        return
    for size, counted in ((info.local_world_size, "ranks on this worker"), (info.num_workers, "workers")):
        if size is not None and size > info.world_size:
            text = f"{info.launcher} reports {size} {counted}, but only {info.world_size} ranks in all"
            yield Diagnostic("warning", text, f"start with: {_START}")
    if info.world_size > MOST_RANKS:
        yield Diagnostic("warning", f"{info.launcher} reports {info.world_size} ranks", f"start with: {_START}")


def _one_process_a_node(detected: Detected, env: Env) -> Iterator[Diagnostic]:
    info = detected.info
    if info is not None and info.launcher == "kubeflow" and "PET_NPROC_PER_NODE" not in env and "LOCAL_RANK" not in env:
        yield Diagnostic(
            "warning",
            f"LOCAL_RANK is not set: rank {info.rank} of {info.world_size} counts as the only process of its node",
            "torchrun train.py in each pod; or set LOCAL_RANK in each process",
        )


def _unknown_workers(detected: Detected, _: Env) -> Iterator[Diagnostic]:
    info = detected.info
    if info is None or info.world_size == 1 or (info.worker_index is not None and info.local_rank is not None):
        return
    yield Diagnostic(
        "warning",
        f"{info.launcher} does not report the worker (node) of rank {info.rank}: rank_scope='worker' is refused",
        "start with torchrun or srun; or set NODE_RANK, LOCAL_RANK, RANK and WORLD_SIZE in each process",
    )


def _no_rendezvous(detected: Detected, env: Env) -> Iterator[Diagnostic]:
    info = detected.info
    if info is None or info.world_size == 1 or find_spec("torch") is None:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        values = {"MASTER_ADDR": "the host of rank 0", "MASTER_PORT": "29500"}
        if info.launcher == "slurm":
            values["MASTER_ADDR"] = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        yield Diagnostic(
            "warning",
            f"{' and '.join(missing)} not set: torch.distributed's env:// cannot start a process group",
            f"export {' '.join(f'{name}={chr(34)}{values[name]}{chr(34)}' for name in missing)}",
        )


def _directories(_: Detected, __: Env) -> Iterator[Diagnostic]:
    reason = why_unwritable(os.curdir)
    if reason is not None:
        text = f"the working directory, where trackers keep files: {reason}"
        yield Diagnostic("warning", text, "cd to another; or export WANDB_DIR=... PLUTO_DIR=... TRACKIO_DIR=...")
    reason = why_unwritable("~")
    if reason is not None:
        text = f"the home directory, where trackers keep caches and settings: {reason}"
        yield Diagnostic("warning", text, "export HOME=/a/directory")


def _sockets(_: Detected, __: Env) -> Iterator[Diagnostic]:
    """Check the directory of the sockets by which the ranks of a node share a run: see `trackers.peers`."""
    from flyteplugins_tracking.trackers.peers.sockets import socket_directory

    try:
        socket_directory()
    except OSError as error:
        yield Diagnostic(
            "warning",
            f"run_mode='shared' needs a directory for temporary files: {error.strerror}",
            "export TMPDIR=/a/directory",
        )


_CHECKS: tuple[Callable[[Detected, Env], Iterator[Diagnostic]], ...] = (
    _contradiction,
    _no_job,
    _sizes,
    _one_process_a_node,
    _unknown_workers,
    _no_rendezvous,
    _directories,
    _sockets,
)
