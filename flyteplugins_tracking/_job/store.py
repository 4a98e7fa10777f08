"""The stores that a job's processes share: those of torchelastic, that of the user's process group, and JAX's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flyteplugins_tracking._rank import jax
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import initialised_distributed, loaded
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking.errors import IdentityError

STORE_TIMEOUT = timedelta(seconds=30)
# For uses that must not delay the job for longer.
SHORT_TIMEOUT = timedelta(seconds=10)


class _Connections(PerProcess):
    """This process's connections to its job's stores. It has one, unless it moves to another store.

    They are kept: torch asks for the names of both ends' hosts at each connection, and a busy name server answers after
    seconds. A forked child must not use its parent's.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while one is made
        self.elastic: Any = None
        self.elastic_job: tuple[str | None, ...] = ()  # the variables of the job that it is of
        self.group: Any = None
        # The store of the process group that `group` reaches. Not held: it ends with its group, and so does its port.
        self.group_store: Callable[[], Any] = lambda: None


_connections = register(_Connections())


def is_torch_loaded() -> bool:
    """Whether torch.distributed is imported, and no thread is about to import it."""
    return loaded("torch") is not None and loaded("torch.distributed") is not None


def connected_store(info: DistributedInfo, env: Env, timeout: timedelta = SHORT_TIMEOUT) -> Any:
    """Return a `torch.distributed.Store`, or JAX's, that all nodes of the job share; None if none is known.

    It is this process's own connection, which its threads share. So none of them may wait for a value there.

    Raises:
        RuntimeError: The store does not answer.
    """
    with _connections.lock:
        return _elastic_store(info, env, timeout) or _clone_of_group_store(info) or jax.job_store(info)


def _elastic_store(info: DistributedInfo, env: Env, timeout: timedelta) -> Any:
    """Return the connection to torchelastic's store; None for another launcher, and if it has no such store.

    Raises:
        RuntimeError: It does not answer.
    """
    if info.launcher != "torchelastic":
        return None
    job = tuple(env.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    if _connections.elastic_job != job or not _answers(_connections.elastic):
        try:
            _connections.elastic = rendezvous_store(env, timeout) or agents_store(env, timeout)
            _connections.elastic_job = job
        except IdentityError as error:
            raise RuntimeError(f"the job's store does not answer: {error.__cause__}") from error
    return _connections.elastic


def _answers(store: Any) -> bool:
    """Whether there is a connection, and its other end."""
    try:
        return store is not None and store.check(["flyteplugins_tracking"]) is not None
    except RuntimeError:
        return False


def _clone_of_group_store(info: DistributedInfo) -> Any:
    """Return a connection to the process group's store; None if there is no such group."""
    store = _group_store(info)
    if store is None:
        return None
    if _connections.group_store() is store:
        return _connections.group
    base: Any = store
    while hasattr(base, "underlying_store"):  # a process group's prefixes: other processes do not know them
        base = base.underlying_store
    if not hasattr(base, "clone"):  # an older torch
        return base
    _connections.group, _connections.group_store = base.clone(), weakref.ref(store)
    return _connections.group


def _group_store(info: DistributedInfo) -> Any:
    """Return the store of the process group of all ranks; None if there is no such group."""
    dist = initialised_distributed()
    if dist is None or dist.get_world_size() != info.world_size:
        return None
    return dist.distributed_c10d._get_default_store()


def hosts_job_store(info: DistributedInfo) -> bool:
    """Return whether the store of `connected_store` ends with this process: it is a process group's, or JAX's."""
    return info.rank == 0 and _connections.elastic is None


def rendezvous_store(env: Env, timeout: timedelta = STORE_TIMEOUT) -> Any:
    """Return the store of a c10d rendezvous; None for another rendezvous. It stays when rank 0 moves to another node.

    Workers do not get its address. The agent does, on its command line or in variables that its workers inherit.
    """
    agent = proc.command_line(proc.nearest_without("TORCHELASTIC_RUN_ID"))
    backend = agent_option(agent, "rdzv-backend") or env.get("PET_RDZV_BACKEND")
    endpoint = agent_option(agent, "rdzv-endpoint") or env.get("PET_RDZV_ENDPOINT") or ""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "29400")
    if backend != "c10d" or not host or "/" in host or not port.isdecimal() or port == "0":
        return None
    return _store(f"the c10d rendezvous at {endpoint}", host.strip("[]"), port, timeout)


def agents_store(env: Env, timeout: timedelta = STORE_TIMEOUT) -> Any:
    """Return the store that the agents share, if any. It outlives worker-group restarts and ends with the invocation.

    torch 2.5 and later: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/rendezvous.py
    """
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return _store(f"the torchelastic agents at MASTER_ADDR={host} MASTER_PORT={port}", host, port, timeout)


def _store(owner: str, host: str, port: str, timeout: timedelta) -> Any:
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, int(port), is_master=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise IdentityError(
            f"the store of {owner} does not answer, so the ranks cannot agree on a run id: {error}. "
            "Pass id=... to do without it."
        ) from error


def agent_option(command_line: list[str], name: str) -> str | None:
    """Return the last value of `--name=value` or `--name value`; '-' and '_' in the name are the same."""
    last_value = None
    for argument, following in zip(command_line, [*command_line[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == f"--{name}":
            last_value = value if equals else following
    return last_value
