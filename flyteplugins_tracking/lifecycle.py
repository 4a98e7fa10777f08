"""The life of a run: opened at entry, ended with the function's true status. And which run is the current one.

The state lives here, in a module that wrappers import, never in a wrapper: Elastic's spawn pickles those.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.policy import RunPlan, needs_agreement, plan
from flyteplugins_tracking.signals import TERMINATED, Watch
from flyteplugins_tracking.topology import DistributedInfo, detect

if TYPE_CHECKING:
    from flyteplugins_tracking.claims import Claim
    from flyteplugins_tracking.identity import Identity
    from flyteplugins_tracking.trackers.base import Handle, Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRequest:
    """All that a tracker needs to open one rank's run.

    Attributes:
        plan: What this rank does; it opens a run.
        known_id: The run's id by the job's plan, which all its ranks know; the one in `plan` is another where that one
            is open in another process.
        config: What the user asked for.
        info: This rank; None outside a distributed job.
        is_elastic: Whether the job's number of nodes may change.
        facts: What the run's config gains: the job's shape, its restarts, the Flyte execution.
        read_secret: Gives the API key, or None where the user named no secret. For the tracker to call once, if at all.
        may_prompt: Whether somebody sits at this process's terminal, alone, and can be asked for a key.
        watch: To be renewed whenever something is logged; and to be waited for before a run that was ended early is
            opened again, since a handler that is still to run may end the process.
        deadline: When the run must be open, in seconds of `time.monotonic`.
    """

    plan: RunPlan
    known_id: str | None
    config: TrackingConfig
    info: DistributedInfo | None
    is_elastic: bool
    facts: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool
    watch: Watch
    deadline: float


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
    parent: _Entry | None
    run: Any = None
    handle: Handle | None = None
    claim: Claim | None = None
    successes: tuple[type[BaseException], ...] = ()
    watch: Watch | None = None
    pid: int = field(default_factory=os.getpid)


# The entry of this thread or task; and all of this process, for threads that a decorated function starts: they do
# not inherit the context.
_current: ContextVar[_Entry | None] = ContextVar("flyteplugins_tracking_entry", default=None)
_running: list[_Entry] = []
_entered: Counter[str] = Counter()
_lock = threading.Lock()
# Vendors' own set-up is not made for several threads at once: wandb's settings are seen half read.
_opening = threading.RLock()


def get_run(tracker: str | None = None) -> Any:
    """The tracker's own run object.

    Args:
        tracker: The tracker's name, where several are stacked; None for the innermost decorated function's.

    Returns:
        None on ranks that have no run, outside a decorated function, and in a forked child such as a DataLoader's
        worker. Threads started inside the function see its run; where several trainings run at once in threads, theirs
        must be started with `contextvars.copy_context().run`, and get None without.
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

    The status is 0 for a return, 1 for an exception, the code of a SystemExit, 130 for a KeyboardInterrupt, and 143
    after a SIGTERM, however the block ends.
    """
    # Only this thread's own parent: decorated functions in several threads at once are several trainings.
    entry = _Entry(tracker.name, parent=_current.get())
    token = None
    exit_code = 0
    try:
        _enter(entry, config, tracker, surroundings)
        token = _current.set(entry)
        if entry.watch is not None:
            entry.watch.settle()
        yield
    except BaseException as error:
        exit_code = exit_code_of(error, entry.successes)
        raise
    finally:
        try:
            _leave(entry, exit_code)
        finally:
            if token is not None:
                _current.reset(token)


def exit_code_of(error: BaseException, successes: tuple[type[BaseException], ...] = ()) -> int:
    """The status that a process which ends with `error` reports."""
    if isinstance(error, successes):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        # https://docs.python.org/3/library/exceptions.html#SystemExit
        # and of its code the system keeps the lowest 8 bits.
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _enter(entry: _Entry, config: TrackingConfig, tracker: Tracker, surroundings: Callable[[], Surroundings]) -> None:
    enclosing = _nearest(entry.parent, tracker.name)
    if enclosing is not None and config.run_mode != "new":
        entry.run = enclosing.run
    else:
        _open(entry, config, tracker, surroundings)
    with _lock:
        _running.append(entry)


def _open(entry: _Entry, config: TrackingConfig, tracker: Tracker, surroundings: Callable[[], Surroundings]) -> None:
    with _lock:
        _entered[tracker.name] += 1
        ordinal = _entered[tracker.name]
    info = detect(os.environ)
    around, run_plan = _decide(config, tracker, surroundings, info, ordinal)
    if not run_plan.opens:
        return
    entry.successes = around.successes
    deadline = time.monotonic() + config.init_timeout_s
    if _watch.enter(tracker.package, config.finish_timeout_s):
        entry.watch = _watch
    from flyteplugins_tracking.identity import is_elastic

    with _opening:
        known_id = run_plan.run_id
        run_plan, entry.claim = _claim(tracker, run_plan, config)
        request = RunRequest(
            plan=run_plan,
            known_id=known_id,
            config=config,
            info=info,
            is_elastic=config.run_mode == "shared" and is_elastic(info, os.environ),
            facts={**_job_facts(info), **around.facts},
            read_secret=lambda: _read_secret(config.secret, around),
            may_prompt=info is None and not around.on_cluster and sys.stdin is not None and sys.stdin.isatty(),
            watch=_watch,
            deadline=deadline,
        )
        entry.handle = tracker.open(request)
        entry.run = entry.handle.run


def _claim(tracker: Tracker, run_plan: RunPlan, config: TrackingConfig) -> tuple[RunPlan, Claim]:
    """Make sure that no other process or thread here has the run open: two writers lose each other's rows.

    A rank's own child processes look like the rank itself, and a user's id may be in use: theirs are runs beside it. An
    earlier attempt that is still ending is waited for.
    """
    from flyteplugins_tracking.claims import Claim

    if run_plan.run_id is None or not run_plan.primary:
        return run_plan, Claim()
    claim = Claim.take(f"{tracker.name}/{config.project}/{run_plan.run_id}", timeout_s=config.init_timeout_s / 2)
    if claim is not None:
        return run_plan, claim
    beside = f"{run_plan.run_id}-{os.urandom(3).hex()}"
    logger.warning(
        "%s: run %s is open in another process or thread: this one is %s", tracker.name, run_plan.run_id, beside
    )
    return replace(run_plan, run_id=beside), Claim()


def _decide(
    config: TrackingConfig,
    tracker: Tracker,
    surroundings: Callable[[], Surroundings],
    info: DistributedInfo | None,
    ordinal: int,
) -> tuple[Surroundings, RunPlan]:
    """The plan of this rank. A rank that gets no run asks nobody for an id: that would cost it imports and waits."""
    unnamed = plan(info, config.run_mode, config.rank_scope, None)
    if not unnamed.opens:
        return Surroundings(), unnamed
    around = surroundings()
    found = _identity(config, tracker, around, info, ordinal)
    run_plan = plan(info, config.run_mode, config.rank_scope, found.base_id)
    return around, replace(run_plan, group=run_plan.group or found.group)


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
        value = secret()
    except Exception as error:
        # Its text may hold the key.
        raise TrackerUnavailableError(f"secret= raised {type(error).__name__} and gave no API key") from None
    if value is not None and not isinstance(value, str):
        raise TrackerUnavailableError(f"secret= gave a {type(value).__name__}, and no text that could be an API key")
    return value


def _leave(entry: _Entry, exit_code: int) -> None:
    with _lock:
        if entry in _running:
            _running.remove(entry)
    if entry.pid != os.getpid():
        return
    if _watch.terminated:
        exit_code = TERMINATED
    try:
        with nullcontext() if entry.watch is None else entry.watch.ending():
            _finish(entry, exit_code)
    finally:
        if entry.watch is not None:
            entry.watch.leave()


def _finish(entry: _Entry, exit_code: int) -> None:
    try:
        if entry.handle is not None:
            entry.handle.finish(exit_code)
    except Exception:
        # The training has ended as it has: its tracker does not change that.
        logger.warning("%s: the run could not be finished with status %d", entry.tracker, exit_code, exc_info=True)
    finally:
        if entry.claim is not None:
            entry.claim.release()


def _end_runs(exit_code: int) -> None:
    """End every run that is open here, whichever thread's, while the functions may go on."""
    with _lock:
        opened = [(entry.tracker, entry.handle) for entry in _running if entry.handle is not None]
    threads = [threading.Thread(target=_end_early, args=(*one, exit_code), daemon=True) for one in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_early(tracker: str, handle: Handle, exit_code: int) -> None:
    try:
        handle.end_early(exit_code)
    except Exception:
        logger.warning("%s: the run could not be ended with status %d", tracker, exit_code, exc_info=True)


def _innermost() -> _Entry | None:
    """The one that is running, for a thread without a context; None where it could be either of several trainings."""
    with _lock:
        last = _running[-1] if _running else None
        if len(_running) > 1 and any(entry is not last and not _encloses(entry, last) for entry in _running):
            return None
        return last


def _encloses(entry: _Entry, inner: _Entry | None) -> bool:
    while inner is not None and inner.parent is not entry:
        inner = inner.parent
    return inner is not None


def _nearest(entry: _Entry | None, tracker: str) -> _Entry | None:
    while entry is not None and entry.tracker != tracker:
        entry = entry.parent
    return entry


def _forget_the_parents() -> None:
    """In a forked child: the runs are the parent's. The lock may be held by a thread that is not there any more."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), threading.RLock()
    for entry in _running:
        if entry.claim is not None:
            entry.claim.release()
    _running.clear()
    _entered.clear()
    _current.set(None)


_watch = Watch(_end_runs)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
    os.register_at_fork(
        before=_watch.before_fork,
        after_in_parent=_watch.after_fork_in_parent,
        after_in_child=_watch.after_fork_in_child,
    )
