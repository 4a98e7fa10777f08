"""What reaches the functions and tasks that are called: text values by their keys, each one JSON object.

They travel in what Flyte 2 hands to child tasks, in this process, and in environment variables of the same names.
Text in them stays the text it was: "2024", "null" and "1e5" too.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._config.config import merged
from flyteplugins_tracking.errors import ConfigError

# What `tracking_config` and `tracking_sweep_config` set.
CONFIG = "FLYTE_TRACKING_CONFIG"
SWEEP = "FLYTE_TRACKING_SWEEP"
# The open runs of a Flyte 2 task, by tracker, for the tasks that it calls.
RUNS = "FLYTE_TRACKING_RUNS"
# What a `tracking_sweep` that is running has made.
SWEEP_ID = "FLYTE_TRACKING_SWEEP_ID"
EXPORTED = (CONFIG, SWEEP, SWEEP_ID)


@dataclass(frozen=True, eq=False)
class _Block:
    """An open block: the one around it, the threads that were there before it, and what it says."""

    around: _Block | None
    older: weakref.WeakSet[threading.Thread]
    values: Mapping[str, str]


_in_block: ContextVar[_Block | None] = ContextVar("flyteplugins_tracking_propagated", default=None)
# The blocks that are open in this process; what they have set the variables to; and what these are without them.
_blocks: list[_Block] = []
_exported: dict[str, str | None] = {}
_outside: dict[str, str | None] = {}
_lock = threading.Lock()


def read(key: str, carried: Mapping[str, str] | None) -> dict[str, Any]:
    """What is propagated under `key`: by the variable, over it by the open `propagate` blocks, and by `carried`.

    Args:
        key: One of those above.
        carried: What Flyte 2 has handed to the task that runs here; None outside of one.

    Raises:
        ConfigError: One of them is no JSON object.
    """
    with _lock:
        _see_changes()
        variable = _outside.get(key) if _blocks else os.environ.get(key)
        # A task's own context says what reaches it, whatever other tasks of this process do.
        block = _current_block() if carried is None else _in_block.get()
    return merged(
        parse(variable, f"the variable {key}"),
        parse(None if block is None else block.values.get(key), key),
        parse((carried or {}).get(key), f"{key} in the custom context of the Flyte run"),
    )


def _current_block() -> _Block | None:
    """The innermost open block; also for a thread that was started in it, as by `wandb.agent`, if that is clear."""
    own = _in_block.get()
    if own is not None or not _blocks or threading.current_thread() in _blocks[0].older:
        return own
    are_nested = all(inner.around is outer for outer, inner in itertools.pairwise(_blocks))
    return _blocks[-1] if are_nested else None


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
    older = weakref.WeakSet(threading.enumerate())
    with _lock:
        around = _current_block()
        block = _Block(around, older, {**({} if around is None else around.values), **values})
        _see_changes()
        _blocks.append(block)
        _export()
    token = _in_block.set(block)
    try:
        yield
    finally:
        with _lock:
            _see_changes()
            _blocks.remove(block)
            _export()
        with suppress(ValueError):  # left in another context than it was entered in, which ends with its own
            _in_block.reset(token)


def _see_changes() -> None:
    """What somebody else has set a variable to since is what it is without the blocks."""
    for key in EXPORTED:
        current = os.environ.get(key)
        if not _blocks or current != _exported.get(key):
            _outside[key] = current


def _export() -> None:
    """Set the variables for processes that are started now. Blocks of several threads at once share them."""
    innermost = _blocks[-1].values if _blocks else {}
    _exported.update({key: innermost.get(key, outside) for key, outside in _outside.items()})
    set_variables(_exported)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set environment variables; None is for one that is not to be set."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
