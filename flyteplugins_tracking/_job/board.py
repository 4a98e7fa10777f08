"""The board of a job: where its ranks leave short strings for each other. No rank waits for another there.

It is in the job's store, so that ranks of all nodes read it: torchelastic's store, that of the user's process group, or
JAX's. A rank of a job without a store has a board of its own, which no other rank reads.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

from flyteplugins_tracking._rank import engines
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RankScope, position
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import initialised_distributed, loaded
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.text import parse_json, printable
from flyteplugins_tracking._util.threads import wait_until
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import IdentityError

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)
T = TypeVar("T")
STORE_TIMEOUT = timedelta(seconds=30)
# For uses that must not delay the job for longer.
SHORT_TIMEOUT = timedelta(seconds=10)
_NAMESPACE = "flyteplugins_tracking"
# How long a rank waits for rank 0 to ask for the run of a script, and how often it looks.
_FIRST_RANK_S, _POLL_S = 10.0, 0.25
# How many strings are read from one place on: somebody may have raised the counter.
_MOST_TEXTS = 2000


class Board:
    """A part of a job's board. Threads may share it.

    Its methods raise a RuntimeError if the store has gone: with torch.distributed's own store, with rank 0.

    Attributes:
        store: What all ranks share.
    """

    def __init__(self, store: Any, topic: str) -> None:
        """Does nothing in the store yet.

        Args:
            store: What all ranks share: a `torch.distributed.Store`, or an object with its methods `add`, `set`, `get`,
                `check` and `compare_set`.
            topic: Separates what has nothing to do with each other.
        """
        self.store = store
        self._prefix = f"{_NAMESPACE}/{topic}"

    @property
    def is_own(self) -> bool:
        """Whether only this process reads it."""
        return isinstance(self.store, OwnStore)

    def of_topic(self, topic: str) -> Board:
        """Return the board of another topic, over the same connection."""
        return Board(self.store, topic)

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter, and return its value. It is 0 at first; and, with one warning, if it is no number."""
        try:
            return int(self.store.add(f"{self._prefix}/{key}", amount))
        except (ValueError, IndexError):  # torch's stores raise both
            _warn_once("counter", "a counter on the job's board is left out, since it is no number: %s", key)
            return 0

    def put(self, key: str, text: str) -> None:
        """Store a string, in the place of an earlier one."""
        self.store.set(f"{self._prefix}/{key}", text)

    def put_first(self, key: str, text: str) -> str:
        """Store a string if there is none, and return the one that is stored: the same to all ranks."""
        return bytes(self.store.compare_set(f"{self._prefix}/{key}", "", text)).decode(errors="replace")

    def get(self, key: str) -> str | None:
        """Return the string of this key; None if there is none."""
        name = f"{self._prefix}/{key}"
        return bytes(self.store.get(name)).decode(errors="replace") if self.store.check([name]) else None

    def get_all(self, keys: Iterable[str]) -> list[str | None]:
        """Return the strings of these keys, None for each that has none."""
        return self._read([f"{self._prefix}/{key}" for key in keys])

    def _read(self, names: list[str]) -> list[str | None]:
        """Read all together, or by halves if some have no string: a store waits for one that has none."""
        if not names or self.store.check(names):
            read = getattr(self.store, "multi_get", lambda several: [self.store.get(name) for name in several])
            return [bytes(text).decode(errors="replace") for text in (read(names) if names else ())]
        if len(names) == 1:
            return [None]
        middle = len(names) // 2
        return [*self._read(names[:middle]), *self._read(names[middle:])]

    def append(self, text: str) -> None:
        """Append a string to those of all ranks."""
        self.put(f"text/{self.count('texts', 1)}", text)

    def texts(self, start: int = 0, known: Container[int] = ()) -> dict[int, str]:
        """Return the strings that ranks have appended, by their numbers, from `start` on and without the `known`."""
        numbers = range(start, min(self.count("texts"), start + _MOST_TEXTS))
        # A rank counts its string before it stores it.
        texts = {number: self.get(f"text/{number + 1}") for number in numbers if number not in known}
        return {number: text for number, text in texts.items() if text is not None}


def job_board(info: DistributedInfo, env: Env, topic: str, timeout: timedelta = SHORT_TIMEOUT) -> Board | None:
    """Return the board in the job's store; None if the job has no store that is known.

    Raises:
        RuntimeError: The store has not answered within `timeout`.
    """
    try:
        store = connected_store(info, env, timeout)
    except ImportError:  # a job without torch, or with a broken one
        return None
    return None if store is None else Board(store, topic)


def rank_that_opens(info: DistributedInfo, env: Env, scope: RankScope, name: str) -> int:
    """Return the rank that has the run of a script which opens it itself; with "worker", the local rank.

    Rank 0 has it if it asks for it within 10 s after the first rank that does. If not, the first one has it, and the
    next attempt's too, where the store outlives this one. Without a board, it is rank 0.
    """
    rank, worker = position(info, scope) or 0, "" if scope == "global" else info.worker_index
    with suppress(RuntimeError, ValueError):  # the store has gone; the string is another program's
        board = None if info.world_size == 1 else job_board(info, env, f"opens/{name}/{worker}/{info.world_size}")
        if board is not None:
            if rank != 0:
                wait_until(lambda: board.get("rank") is not None, _FIRST_RANK_S, _POLL_S)
            return int(board.put_first("rank", str(rank)))
    return 0


def to_text(value: Any) -> str:
    """Return a dataclass as a string for the board."""
    return json.dumps(asdict(value), separators=(",", ":"))


def from_text(kind: type[T], text: str) -> T | None:
    """Return the dataclass whose fields a string of the board has, as JSON. The types of the fields are not checked.

    None, with one warning, if it is another program's string or a damaged one.
    """
    try:
        fields = parse_json(text).items()
        return kind(**{name: printable(value) if isinstance(value, str) else value for name, value in fields})
    except (ValueError, TypeError, AttributeError):
        name, text = kind.__name__, text[:80]
        _warn_once(name, "a string on the job's board is left out, since it is no %s: %r", name, text)
        return None


class OwnStore(dict[str, bytes]):
    """A store for this process alone, as far as that needs one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return its value."""
        value = int(self.get(key, 0)) + amount
        self.set(key, str(value))
        return value

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self[key] = value.encode()

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys have been stored."""
        return all(key in self for key in keys)


# The stores that a job has


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
        return _elastic_store(info, env, timeout) or _clone_of_group_store(info) or engines.jax_store(info)


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
