"""The life of a run: opened at entry, ended with the function's true status. And which run is the current one.

The state lives here, in a module that wrappers import, never in a wrapper: Elastic's spawn pickles those.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.policy import RunPlan, needs_agreement, opens_a_run, plan
from flyteplugins_tracking.topology import DistributedInfo, detect

if TYPE_CHECKING:
    from flyteplugins_tracking.identity import Identity
    from flyteplugins_tracking.trackers.base import Handle, Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRequest:
    """All that a tracker needs to open one rank's run.

    Attributes:
        plan: What this rank does; it opens a run.
        config: What the user asked for.
        facts: What the run's config gains: the job's shape, its restarts, the Flyte execution.
        read_secret: Gives the API key, or None where the user named no secret. For the tracker to call once, if at all.
        may_prompt: Whether somebody sits at this process's terminal, alone, and can be asked for a key.
    """

    plan: RunPlan
    config: TrackingConfig
    facts: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool


@dataclass(frozen=True)
class Surroundings:
    """What the system that called the function knows, asked for on the ranks that open a run.

    Attributes:
        identity: Its base id; None where it gives none.
        facts: What it adds to the run's config.
        on_cluster: Whether nobody sits at this process's terminal.
        read_secret: Gives the value of the system's own secret objects.
        successes: Exceptions that are its way of ending well.
    """

    identity: Identity | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_cluster: bool = False
    read_secret: Callable[[Any], str | None] = lambda _: None
    successes: tuple[type[BaseException], ...] = ()


@dataclass(eq=False)
class _Entry:
    """One decorated function that is running."""

    tracker: str
    run: Any
    parent: _Entry | None
    handle: Handle | None = None
    run_id: str | None = None
    successes: tuple[type[BaseException], ...] = ()
    pid: int = field(default_factory=os.getpid)


# The entry of this thread or task; and all of this process, for threads that a decorated function starts: they do
# not inherit the context.
_current: ContextVar[_Entry | None] = ContextVar("flyteplugins_tracking_entry", default=None)
_running: list[_Entry] = []
_entered: Counter[str] = Counter()
_lock = threading.Lock()


def get_run(tracker: str | None = None) -> Any:
    """The tracker's own run object.

    Args:
        tracker: The tracker's name, where several are stacked; None for the innermost decorated function's.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads started inside the function see its run.
    """
    entry = _current.get()
    if entry is None and _running:
        entry = _innermost()
    if tracker is not None:
        entry = _nearest(entry, tracker)
    return None if entry is None else entry.run


@contextmanager
def open_run(config: TrackingConfig, tracker: Tracker, surroundings: Callable[[], Surroundings]) -> Iterator[None]:
    """Run a block with its tracking run open, where this rank has one, and end the run with the block's status.

    The status is 0 for a return, 1 for an exception, the code of a SystemExit and 130 for a KeyboardInterrupt.
    """
    entry = _enter(config, tracker, surroundings)
    token = _current.set(entry)
    exit_code = 0
    try:
        yield
    except BaseException as error:
        exit_code = exit_code_of(error, entry.successes)
        raise
    finally:
        _current.reset(token)
        _leave(entry, exit_code)


def exit_code_of(error: BaseException, successes: tuple[type[BaseException], ...] = ()) -> int:
    """The status that a process which ends with `error` reports."""
    if isinstance(error, successes):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        # https://docs.python.org/3/library/exceptions.html#SystemExit
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _enter(config: TrackingConfig, tracker: Tracker, surroundings: Callable[[], Surroundings]) -> _Entry:
    # Only this thread's own: decorated functions in several threads at once are several trainings.
    parent = _current.get()
    enclosing = _nearest(parent, tracker.name)
    if enclosing is not None and config.run_mode != "new":
        entry = _Entry(tracker.name, enclosing.run, parent)
    else:
        entry = _open(config, tracker, surroundings, parent)
    with _lock:
        _running.append(entry)
    return entry


def _open(
    config: TrackingConfig, tracker: Tracker, surroundings: Callable[[], Surroundings], parent: _Entry | None
) -> _Entry:
    with _lock:
        _entered[tracker.name] += 1
        ordinal = _entered[tracker.name]
    info = detect(os.environ)
    around, run_plan = _decide(config, tracker, surroundings, info, ordinal)
    if not run_plan.opens:
        return _Entry(tracker.name, None, parent)
    handle = tracker.open(
        RunRequest(
            plan=run_plan,
            config=config,
            facts={**_job_facts(info), **around.facts},
            read_secret=lambda: _read_secret(config.secret, around),
            may_prompt=info is None and not around.on_cluster and sys.stdin is not None and sys.stdin.isatty(),
        )
    )
    return _Entry(tracker.name, handle.run, parent, handle, run_plan.run_id, around.successes)


def _decide(
    config: TrackingConfig,
    tracker: Tracker,
    surroundings: Callable[[], Surroundings],
    info: DistributedInfo | None,
    ordinal: int,
) -> tuple[Surroundings, RunPlan]:
    """The plan of this rank. A rank that gets no run asks nobody for an id: that would cost it imports and waits."""
    if not opens_a_run(info, config.run_mode, config.rank_scope):
        return Surroundings(), plan(info, config.run_mode, config.rank_scope, None)
    plan(info, config.run_mode, config.rank_scope, None)  # refuses what the topology cannot do, before any wait
    around = surroundings()
    found = _identity(config, tracker, around, info, ordinal)
    run_plan = plan(info, config.run_mode, config.rank_scope, found.base_id)
    if _is_open(tracker, run_plan.run_id):  # one id, from the user, for several runs at once: two writers lose rows
        run_plan = plan(info, config.run_mode, config.rank_scope, f"{found.base_id}-{ordinal}")
    return around, replace(run_plan, group=run_plan.group or found.group)


def _is_open(tracker: Tracker, run_id: str | None) -> bool:
    with _lock:
        return run_id is not None and any(e.tracker == tracker.name and e.run_id == run_id for e in _running)


def _identity(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, info: DistributedInfo | None, ordinal: int
) -> Identity:
    # Only ranks that open a run come here; the others are spared what it imports.
    from flyteplugins_tracking.identity import Identity, from_launcher, from_variables

    if config.id is not None:
        return Identity(config.id)
    chosen = from_variables(os.environ, tracker.run_id_variables)
    if chosen is not None:
        return chosen
    agreement = needs_agreement(info, config.run_mode, config.rank_scope)
    found = around.identity or from_launcher(info, os.environ, agreement=agreement)
    if found.base_id is None or ordinal == 1:
        return found
    # The second training of one process is another run, and a failure of the first stays one.
    return Identity(f"{found.base_id}-{ordinal}", found.group)


def _job_facts(info: DistributedInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    shape = ("world_size", "num_workers", "local_world_size", "launcher")
    return {"distributed": {name: info[name] for name in shape}, "restart_count": info.restart_count}


def _read_secret(secret: Any, around: Surroundings) -> str | None:
    if secret is None:
        return None
    if not callable(secret):
        return around.read_secret(secret)
    try:
        value: str | None = secret()
    except Exception as error:
        raise TrackerUnavailableError(f"secret= raised {type(error).__name__} and gave no API key") from error
    return value


def _leave(entry: _Entry, exit_code: int) -> None:
    with _lock:
        if entry in _running:
            _running.remove(entry)
    if entry.handle is None or entry.pid != os.getpid():
        return
    try:
        entry.handle.finish(exit_code)
    except Exception:
        # The training has ended as it has: its tracker does not change that.
        logger.warning("%s: the run could not be finished with status %d", entry.tracker, exit_code, exc_info=True)


def _innermost() -> _Entry | None:
    with _lock:
        return _running[-1] if _running else None


def _nearest(entry: _Entry | None, tracker: str) -> _Entry | None:
    while entry is not None and entry.tracker != tracker:
        entry = entry.parent
    return entry


def _forget_the_parents() -> None:
    """In a forked child: the runs are the parent's. The lock may be held by a thread that is not there any more."""
    global _lock
    _lock = threading.Lock()
    _running.clear()
    _entered.clear()
    _current.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
