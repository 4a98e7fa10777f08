"""A job of JAX: the processes that `jax.distributed.initialize` has connected, and the store that they share.

JAX tells a process its place only when it has started its devices, and the store is not public. This module is the only
door to what is private there: without it, a process of JAX is one by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.modules import loaded


def world() -> DistributedInfo | None:
    """Return this process's place among JAX's; None if it is not connected to others."""
    state = _state()
    if state is None:
        return None
    return DistributedInfo(rank=state.process_id, world_size=state.num_processes, launcher="jax")


def job_store(info: DistributedInfo) -> JaxStore | None:
    """Return the store of JAX's processes if they are the ranks of this job; None if they are not."""
    state = _state()
    return None if state is None or state.num_processes != info.world_size else JaxStore(state.client)


@dataclass(frozen=True)
class JaxStore:
    """The key-value store of JAX's coordinator, which is in process 0, as a store for a board. Threads may share it.

    Its methods raise a RuntimeError if the coordinator has gone.
    """

    _client: Any

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return its value."""
        return int(self._client.key_value_increment(key, amount))

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Return a value that has been stored."""
        text: str = self._client.key_value_try_get(key)
        return text.encode()

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys have been stored."""
        return all(self._has(key) for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Store the first value of a key, and return the one that is stored then.

        Raises:
            ValueError: `expected` is not "": the store can tell only whether there is a value.
        """
        if expected:
            raise ValueError(f"expected must be '' in JAX's store, got {expected!r}")
        with _suppressed("ALREADY_EXISTS"):
            self._client.key_value_set(key, value)
        return self.get(key)

    def _has(self, key: str) -> bool:
        with _suppressed("NOT_FOUND"):
            self._client.key_value_try_get(key)
            return True
        return False


@contextmanager
def _suppressed(status: str) -> Iterator[None]:
    """Suppress the store's error of this status, with which the error's text begins."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(status):
            raise


def _state() -> Any:
    """Return JAX's state of this process, if it is connected to other processes. Imports nothing."""
    state: Any = getattr(loaded("jax._src.distributed"), "global_state", None)
    is_known = all(hasattr(state, name) for name in ("client", "process_id", "num_processes"))
    return state if is_known and state.client is not None else None
