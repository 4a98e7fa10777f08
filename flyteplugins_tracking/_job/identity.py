"""The base id: one name for this invocation of the job, which all ranks agree on and restarts keep.

Another invocation gets another id, even with a constant `--rdzv-id`. An id from the user or from Flyte takes precedence
over the launcher's.

This module only names the run. After a restart the tracker opens the id again and continues the run with that id:
`_id_arguments` of W&B, `open_run` of MLflow and Trackio, and `_init` of Pluto, each in `trackers/<service>/open.py`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._job.board import STORE_TIMEOUT, agents_store, rendezvous_store
from flyteplugins_tracking._job.starts import is_task, launch_directory, outer_job, start_in
from flyteplugins_tracking._rank import children, engines
from flyteplugins_tracking._rank.children import has_inherited_group, marked_base_id
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import LAUNCHERS, ranks_of_unknown
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import initialised_distributed, loaded
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.text import digest
from flyteplugins_tracking.errors import IdentityError

_STORE_KEY = "flyteplugins_tracking/base_id"
# Trackers allow 64 characters or more; the longest suffix, "-worker-9999-rank-99", and an ordinal need 25 of them.
_MAX_LENGTH = 39


@dataclass(frozen=True)
class Identity:
    """A base id, and the group of its runs if the plan gives none.

    Attributes:
        base_id: None if the tracker shall make a random id.
        group: Set if a retry cannot have the same base id.
    """

    base_id: str | None
    group: str | None = None


def from_launcher(info: DistributedInfo, env: Env, *, agreement: bool, in_pool: bool = False) -> Identity:
    """Return the identity that this rank's launcher provides.

    Args:
        info: This rank.
        env: The environment variables.
        agreement: Whether several ranks need the same id. If only one rank needs it, it may be random.
        in_pool: Whether this is a worker of a pool, which the batch job around that has not started.

    Raises:
        IdentityError: The launcher provides nothing that is the same on all nodes.
    """
    outer = None if in_pool else outer_job(env)
    parts = start_in(outer, info)
    start = None if parts is None else readable(*parts)
    if outer is not None and is_task(outer, info):
        base_id = start
    else:
        base_id = _SOURCES.get(info.launcher, _without_job_name)(info, env, agreement, start)
    if base_id is None and agreement:
        if info.launcher == "lightning":
            # It starts the other ranks when the first one's run is already open, as the run of a single process.
            raise IdentityError(
                "Lightning's own launcher starts the other ranks inside the function of the first, whose run is then "
                "already open. For run_mode='new' or 'shared' start with torchrun --nproc-per-node=..., or srun."
            )
        nodes = "all nodes" if info.num_workers is None else f"all {info.num_workers} nodes"
        raise IdentityError(
            f"no run id that {nodes} agree on: {info.launcher} offers none. "
            "Pass id=..., the same on every rank and another for each job, or call the decorated function after "
            "torch.distributed.init_process_group() or jax.distributed.initialize()."
        )
    return Identity(base_id)


def identity_of_program(env: Env) -> Identity:
    """Return the identity of a program by itself: a restart of the job that it runs in keeps it."""
    start = start_in(None if ranks_of_unknown(env) or not children.is_program() else outer_job(env), None)
    return Identity(None if start is None else readable(*start))


def identity_of_parent(parent: DistributedInfo, env: Env) -> Identity:
    """Return the identity of the rank that has started this process, as far as that rank or the launcher tells it.

    For torchelastic's stores a process would have to import torch, which takes seconds: one that has not does without.
    """
    base_id = marked_base_id(env)
    if base_id is not None or (parent.launcher == "torchelastic" and loaded("torch.distributed") is None):
        return Identity(base_id)
    with suppress(IdentityError):
        return from_launcher(parent, env, agreement=False)
    return Identity(None)


def readable(*parts: str | None) -> str:
    """Join `parts` to an id that every tracker accepts: letters, digits, '.', '_' and '-', at most 39 characters."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(part for part in parts if part)).strip("-.")
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH - 9].rstrip('-.')}-{digest(text)}"


def _is_alone(info: DistributedInfo, agreement: bool) -> bool:
    """Return whether what this machine knows is enough: no rank of another one needs the id."""
    return info.num_workers == 1 or not agreement


def _torchelastic(info: DistributedInfo, env: Env, agreement: bool, start: str | None) -> str | None:
    """Return the first id that a rank has offered: that of its start in an outer job, or a run id with a random token.

    The run id is "none" for a static rendezvous, and constant run ids are common. Each rank offers its id to these
    stores in turn. The first that a store receives stays there:

    1. The store of a c10d rendezvous whose address is known. It stays when rank 0 moves to another node.
    2. The store that the agents share, if they share one. It receives the id of 1, so that ranks which do not know
       the rendezvous's address agree too. It is on the node of rank 0.

    Both stores belong to the agents, so that they outlive a restart of the workers. If there is neither, the token is
    that of the agent: this rank's own if no other node needs it, else rank 0's, through the process group.
    """
    name = info.job_id if info.job_id not in (None, "none") else "torchrun"

    def offered(token: str) -> str:
        return readable(name, token) if start is None else start

    rendezvous, agents = rendezvous_store(env), agents_store(env)
    base_id = None
    if rendezvous is not None:
        base_id = _agree(rendezvous, offered(_random_token()), f"{_STORE_KEY}/{env.get('TORCHELASTIC_RUN_ID', '')}")
    if agents is not None:
        return _agree(agents, base_id or offered(_random_token()))
    if base_id is not None:
        return base_id
    token = _agent_token(env) if start is None else ""
    own = None if token is None else offered(token)
    return own if _is_alone(info, agreement) else _from_rank_0(info, own)


def _agent_token(env: Env) -> str | None:
    """Identify the launch that this worker is in, for agents that share no store."""
    directory = launch_directory(env)
    return digest(proc.machine(), directory) if directory else None


def _ray(info: DistributedInfo, env: Env, agreement: bool, start: str | None) -> str | None:
    return readable(info.job_id) if info.job_id else _without_job_name(info, env, agreement, start)


def _openmpi(info: DistributedInfo, env: Env, agreement: bool, start: str | None) -> str | None:
    """Join the namespace and, on one node, mpirun's process.

    The namespace is the same on all nodes. It is made from mpirun's host and process id, which may be reused.
    """
    if not info.job_id:
        return _without_job_name(info, env, agreement, start)
    return readable("mpi", info.job_id, _launcher_process(info) if info.num_workers == 1 else None)


def _without_job_name(info: DistributedInfo, _: Env, agreement: bool, start: str | None) -> str | None:
    """Use rank 0's start in an outer job, the ranks' process group, JAX's store or the launcher's process on one node.

    Without agreement the primary, which may be any rank, does not wait for rank 0: that one has no run, and sends none.
    """
    own = start or readable(info.launcher, _random_token())
    agreed = _from_rank_0(info, own, waits=agreement) or _through_jax(info, own)
    if agreed is not None or (start is not None and not agreement):
        return agreed or own
    process = _launcher_process(info) if _is_alone(info, agreement) else None
    return None if process is None else readable(info.launcher, process)


def _launcher_process(info: DistributedInfo) -> str | None:
    """On one node, identify the process that started the ranks by its id and start time.

    None for ranks that a script, a shell or multiprocessing's parent may have started, since one such process may start
    several jobs.
    """
    launcher = LAUNCHERS.get(info.launcher)
    if launcher is None or not launcher.has_one_process_per_job:
        return None
    pid = proc.nearest_without(launcher.rank)
    return digest(proc.machine(), pid, proc.start_time(pid))


# The launchers that give a name. For the others the entry in `LAUNCHERS` is enough.
_SOURCES: Mapping[str, Callable[[DistributedInfo, Env, bool, str | None], str | None]] = {
    "torchelastic": _torchelastic,
    "ray": _ray,
    "openmpi": _openmpi,
}


def _from_rank_0(info: DistributedInfo, token: str | None, *, waits: bool = True) -> str | None:
    """Return rank 0's `token`, through the store of a process group that the user's code initialised for all ranks.

    Args:
        info: This rank.
        token: The token of this rank.
        waits: Whether other ranks wait for rank 0's token. If not, the token of the first rank that calls this is used.

    Raises:
        IdentityError: Rank 0 did not call the decorated function in time.
    """
    dist = initialised_distributed()
    if token is None or dist is None or has_inherited_group() or dist.get_world_size() != info.world_size:
        return None
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0 or not waits:
        return _agree(store, token)
    try:
        store.wait([_STORE_KEY], STORE_TIMEOUT)
    except RuntimeError as error:
        raise IdentityError(
            f"rank {info.rank} received no run id from rank 0, which did not answer for {STORE_TIMEOUT.seconds} s or "
            "has ended: call the decorated function on every rank, or pass id=..."
        ) from error
    return _agree(store, "")


def _through_jax(info: DistributedInfo, token: str) -> str | None:
    """Return the first rank's `token`, through the store of JAX's processes; None if they are not the ranks."""
    store = engines.jax_store(info)
    try:
        return None if store is None else _agree(store, token)
    except RuntimeError as error:
        raise IdentityError(
            f"JAX's coordinator does not answer, so the ranks cannot agree on a run id: {error}. Pass id=... to do "
            "without it."
        ) from error


def _agree(store: Any, token: str, key: str = _STORE_KEY) -> str:
    """Return the token of the first caller: `compare_set` writes only if the key is empty, and returns its value."""
    first_token: bytes = store.compare_set(key, "", token)
    return first_token.decode(errors="replace")


def _random_token() -> str:
    return uuid.uuid4().hex[:8]
