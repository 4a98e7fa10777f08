"""The decorated functions that run in this process, and which run is the current one.

The state lives here, in a module that wrappers import, never in a wrapper: Elastic's spawn pickles those.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.plan import RunPlan

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.close import EndedRun
    from flyteplugins_tracking._util.lock import Claim
    from flyteplugins_tracking.loop_watch import LoopWatch
    from flyteplugins_tracking.signals import Watch
    from flyteplugins_tracking.trackers.base import Handle, Tracker


@dataclass(frozen=True)
class Task:
    """What is known of a task of Flyte when it is decorated.

    Attributes:
        has_workers: Whether it asks for workers of its own; None where it may, and that makes no difference.
        has_report: Whether it has a report (Flyte 2) or a deck (Flyte 1).
    """

    has_workers: bool | None
    has_report: bool


@dataclass(frozen=True)
class Surroundings:
    """What the system that called the function knows.

    Attributes:
        base_id: The base id that it gives; None for none.
        group: The group of the runs where the plan gives none, since a retry cannot have the same base id.
        label: What this process is called among several that write to one run.
        propagated: Arguments that reach this function from outside, where it is not given its own.
        parents: What is known of the runs that the calling task has open, by tracker.
        has_children: Whether tasks that the function calls run in other processes.
        entered: How many decorated functions this attempt of the task has entered, by tracker; None to count them over
            the process's life.
        show: Shows a run that has ended in the task's report or deck. None outside of a task.
        has_report: Whether the task has one, as far as can be told when it runs.
        keep: Copies a local directory to where the execution keeps its data, which outlives this machine, and returns
            the address. None where there is no such place, or this machine stays.
        hand_out: Makes the files of a run, by their local directory and the run's id, an output of the task. It returns
            something to await where its third argument is True. None outside of a task.
        passing_on: Has the tasks that are called in its block find an open run: by its tracker's name, and by what the
            tracker passes on. None where nothing is called that could.
        facts: What it adds to the run's config.
        on_cluster: Whether nobody sits at this process's terminal.
        read_secret: Gives the value of the system's own secret objects.
        successes: Exceptions that are its way of ending well.
        is_simulated: Whether no process is at stake: no signal is watched for, and no other process kept from the run.
        at_end: Called in the run when the function has returned: what it raises, the function has raised.
    """

    base_id: str | None = None
    group: str | None = None
    label: str | None = None
    propagated: Mapping[str, Any] = field(default_factory=dict)
    parents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_children: bool = False
    entered: Counter[str] | None = None
    show: Callable[[EndedRun], None] | None = None
    has_report: bool = False
    keep: Callable[[str], str] | None = None
    hand_out: Callable[[str, str, bool], Any] | None = None
    passing_on: Callable[[str, Mapping[str, Any]], AbstractContextManager[None]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_cluster: bool = False
    read_secret: Callable[[Any], str | None] = lambda _: None
    successes: tuple[type[BaseException], ...] = ()
    is_simulated: bool = False
    at_end: Callable[[Entry], None] | None = None


@dataclass(frozen=True)
class StandIn:
    """What takes the place of the world outside: see `testing`.

    Attributes:
        tracker: Gives the tracker that stands in for another one.
        around: Gives the surroundings that stand in for those that were found.
    """

    tracker: Callable[[Tracker], Tracker]
    around: Callable[[Surroundings], Surroundings]


@dataclass(eq=False)
class Entry:
    """One decorated function that is running."""

    tracker: str
    parent: Entry | None
    stand_in: StandIn | None = None
    run: Any = None
    handle: Handle | None = None
    claim: Claim | None = None
    around: Surroundings = field(default_factory=Surroundings)
    config: TrackingConfig | None = None
    info: DistributedInfo | None = None
    plan: RunPlan | None = None
    has_report: bool = False
    files: tuple[str, str] | None = None  # what is to become an output, and of which run
    watch: Watch | LoopWatch | None = None
    # The entry that has opened the run: this one, or one that this one has joined. A run whose opener is left first is
    # ended then, and let go by the last that has joined.
    owner: Entry | None = None
    joined: int = 0
    left_with: int | None = None
    pid: int = field(default_factory=os.getpid)
    aside: Callable[[], object] | None = None  # what undoes `Tracker.on_inactive_rank`


# The entry of this thread or task; and all of this process, for threads that a decorated function starts: they do
# not inherit the context.
current: ContextVar[Entry | None] = ContextVar("flyteplugins_tracking_entry", default=None)
_running: list[Entry] = []
_entered: Counter[str] = Counter()
# Who stands in for this thread or task; and, the last one, for threads that do not inherit the context.
_stand_in: ContextVar[StandIn | None] = ContextVar("flyteplugins_tracking_stand_in", default=None)
_stand_ins: list[StandIn] = []
_lock = threading.Lock()


def get_run(tracker: str | None = None) -> Any:
    """The tracker's own run object.

    Args:
        tracker: The tracker's name, where several are stacked; None for the innermost decorated function's.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads started inside the function see its run; where several trainings run at once in threads, theirs
        must be started with `contextvars.copy_context().run`, and get None without.
    """
    entry = current.get()
    if entry is None and _running:
        entry = _innermost()
    if tracker is not None:
        entry = _nearest(entry, tracker)
    return None if entry is None else entry.run


@contextmanager
def apart() -> Iterator[None]:
    """Have functions in the block join none that is around it, as in a thread of their own."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


@contextmanager
def standing_in(stand_in: StandIn) -> Iterator[None]:
    """Have `stand_in` take the place of the world outside for the functions that are called in the block."""
    _stand_ins.append(stand_in)
    try:
        yield
    finally:
        _stand_ins.remove(stand_in)
        with _lock:  # what still runs, in a thread that waits in vain, is nobody's current run any more
            _running[:] = [entry for entry in _running if entry.stand_in is not stand_in]


@contextmanager
def standing_in_here(stand_in: StandIn) -> Iterator[None]:
    """As `standing_in`, for this thread or task alone, which goes before; its functions join none around the block."""
    token = _stand_in.set(stand_in)
    try:
        with apart():
            yield
    finally:
        _stand_in.reset(token)


def stand_in() -> StandIn | None:
    """Who takes the place of the world outside for what is called here."""
    return _stand_in.get() or next(reversed(_stand_ins), None)


def count(tracker: str, entered: Counter[str] | None) -> int:
    """Count one more function that is entered, in this process or where the surroundings count, and return how many."""
    counted = _entered if entered is None else entered
    with _lock:
        counted[tracker] += 1
        return counted[tracker]


def begin(entry: Entry) -> None:
    """The function of `entry` runs from now on."""
    with _lock:
        if entry not in _running:
            _running.append(entry)


def end(entry: Entry, exit_code: int) -> bool:
    """The function of `entry` has ended. Whether its run, if it has one, is nobody's any more."""
    with _lock:
        if entry in _running:
            _running.remove(entry)
        owner = entry.owner
        if owner is entry:
            entry.left_with = exit_code
        elif owner is not None:
            owner.joined -= 1
        return owner is None or (owner.joined == 0 and owner.left_with is not None)


def owners() -> list[Entry]:
    """Those that have opened the runs that are open here, whichever thread's."""
    with _lock:
        return list({id(entry.owner): entry.owner for entry in _running if entry.owner is not None}.values())


def join_enclosing(entry: Entry) -> bool:
    """Join the nearest function around this one that has not ended; a task or thread may outlive what has begun it."""
    with _lock:
        enclosing = _nearest(entry.parent, entry.tracker)
        while enclosing is not None:
            owner = enclosing.owner
            if enclosing in _running or (owner is not None and (owner in _running or owner.joined > 0)):
                _join(entry, enclosing)
                return True
            enclosing = _nearest(enclosing.parent, entry.tracker)
    return False


def _join(entry: Entry, other: Entry) -> None:
    entry.run, entry.owner = other.run, other.owner
    if other.owner is not None:
        other.owner.joined += 1


def join_here(entry: Entry, run_id: str) -> bool:
    """Join the run where this process has it open: a container may run several tasks, of one parent or with it."""
    with _lock:
        owners = [other.owner for other in _running if other.owner is not None and other.tracker == entry.tracker]
        for owner in owners:
            if owner.handle is not None and owner.handle.id == run_id:
                _join(entry, owner)
                return True
    return False


def _innermost() -> Entry | None:
    """The one that is running, for a thread without a context; None where it could be either of several trainings."""
    running = _running[:]  # at once, without the lock: threads ask for each row that they log
    last = running[-1] if running else None
    if len(running) > 1 and any(entry is not last and not _encloses(entry, last) for entry in running):
        return None
    return last


def _encloses(entry: Entry, inner: Entry | None) -> bool:
    while inner is not None and inner.parent is not entry:
        inner = inner.parent
    return inner is not None


def _nearest(entry: Entry | None, tracker: str) -> Entry | None:
    while entry is not None and entry.tracker != tracker:
        entry = entry.parent
    return entry


def _forget_the_parents() -> None:
    """In a forked child: the runs are the parent's. The lock may be held by a thread that is not there any more."""
    global _lock
    _lock = threading.Lock()
    for claim in [one.claim for entry in _running for one in (entry, entry.owner) if one is not None]:
        if claim is not None:
            claim.release()
    _running.clear()
    _entered.clear()
    current.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
