"""The end of a process in which decorated functions still run: in daemon threads, and in asyncio tasks left behind.

A vendor's own hook would end their runs as finished.
"""

from __future__ import annotations

import atexit
import logging

from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs import close as closing

logger = logging.getLogger(__name__)


def watch() -> None:
    """End the runs that are open when the process ends. Called when a run was opened.

    Hooks are called in the reverse order of their registration: this one is before those of the vendor's client.
    """
    atexit.unregister(_end_open_runs)
    atexit.register(_end_open_runs)


def _end_open_runs() -> None:
    for run in calls.open_runs():
        if run.context.is_simulated:
            continue
        logger.warning(
            "%s: the process ends before the decorated function has returned, and with it run %s",
            run.tracker,
            run.handle.id,
        )
        closing.end_with_process(run)
