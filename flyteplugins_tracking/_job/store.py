"""The stores that a job's processes share: those of torchelastic, and that of the user's process group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking.errors import IdentityError

Env = Mapping[str, str]

STORE_TIMEOUT = timedelta(seconds=30)
# For what is not worth more of a job's start.
_SHORT_TIMEOUT = timedelta(seconds=5)


def job_store(info: DistributedInfo, env: Env) -> Any:
    """A `torch.distributed.Store` that all nodes of the job share; None where there is none that is known."""
    store = None
    if info.launcher == "torchelastic":
        with contextlib.suppress(IdentityError):
            store = rendezvous_store(env, _SHORT_TIMEOUT) or agents_store(env, _SHORT_TIMEOUT)
    dist: Any = sys.modules.get("torch.distributed")
    if store is None and dist is not None and dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store() if dist.get_world_size() == info.world_size else None
    return store


def rendezvous_store(env: Env, timeout: timedelta = STORE_TIMEOUT) -> Any:
    """The store of a c10d rendezvous, if it is that: it is the same when rank 0 has moved to another node.

    Workers are not told where it is. The agent is, by its command line or by variables that its workers inherit.
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
    """The store of the agents, if they share it: it outlives worker-group restarts and ends with the invocation.

    torch 2.5 and later: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/rendezvous.py
    """
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return _store(f"the torchelastic agents at MASTER_ADDR={host} MASTER_PORT={port}", host, port, timeout)


def _store(whose: str, host: str, port: str, timeout: timedelta) -> Any:
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, int(port), is_master=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise IdentityError(
            f"the store of {whose} does not answer, so the ranks cannot agree on a run id: {error}. "
            "Pass id=... to do without."
        ) from error


def agent_option(command_line: list[str], name: str) -> str | None:
    """The last value of `--name=value` or `--name value`, with '-' or '_' in it."""
    found = None
    for argument, following in zip(command_line, [*command_line[1:], ""], strict=True):
        given, equals, value = argument.partition("=")
        if given.replace("_", "-") == f"--{name}":
            found = value if equals else following
    return found
