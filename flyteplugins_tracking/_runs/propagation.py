"""Configuration for the functions and tasks that are called: text values by key, each of them a JSON object.

The values reach child tasks of Flyte 2 in their custom context, functions in this process by `propagate` blocks, and
other processes by environment variables of the same names. Strings in them stay strings: "2024", "null" and "1e5" too.
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
from typing import Any

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.proc import set_variables
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.config import merged

# Set by `tracking_config` and `tracking_sweep_config`.
CONFIG = "FLYTE_TRACKING_CONFIG"
SWEEP = "FLYTE_TRACKING_SWEEP"
# The open runs of a Flyte 2 task, by tracker, for the tasks that it calls.
RUNS = "FLYTE_TRACKING_RUNS"
# The sweep of the `tracking_sweep` function that is running.
SWEEP_ID = "FLYTE_TRACKING_SWEEP_ID"
EXPORTED = (CONFIG, SWEEP, SWEEP_ID)


class _Block:
    """An open `propagate` block.

    Attributes:
        parent: The block in which it was entered.
        older_threads: The threads that were running when it was entered.
        values: Its values, and those of its parent for other keys.
    """

    def __init__(
        self, parent: _Block | None, older_threads: weakref.WeakSet[threading.Thread], values: Mapping[str, str]
    ) -> None:
        self.parent = parent
        self.older_threads = older_threads
        self.values = values


_in_block: ContextVar[_Block | None] = ContextVar("flyteplugins_tracking_propagated", default=None)
# The blocks that are open in this process, the variables as the blocks set them, and the variables without the blocks.
_blocks: list[_Block] = []
_exported: dict[str, str | None] = {}
_outside: dict[str, str | None] = {}


class _Guard(PerProcess):
    """The lock of the state above. A forked child is in its parent's blocks, and keeps them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_guard = register(_Guard())


def read(key: str, custom_context: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the values that are propagated under `key`.

    The custom context takes precedence over the open `propagate` blocks, and these over the environment variable.

    Args:
        key: One of the keys above.
        custom_context: The custom context of the Flyte 2 task that runs here; None outside of a task.

    Raises:
        ConfigError: One of them is not a JSON object.
    """
    with _guard.lock:
        _record_outside_changes()
        variable = _outside.get(key) if _blocks else os.environ.get(key)
        # Blocks of other tasks in this process do not reach a task.
        block = _current_block() if custom_context is None else _in_block.get()
    return merged(
        parse(variable, f"the variable {key}"),
        parse(None if block is None else block.values.get(key), key),
        parse((custom_context or {}).get(key), f"{key} in the custom context of the Flyte run"),
    )


def _current_block() -> _Block | None:
    """Return the innermost open block.

    A thread that was started in a block, for instance by `wandb.agent`, gets it if all open blocks are nested.
    """
    context_block = _in_block.get()
    if context_block is not None or not _blocks or threading.current_thread() in _blocks[0].older_threads:
        return context_block
    are_nested = all(inner.parent is outer for outer, inner in itertools.pairwise(_blocks))
    return _blocks[-1] if are_nested else None


def parse(text: str | None, source: str) -> dict[str, Any]:
    """Return the JSON object in `text`; empty if there is no text.

    Args:
        text: The JSON text.
        source: The name of its source, for messages.

    Raises:
        ConfigError: It is not a JSON object. The message does not show the text: it may hold a key.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}. {_HINT}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must be a JSON object, got a {type(value).__name__}. {_HINT}")
    return value


_HINT = "Make it with json.dumps(...), or with flyteplugins_tracking.tracking_config(...)[...]"


def write(value: Mapping[str, Any], name: str) -> str:
    """Return `value` as JSON text.

    Raises:
        ConfigError: JSON cannot hold it.
    """
    try:
        return json.dumps(value)  # NaN too: a config may have it, and `parse` reads it
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot reach other processes: {error}. Pass text, numbers, lists or mappings"
        ) from None


@contextmanager
def propagate(values: Mapping[str, str]) -> Iterator[None]:
    """Propagate `values` to the functions that are called, and the processes that are started, in the block."""
    older_threads = weakref.WeakSet(threading.enumerate())
    with _guard.lock:
        parent = _current_block()
        block = _Block(parent, older_threads, {**({} if parent is None else parent.values), **values})
        _record_outside_changes()
        _blocks.append(block)
        _export()
    token = _in_block.set(block)
    try:
        yield
    finally:
        with _guard.lock:
            _record_outside_changes()
            _blocks.remove(block)
            _export()
        with suppress(ValueError):  # left in another context than it was entered in
            _in_block.reset(token)


def _record_outside_changes() -> None:
    """Keep variables that other code set in a block: they stay when the block ends."""
    for key in EXPORTED:
        current = os.environ.get(key)
        if not _blocks or current != _exported.get(key):
            _outside[key] = current


def _export() -> None:
    """Set the variables for processes that are started now. All threads share the variables."""
    innermost = _blocks[-1].values if _blocks else {}
    _exported.update({key: innermost.get(key, outside) for key, outside in _outside.items()})
    set_variables(_exported)
