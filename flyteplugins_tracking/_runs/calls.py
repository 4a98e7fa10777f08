"""The calls that run in this process, and the runs that they use: what `get_run` answers from.

Every rank loads this module. The state is kept here, in a module that wrappers import, and never in a wrapper:
Elastic's spawn pickles those.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._util.fork import PerProcess, register

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.call import Call
    from flyteplugins_tracking._runs.run import Run

# The call of this thread or task.
current: ContextVar[Call | None] = ContextVar("flyteplugins_tracking_call", default=None)


class _State(PerProcess):
    """The calls of this process, and their runs.

    Attributes:
        calls: The calls that have not ended, also for threads that a function starts: they do not inherit the context.
        runs: The runs that are open, or that the last of their calls is closing.
        lock: Held while these and the users of a run change.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runs: list[Run] = []
        self.lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, tracker: str, counts: Counter[str] | None) -> int:
        """Count one more call, in `counts` or else in this process, and return the number of calls."""
        counts = self._counts if counts is None else counts
        with self.lock:
            counts[tracker] += 1
            return counts[tracker]

    def begin(self, call: Call) -> None:
        """Add a call that runs."""
        with self.lock:
            self.calls.append(call)

    def end(self, call: Call) -> bool:
        """Remove a call that has ended, or that could not begin. Returns whether it was the last one of its run."""
        with self.lock:  # from here on a signal does not end the run, but waits for this call
            self.calls[:] = [other for other in self.calls if other is not call]
            if call.run is None:
                return False
            call.run.users -= 1
            return call.run.users == 0

    def join(self, parent: Call | None, tracker: str) -> Call | None:
        """Join the run of the nearest call around this one that has not ended.

        Returns:
            The call whose run, if it has one, is joined. None if all have ended: a task or thread may outlive its
            starter.
        """
        with self.lock:
            enclosing = _nearest(parent, tracker)
            while enclosing is not None:
                run = enclosing.run
                if enclosing in self.calls or (run is not None and run.users > 0):
                    if run is not None:
                        run.users += 1
                    return enclosing
                enclosing = _nearest(enclosing.parent, tracker)
        return None

    def open_runs(self) -> list[Run]:
        """Return the runs that calls use, of all threads."""
        with self.lock:
            return [run for run in self.runs if run.users > 0]


state = register(_State())


def get_run(tracker: str | None = None) -> Any:
    """Return the tracker's own run object.

    Args:
        tracker: The tracker's name, if several are stacked; None for that of the innermost decorated function.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads that the function starts have its run. If several decorated functions run in threads at the same
        time, start their threads with `contextvars.copy_context().run`: otherwise `get_run()` is None in them.
    """
    call = here()
    if tracker is not None:
        call = _nearest(call, tracker)
    return None if call is None or call.run is None else call.run.handle.run


def here() -> Call | None:
    """Return the call that this thread or task is in; None outside of a decorated function. See `get_run`."""
    call = current.get()
    if call is not None and not call.is_parents:
        return call
    running = state.calls[:]  # a copy without the lock: threads ask for each row that they log
    last = running[-1] if running else None
    # A thread without a context is in none of several training runs that are open together.
    return last if all(call is last or _encloses(call, last) for call in running) else None


def _encloses(call: Call, inner: Call | None) -> bool:
    while inner is not None and inner.parent is not call:
        inner = inner.parent
    return inner is not None


def _nearest(call: Call | None, tracker: str) -> Call | None:
    while call is not None and call.asked.tracker.name != tracker:
        call = call.parent
    return call
