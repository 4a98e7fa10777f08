"""Log the lines of a journal anew, to an open run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.client import ClientHandle

logger = logging.getLogger(__name__)

# The calls that are repeated. None of them reads a file: whoever can write to a journal could name any.
REPEATED = frozenset(
    {
        *("alert", "set_tag", "set_tags", "delete_tag", "add_tags", "remove_tags"),
        *("log_param", "log_params", "update_config", "log_text", "log_dict", "requeue"),
    }
)


def relog(handle: ClientHandle, lines: Sequence[Mapping[str, Any]], directory: str) -> None:
    """Log lines to an open run: its rows, calls and events. The run's end is left out.

    Args:
        handle: The run.
        lines: The lines.
        directory: Where their journal is.

    Raises:
        TrackerUnavailableError: The service does not answer to a call.
    """
    for line in lines:
        if "row" in line:
            handle.replay(line["row"], line["step"], line["time"])
        elif "call" in line:
            _call(handle, line["call"], line["args"], line["kwargs"])
        elif "event" in line:
            handle.record_event(line["event"], line["values"], line["text"])
        elif "queue" in line:
            handle.replay_queue(directory, line["queue"])


def _call(handle: ClientHandle, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Repeat a kept call. A call that can never succeed must not keep the rest from being sent."""
    if name not in REPEATED:
        text = "run %s: the kept call of %s() fails, and is lost: of kept calls only these are repeated: %s"
        logger.warning(text, handle.id, name, ", ".join(sorted(REPEATED)))
        return
    try:
        getattr(handle.run, name)(*args, **kwargs)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        logger.warning(
            "run %s: the kept call of %s() fails, and is lost: %s: %s", handle.id, name, type(error).__name__, error
        )
    except Exception as error:
        raise TrackerUnavailableError(
            f"the kept call of {name}() has failed: {type(error).__name__}: {error}"
        ) from error
