"""The progress of this rank: its last row or heartbeat, for those who watch whether it hangs."""

from __future__ import annotations

import threading
import time

from flyteplugins_tracking.trackers.base import SigtermWatch

# When this rank has last logged or called `heartbeat`, in seconds of `time.monotonic`; 0 if it has not.
_last_s = 0.0
# The thread whose rows do not count.
_ignored_thread = 0


def heartbeat() -> None:
    """Report progress that is not a row: an evaluation, a compilation, a checkpoint, a step on a rank without a run.

    `hang_timeout_s` counts from the last row or heartbeat of a rank. It costs some 50 ns, and does nothing else.
    """
    global _last_s
    _last_s = time.monotonic()


def last_progress() -> float:
    """Return when this rank has last logged or called `heartbeat`, in seconds of `time.monotonic`; 0 if it has not."""
    return _last_s


def ignore_this_thread() -> None:
    """Do not count what this thread logs as progress."""
    global _ignored_thread
    _ignored_thread = threading.get_ident()


class ProgressWatch:
    """A watch for SIGTERM that takes each row for a heartbeat: trackers call `reinstall` for each, first."""

    def __init__(self, watch: SigtermWatch) -> None:
        self._watch = watch

    @property
    def terminated(self) -> bool:
        """Whether the job is being terminated."""
        return self._watch.terminated

    def reinstall(self) -> None:
        """Note the row, and install our handler again."""
        if threading.get_ident() != _ignored_thread:
            heartbeat()
        self._watch.reinstall()

    def wait_for_user_handler(self, any_thread: bool = False) -> None:
        """Wait until the user's handler has run."""
        self._watch.wait_for_user_handler(any_thread)
