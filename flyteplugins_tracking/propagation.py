"""What reaches the functions and tasks that are called: text values by their keys, each one JSON object.

They travel in what Flyte 2 hands to child tasks, in this process, and in environment variables of the same names.
Text in them stays the text it was: "2024", "null" and "1e5" too.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from flyteplugins_tracking.config import merged
from flyteplugins_tracking.errors import ConfigError

# What `tracking_config` and `tracking_sweep_config` set.
CONFIG = "FLYTE_TRACKING_CONFIG"
SWEEP = "FLYTE_TRACKING_SWEEP"
# The open runs of a Flyte 2 task, by tracker, for the tasks that it calls.
RUNS = "FLYTE_TRACKING_RUNS"
# What a `tracking_sweep` that is running has made.
SWEEP_ID = "FLYTE_TRACKING_SWEEP_ID"
EXPORTED = (CONFIG, SWEEP, SWEEP_ID)

_in_block: ContextVar[Mapping[str, str] | None] = ContextVar("flyteplugins_tracking_propagated", default=None)
# The blocks that are open in this process, each with its thread; and what the variables were before the first.
_blocks: list[tuple[int, Mapping[str, str]]] = []
_outside: dict[str, str | None] = {}
_lock = threading.Lock()


def read(key: str, carried: Mapping[str, str]) -> dict[str, Any]:
    """What is propagated under `key`: by the variable, over it by the open `propagate` blocks, and by `carried`.

    Raises:
        ConfigError: One of them is no JSON object.
    """
    with _lock:
        variable = _outside.get(key) if _blocks else os.environ.get(key)
        block = _current_block()
    return merged(
        parse(variable, f"the variable {key}"),
        parse(block.get(key), key),
        parse(carried.get(key), f"{key} in the custom context of the Flyte run"),
    )


def _current_block() -> Mapping[str, str]:
    """The innermost open block; also for a thread without a context, as `wandb.agent` starts, if it can be no other."""
    own = _in_block.get()
    threads = {thread for thread, _ in _blocks}
    if own is None and len(threads) == 1 and threading.get_ident() not in threads:
        return _blocks[-1][1]
    return own or {}


def parse(text: str | None, where: str) -> dict[str, Any]:
    """The JSON object in `text`; empty for none.

    Raises:
        ConfigError: It is something else. The message does not have it: it may be anything.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}. {_HOW}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a JSON {type(value).__name__}, no object. {_HOW}")
    return value


_HOW = "Make it with json.dumps(...), or with flyteplugins_tracking.tracking_config(...)[...]"


def write(value: Mapping[str, Any], what: str) -> str:
    """`value` as one JSON object.

    Raises:
        ConfigError: JSON cannot hold it.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot reach other processes: {error}. Pass text, numbers, lists or mappings"
        ) from None


def _new_lock() -> None:
    """In a forked child: the lock may be held by a thread that is not there any more."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def propagate(values: Mapping[str, str]) -> Iterator[None]:
    """Have functions that are called in the block, and processes that are started in it, find `values`."""
    with _lock:
        block = (threading.get_ident(), {**_current_block(), **values})
        if not _blocks:
            _outside.update({key: os.environ.get(key) for key in EXPORTED})
        _blocks.append(block)
        _export()
    token = _in_block.set(block[1])
    try:
        yield
    finally:
        _in_block.reset(token)
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            _export()


def _export() -> None:
    """Set the variables for processes that are started now. Blocks of several threads at once share them."""
    innermost = _blocks[-1][1] if _blocks else {}
    for key, outside in _outside.items():
        value = innermost.get(key, outside)
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
