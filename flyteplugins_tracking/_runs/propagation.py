"""Configuration for the functions and tasks that are called: text values by key, each of them a JSON object.

The values reach child tasks of Flyte 2 in their custom context, functions in this process by `propagate` blocks, and
other processes by environment variables of the same names. Strings in them stay strings: "2024", "null" and "1e5" too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from flyteplugins_tracking._util.fork import OwnLock, register
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

# What the innermost block of this thread or coroutine propagates; None outside of one.
_in_block: ContextVar[Mapping[str, str | None] | None] = ContextVar("flyteplugins_tracking_propagated", default=None)
# The blocks that are open in this process, and the variables without them. The variables are those of the last block.
_blocks: list[Mapping[str, str | None]] = []
_outside: dict[str, str | None] = {}


# The lock of the state above. A forked child is in its parent's blocks, and keeps them.
_guard = register(OwnLock())


def read(key: str, custom_context: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the values that are propagated under `key`.

    The custom context takes precedence over the block around the caller. Without a block, the variable counts: also in
    a thread that inherits no context, as in a process.

    Args:
        key: One of the keys above.
        custom_context: The custom context of the Flyte 2 task that runs here; None outside of a task.

    Raises:
        ConfigError: One of them is not a JSON object.
    """
    with _guard.lock:
        # The variables may be those of a block of another task in this process, which does not reach a task.
        variables = _outside if custom_context is not None and _blocks else os.environ
        text = (_in_block.get() or variables).get(key)
    return merged(
        parse(text, f"the variable {key}"),
        parse((custom_context or {}).get(key), f"{key} in the custom context of the Flyte run"),
    )


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
    around = _in_block.get() or os.environ
    with _guard.lock:
        if not _blocks:
            _outside.update({key: os.environ.get(key) for key in EXPORTED})
        block = {**{key: around.get(key) for key in EXPORTED}, **values}
        _blocks.append(block)
        set_variables(block)
    token = _in_block.set(block)
    try:
        yield
    finally:
        with _guard.lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            before = _blocks[-1] if _blocks else _outside
            set_variables({key: before[key] for key in EXPORTED if os.environ.get(key) == block[key]})
        with suppress(ValueError):  # left in another context than it was entered in
            _in_block.reset(token)
