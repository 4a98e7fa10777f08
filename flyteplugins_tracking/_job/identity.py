"""The base id: one name for this invocation of the job, that every rank agrees on and that restarts keep.

Another invocation gets another one, also with a constant `--rdzv-id`. What the user or Flyte gives stands first; then
what the launcher that gave the topology offers.
"""

from __future__ import annotations

import hashlib
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.store import STORE_TIMEOUT, agent_option, agents_store, rendezvous_store
from flyteplugins_tracking._util import proc
from flyteplugins_tracking.errors import IdentityError

Env = Mapping[str, str]

_STORE_KEY = "flyteplugins_tracking/base_id"
# Trackers allow 64 characters or more; the longest suffix, "-worker-9999-rank-99", and an ordinal need 25 of them.
_MAX_LENGTH = 39


@dataclass(frozen=True)
class Identity:
    """A base id, and the group that its runs belong to where the plan gives none.

    Attributes:
        base_id: None for a random id of the tracker's.
        group: Set where a retry cannot have the same base id.
    """

    base_id: str | None
    group: str | None = None


def from_variables(env: Env, names: tuple[str, ...]) -> Identity | None:
    """The id that the tracker's own variables give, for instance `WANDB_RUN_ID`."""
    return next((Identity(env[name]) for name in names if env.get(name)), None)


def from_launcher(info: DistributedInfo | None, env: Env, *, agreement: bool) -> Identity:
    """What the launcher that gave the topology offers.

    Args:
        info: This rank; None outside a distributed job.
        env: The environment's variables.
        agreement: Whether several ranks need the id. Where one rank alone does, a random one will do.

    Raises:
        IdentityError: There is nothing that all nodes agree on.
    """
    if info is None:
        return Identity(None)
    alone = info.num_workers == 1 or not agreement
    base_id = RUN_ID_SOURCES.get(info.launcher, _nameless)(info, env, alone)
    if base_id is None and agreement:
        if info.launcher == "lightning":
            # Where it starts the ranks, the first one's run is open already, as that of a single process.
            raise IdentityError(
                "Lightning's own launcher starts the other ranks in the function of the first, whose run is open then. "
                "For run_mode='new' or 'shared' start with torchrun --nproc-per-node=..., or srun."
            )
        nodes = "all nodes" if info.num_workers is None else f"all {info.num_workers} nodes"
        raise IdentityError(
            f"no run id that {nodes} agree on: {info.launcher} offers none. "
            "Pass id=..., the same on every rank and another for each job, or call the decorated function after "
            "torch.distributed.init_process_group()."
        )
    return Identity(base_id)


def readable(*parts: str | None) -> str:
    """Join `parts` to an id that every tracker takes: letters, digits, '.', '_' and '-', at most 39 characters."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(part for part in parts if part)).strip("-.")
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH - 9].rstrip('-.')}-{_digest(text)}"


def _torchelastic(info: DistributedInfo, env: Env, alone: bool) -> str | None:
    """The run id ("none" for a static rendezvous), and a token: constant run ids are common."""
    name = info.job_id if info.job_id not in (None, "none") else "torchrun"
    rendezvous, agents = rendezvous_store(env), agents_store(env)
    token = None
    if rendezvous is not None:
        token = _agree(rendezvous, _random_token(), f"{_STORE_KEY}/{env.get('TORCHELASTIC_RUN_ID', '')}")
    if agents is not None:
        token = _agree(agents, token or _random_token())
    elif token is None:
        token = _agent_token(env) if alone else _from_rank_0(info, _agent_token(env))
    return None if token is None else readable(name, token)


def is_elastic(info: DistributedInfo | None, env: Env) -> bool:
    """Whether torchelastic may change the number of nodes, as far as its command line or its variables tell."""
    if info is None or info.launcher != "torchelastic":
        return False
    agent = proc.command_line(proc.nearest_without("TORCHELASTIC_RUN_ID"))
    fewest, _, most = (agent_option(agent, "nnodes") or env.get("PET_NNODES") or "").partition(":")
    return most not in ("", fewest)


def _agent_token(env: Env) -> str | None:
    """Where the agents' store is not shared: this worker's agent, by its private directory of this invocation.

    The agent makes `{run_id}_{random}` once and a subfolder in it for each attempt.
    """
    match = re.match(r"(.+)/attempt_\d+/\d+/error\.json$", env.get("TORCHELASTIC_ERROR_FILE", ""))
    return _digest(proc.machine(), match[1]) if match else None


def _slurm(info: DistributedInfo, env: Env, _: bool) -> str | None:
    """Job and step: a requeued job keeps its number, and several steps of one job are several trainings."""
    return readable("slurm", env.get("SLURM_CLUSTER_NAME"), info.job_id, env.get("SLURM_STEP_ID"))


def _job_name(info: DistributedInfo, env: Env, alone: bool) -> str | None:
    return readable(info.job_id) if info.job_id else _nameless(info, env, alone)


def _openmpi(info: DistributedInfo, env: Env, alone: bool) -> str | None:
    """The namespace that all nodes have; it is made from mpirun's host and process id, which can come again."""
    if not info.job_id:
        return _nameless(info, env, alone)
    return readable("mpi", info.job_id, _launcher_process(info) if info.num_workers == 1 else None)


def _nameless(info: DistributedInfo, _: Env, alone: bool) -> str | None:
    """A launcher that gives its job no name: the ranks' process group or, on one node, the launcher's process."""
    token = _from_rank_0(info, _random_token())
    if token is not None:
        return readable(info.launcher, token)
    process = _launcher_process(info) if alone else None
    return None if process is None else readable(info.launcher, process)


def _launcher_process(info: DistributedInfo) -> str | None:
    """On one node: the process that started the ranks, by its id and start.

    Not for ranks that a script, a shell or multiprocessing's parent may have started: those start one job after the
    other.
    """
    marker = _RANK_VARIABLES.get(info.launcher)
    if marker is None:
        return None
    pid = proc.nearest_without(marker)
    return _digest(proc.machine(), pid, proc.start_time(pid))


RUN_ID_SOURCES: dict[str, Callable[[DistributedInfo, Env, bool], str | None]] = {
    "torchelastic": _torchelastic,
    "slurm": _slurm,
    "konduktor": _job_name,
    "skypilot": _job_name,
    "openmpi": _openmpi,
}
# Launchers that are one process per job, and what only the processes below that one have.
_RANK_VARIABLES = {
    "horovod": "HOROVOD_RANK",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mvapich": "MV2_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
}


def _from_rank_0(info: DistributedInfo, token: str | None) -> str | None:
    """Rank 0's `token`, through the store of a process group that the user's code has initialised for the whole world.

    Raises:
        IdentityError: Rank 0 has not called the decorated function.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if token is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size() != info.world_size:
        return None
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        return _agree(store, token)
    try:
        store.wait([_STORE_KEY], STORE_TIMEOUT)
    except RuntimeError as error:
        raise IdentityError(
            f"rank {info.rank} has no run id from rank 0, which did not answer for {STORE_TIMEOUT.seconds} s or has "
            "ended: call the decorated function on every rank, or pass id=..."
        ) from error
    return _agree(store, "")


def _agree(store: Any, token: str, key: str = _STORE_KEY) -> str:
    """The token of the first to come: `compare_set` writes where nothing is written, and returns what is."""
    agreed: bytes = store.compare_set(key, "", token)
    return agreed.decode()


def _random_token() -> str:
    return uuid.uuid4().hex[:8]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:8]
