"""`should_stop()`: the ranks of a job leave their loops at the same step.

In a job, the ranks agree on the step over the job's board (`_job.agreement`). In one process it is a flag. What asks
for the stop: `request_stop`, SIGTERM, SIGUSR1, the launcher's time limit, and the tracker's service.

All of it starts with the first call of `should_stop()` in a function. A rank without a run that never calls it loads
nothing of it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from flyteplugins_tracking._job.agreement import ROUND_S, Agreement, CallCounter, Stop, StopRequest
from flyteplugins_tracking._job.watch import ALONE, WATCH, Duty
from flyteplugins_tracking._runs.calls import here
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.signals import critical_section

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.call import Call

logger = logging.getLogger(__name__)

SIGTERM, SIGUSR1, TIME_LIMIT = "SIGTERM", "SIGUSR1", "time limit"
# The thread says that the ranks have not agreed. How much later SIGTERM has its usual effect, if it cannot.
_LATER_S = 1.0
# How long a signal waits for the start, which may connect to the job's store.
_PATIENCE_S = 5.0


def should_stop() -> bool:
    """Whether the function should leave its loop. Call it once a step, on every rank of a decorated function.

    It returns True at the same call on all ranks: save a checkpoint, and leave the loop. From then on it returns True,
    until the function ends. It is not a collective: a call compares two numbers, so that you can call it at every step.

    The ranks are asked to stop by SIGTERM or SIGUSR1 on any rank, by `request_stop`, by the launcher's time limit (see
    `stop_before_s` of `tracking_init`), or by the tracker's service, if that has a Stop button. While they agree, and
    until 5 s before the SIGKILL (see `kill_after_s`), SIGTERM does not interrupt the function.

    In a job without a store that all ranks reach, as under `srun` before a process group is made, each process stops
    for itself. Outside a decorated function it returns False.
    """
    # As `CallCounter.next`, without one more call.
    counter = _state.counter
    counter.count = count = counter.count + 1
    return count >= counter.limit and counter.at_limit(count)


def request_stop(reason: str = "request_stop") -> None:
    """Ask all ranks of the job to leave their loops: `should_stop()` will return True on them, at the same call.

    Any rank and any thread of a decorated function may call it; once is enough. It returns immediately. The summary
    of the run has the reason as `stop/reason`, and the number of the call as `stop/step`. It ends as the function does.

    Args:
        reason: Why.
    """
    call = here()
    if call is None:
        logger.warning("request_stop(%r) is ignored: it is not called in a decorated function", reason)
    else:
        stopping = _state.stopping or _start(call)
        stopping.request(reason)


class Stopping:
    """One function's part in the agreement, from its first `should_stop()` on. SIGTERM's listener knows it too."""

    def __init__(self, call: Call) -> None:
        """Called at the function's first `should_stop()` or `request_stop()`."""
        global _functions
        _functions += 1
        self._call = call
        self._signalled_at: float | None = None
        self._grace_s = call.asked.config.finish_timeout_s
        self._timeout_s = min(ROUND_S, self._grace_s)
        self._time_limit: _TimeLimit | None = None
        self._has_usr1 = False
        self._ranks = Agreement(call.job or ALONE, f"stop/{_functions}", self._on_commit)
        if call.job is not None and not WATCH.add(call.job, self._ranks, without="only this process is asked to stop"):
            self._ranks = Agreement(ALONE, f"stop/{_functions}", self._on_commit)
        self.counter: CallCounter = self._ranks.counter
        if call.asked.world.is_real:
            self._watch_signals()
            self._watch_time_limit()

    def request(
        self, reason: str, timeout_s: float | None = None, otherwise: Callable[[str], object] = lambda _: None
    ) -> None:
        """Ask the ranks to stop. Takes no lock."""
        self._ranks.request(StopRequest(reason, timeout_s, otherwise))

    # For SIGTERM

    def on_sigterm(self) -> None:
        """Ask the ranks to stop, because SIGTERM has come."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            self.request(SIGTERM, self._timeout_s)

    def lasts(self) -> bool:
        """Whether the function may still stop by itself."""
        since_s = 0.0 if self._signalled_at is None else time.monotonic() - self._signalled_at
        if self._ranks.committed is not None:
            return since_s < self._grace_s
        return not self._ranks.has_failed and since_s < self._timeout_s + _LATER_S

    def _on_commit(self, stop: Stop) -> None:
        """A SIGTERM to one rank is one to all: they end in the same way, at the same step."""
        if stop.reason == SIGTERM and self._signalled_at is None and self._call.listener is not None:
            self._call.listener.signal_self()

    # Called by the call

    def before_close(self) -> None:
        """Keep with the run what there is to tell of its stop. Called before the run is closed."""
        WATCH.remove(self._ranks, *filter(None, [self._time_limit]))
        run, stop, step = self._call.run, self._ranks.committed, self._ranks.stopped_at
        if run is not None and step is not None:
            run.was_stopped |= run is self._call.own_run
            if stop is not None and run.plan.primary:
                text = f"stopped at step {step}: {stop.reason} on rank {stop.rank}"
                logger.info("%s: %s", run.asked.tracker.name, text)
                run.record("stop", {"stop/reason": stop.reason, "stop/step": step}, text)
        if self._call.listener is not None:
            self._call.listener.postpone(None)  # the function has ended, and with it what the signal waits for

    def after_close(self) -> None:
        """Forget the function. Called when its run has been closed."""
        if _state.stopping is not self:
            return
        _state.forget()
        if self._has_usr1 and signal.getsignal(signal.SIGUSR1) == self._on_usr1:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    # What asks for the stop

    def _watch_signals(self) -> None:
        call = self._call
        if call.listener is None and call.run is None:
            call.listen_for_sigterm(self._grace_s, None)
        if call.listener is not None:
            call.listener.postpone(self)
        is_main = threading.current_thread() is threading.main_thread()
        # A handler of the user's stays: it may call `request_stop`.
        if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not proc.has_handler(signal.SIGUSR1):
            signal.signal(signal.SIGUSR1, self._on_usr1)
            self._has_usr1 = True

    def _on_usr1(self, _: int, __: FrameType | None) -> None:
        self.request(SIGUSR1)

    def _watch_time_limit(self) -> None:
        """On one rank, which is enough."""
        before_s, info = self._call.asked.config.stop_before_s, self._call.who.info
        if before_s is None or (info is not None and info.rank != 0):
            return
        asked = self._call.asked
        ends_at = _time_limit(asked.task.timeout_s if asked.context.on_cluster else None)
        if ends_at is None:
            text = "stop_before_s=%g is ignored: the launcher names no time limit. Slurm does since 23.02; "
            logger.warning(text + "before, export SLURM_JOB_END_TIME in the batch script", before_s)
            return
        self._time_limit = _TimeLimit(ends_at - before_s, self.request)
        WATCH.add(info or ALONE, self._time_limit, without="stop_before_s is ignored")


class _TimeLimit(Duty):
    """Asks for a stop when it is time."""

    def __init__(self, at: float, request: Callable[[str], object]) -> None:
        """`at` is in seconds since the epoch."""
        self._at = at
        self._request = request

    def next_wait_s(self) -> float:
        return max(0.0, self._at - time.time())

    def look(self) -> None:
        self._at = math.inf
        self._request(TIME_LIMIT)


def _time_limit(timeout_s: float | None) -> float | None:
    """Return when the job's time limit ends, in seconds since the epoch; None if that is not known.

    Slurm 23.02 and later set SLURM_JOB_END_TIME: https://slurm.schedmd.com/sbatch.html

    Args:
        timeout_s: How long the task that this process runs may take; None if that is unknown.
    """
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return float(text)
    if timeout_s is None:
        return None
    # The pod's process: torchelastic's agent, if this is a worker of it.
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ
    pod = proc.nearest_without("TORCHELASTIC_RUN_ID") if is_worker else os.getpid()
    return proc.started_at(pod) + timeout_s


def request_of_service(service: str, otherwise: Callable[[], object]) -> None:
    """Ask the ranks to stop because a tracker's service wants it: its users have a button for that. From any thread.

    Args:
        service: The tracker's name.
        otherwise: Called if the function does not call `should_stop()`, or if the ranks do not agree.
    """
    stopping = _state.stopping
    if stopping is None:
        otherwise()
    else:
        stopping.request(service, otherwise=lambda _: otherwise())


@critical_section(_PATIENCE_S)
def _start(call: Call) -> Stopping:
    with _state.starting:
        if _state.stopping is None:
            call.stopping = _state.stopping = Stopping(call)
            _state.counter = call.stopping.counter
        return _state.stopping


def _first_call(_: int) -> bool:
    """Start the stopping of the function that calls `should_stop()` for the first time."""
    call = here()
    if call is None:
        return False
    return _start(call).counter.next()


_functions = 0  # how many functions of this process have called `should_stop()`


class _State(PerProcess):
    """The function of this process that calls `should_stop()`."""

    def __init__(self) -> None:
        self.starting = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Begin again: the function has ended."""
        self.stopping: Stopping | None = None
        self.counter = CallCounter(0, _first_call)  # the first call starts the stopping

    def after_fork_in_child(self) -> None:
        """Forget the parent's function, and let SIGUSR1 end the child."""
        if self.stopping is not None and self.stopping._has_usr1:
            with suppress(ValueError):  # forked off the main thread
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        super().after_fork_in_child()


_state = register(_State())
