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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.errors import ConfigError, TrackerNotInstalledError, TrackerUnavailableError
from flyteplugins_tracking.loop_watch import LoopWatch
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
        has_other_writers: Whether processes that are none of the job's present ranks may write to the run, now or
            later: other nodes of an elastic job, the tasks that a Flyte task calls, or the one that has called it.
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
    has_other_writers: bool
    facts: Mapping[str, Any]
    read_secret: Callable[[], str | None]
    may_prompt: bool
    watch: Watch | LoopWatch
    deadline: float

    @property
    def is_retry(self) -> bool:
        """Whether this is a later attempt of the job, after a restart of its workers or a retry of Flyte's."""
        flyte = self.facts.get("flyte") or {}
        return bool(self.facts.get("restart_count") or flyte.get("attempt"))


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
        show: Shows HTML in a tab of the task's report or deck, by its title. None outside of a task.
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
    show: Callable[[str, str], None] | None = None
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
    aside: Callable[[], object] | None = None  # what undoes `Tracker.stand_aside`


# The entry of this thread or task; and all of this process, for threads that a decorated function starts: they do
# not inherit the context.
_current: ContextVar[Entry | None] = ContextVar("flyteplugins_tracking_entry", default=None)
_running: list[Entry] = []
_entered: Counter[str] = Counter()
# Who stands in for this thread or task; and, the last one, for threads that do not inherit the context.
_stand_in: ContextVar[StandIn | None] = ContextVar("flyteplugins_tracking_stand_in", default=None)
_stand_ins: list[StandIn] = []
_lock = threading.Lock()
# Vendors' own set-up is not made for several threads at once: wandb's settings are seen half read.
_opening = threading.RLock()


def hand_out(entry: Entry, is_async: bool = False) -> Any:
    """Make the files of a run that has ended an output of its task, if that was asked for. That fails no training.

    Returns:
        Something to await if `is_async`; None where there is nothing to do.
    """
    if entry.files is None or entry.around.hand_out is None:
        return None
    try:
        handed_out = entry.around.hand_out(*entry.files, is_async)
    except Exception:
        logger.warning("%s: download_logs=True: the files are no output of the task", entry.tracker, exc_info=True)
        return None
    return _handed_out(entry.tracker, handed_out) if is_async and handed_out is not None else None


async def _handed_out(tracker: str, handed_out: Any) -> None:
    try:
        await handed_out
    except Exception:
        logger.warning("%s: download_logs=True: the files are no output of the task", tracker, exc_info=True)


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
def open_run(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, task: Task | None = None
) -> Iterator[Entry]:
    """Run a block with its tracking run open, where this rank has one, and end the run with the block's status.

    The status is 0 for a return, 1 for an exception, the code of a SystemExit, 130 for a KeyboardInterrupt, and 143
    after a SIGTERM, however the block ends.

    Args:
        config: What the user asked for.
        tracker: The service.
        around: What the system that called the function knows.
        task: The task that the block is, if it was decorated as one.
    """
    stand_in = _stand_in.get() or next(reversed(_stand_ins), None)
    if stand_in is not None:
        tracker, around = stand_in.tracker(tracker), stand_in.around(around)
    # Only this thread's own parent: decorated functions in several threads at once are several trainings.
    entry = Entry(tracker.name, parent=_current.get(), stand_in=stand_in)
    token = None
    exit_code = 0
    try:
        _enter(entry, config, tracker, around, task)
        token = _current.set(entry)
        if entry.watch is not None:
            entry.watch.settle()
        with _passing_on(entry, tracker, around):
            yield entry
            if around.at_end is not None:
                around.at_end(entry)
    except BaseException as error:
        exit_code = exit_code_of(error, entry.around.successes)
        raise
    finally:
        try:
            _leave(entry, exit_code)
        finally:
            if token is not None:
                _current.reset(token)


@contextmanager
def apart() -> Iterator[None]:
    """Have functions in the block join none that is around it, as in a thread of their own."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


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


def _enter(entry: Entry, config: TrackingConfig, tracker: Tracker, around: Surroundings, task: Task | None) -> None:
    has_workers = None if task is None else task.has_workers
    is_joining = config.run_mode != "new" and not has_workers
    if is_joining and _join_enclosing(entry):
        if entry.owner is not None and entry.owner.config is not None:
            entry.watch = _entered_watch(tracker, entry.owner.config, around)
    else:
        entry.has_report = around.has_report if task is None else task.has_report
        _open(entry, config, tracker, around, has_workers)
    with _lock:
        if entry not in _running:
            _running.append(entry)


def _join_enclosing(entry: Entry) -> bool:
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


def _join_here(entry: Entry, run_id: str) -> bool:
    """Join the run where this process has it open: a container may run several tasks, of one parent or with it."""
    with _lock:
        owners = [other.owner for other in _running if other.owner is not None and other.tracker == entry.tracker]
        for owner in owners:
            if owner.handle is not None and owner.handle.id == run_id:
                _join(entry, owner)
                return True
    return False


def _passing_on(entry: Entry, tracker: Tracker, around: Surroundings) -> AbstractContextManager[None]:
    """Tasks that the function calls go on in the run that it has opened."""
    if entry.handle is None or around.passing_on is None:
        return nullcontext()
    passed_on = tracker.pass_on(entry.run)
    return nullcontext() if passed_on is None else around.passing_on(tracker.name, passed_on)


def _open(
    entry: Entry, config: TrackingConfig, tracker: Tracker, around: Surroundings, has_workers: bool | None
) -> None:
    with _lock:
        entered = _entered if around.entered is None else around.entered
        entered[tracker.name] += 1
        ordinal = entered[tracker.name]
    info = detect(os.environ)
    parent = _parent(config, tracker, around, has_workers or info is not None)
    if parent is not None:
        config = config.joining(parent)
    elif has_workers is False and info is None and config.run_mode == "shared":
        raise ConfigError(
            "run_mode='shared' in a task without workers of its own is for going on in the run of the task that calls "
            f"it, and that has no {tracker.name} run: put tracking_init on that task too, or use run_mode='auto'"
        )
    run_plan = _decide(config, tracker, around, info, ordinal, parent)
    if not run_plan.opens:
        entry.aside = tracker.stand_aside(config, info)
        return
    entry.around, entry.config, entry.info, entry.plan = around, config, info, run_plan
    entry.watch = _entered_watch(tracker, config, around)
    with _opening:
        if parent is not None and _join_here(entry, parent["id"]):
            return
        deadline = time.monotonic() + config.init_timeout_s
        known_id = run_plan.run_id
        run_plan, entry.claim = _claim(tracker, run_plan, config, around)
        request = RunRequest(
            plan=run_plan,
            known_id=known_id,
            config=config,
            info=info,
            has_other_writers=_has_other_writers(config, around, info),
            facts={**_job_facts(info), **around.facts},
            read_secret=lambda: _read_secret(config.secret, around),
            may_prompt=may_prompt(info, around),
            watch=entry.watch or _watch,
            deadline=deadline,
        )
        require(tracker)
        entry.handle = tracker.open(request)
        entry.run, entry.owner = entry.handle.run, entry
        with _lock:
            _running.append(entry)
    if config.download_logs:
        entry.files = _files(entry, info)


def _files(entry: Entry, info: DistributedInfo | None) -> tuple[str, str] | None:
    handle = entry.handle
    files = handle.files if handle is not None else None
    reason = None
    if info is not None:
        reason = f"the training has {info.world_size} ranks, and a task's output is one process's"
    elif entry.around.hand_out is None:
        reason = "this is no task of Flyte"
    if reason is not None and (info is None or info.rank == 0):
        logger.warning("%s: download_logs=True is left out: %s", entry.tracker, reason)
    return (files, handle.id) if handle is not None and files is not None and reason is None else None


def _entered_watch(tracker: Tracker, config: TrackingConfig, around: Surroundings) -> Watch | LoopWatch | None:
    """The one that can watch for this thread's run, if any can."""
    if around.is_simulated:
        return None
    watches = (_watch, _loop_watch)
    return next((watch for watch in watches if watch.enter(tracker.package, config.finish_timeout_s)), None)


def require(tracker: Tracker) -> None:
    """See that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: It is not.
    """
    from importlib.util import find_spec

    if tracker.package is not None and tracker.package not in sys.modules and find_spec(tracker.package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or tracker.package}")


def _parent(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, has_workers: bool
) -> Mapping[str, Any] | None:
    return None if has_workers or config.run_mode == "new" else around.parents.get(tracker.name)


def may_prompt(info: DistributedInfo | None, around: Surroundings) -> bool:
    """Whether somebody sits at this process's terminal, alone."""
    return info is None and not around.on_cluster and sys.stdin is not None and sys.stdin.isatty()


def _has_other_writers(config: TrackingConfig, around: Surroundings, info: DistributedInfo | None) -> bool:
    from flyteplugins_tracking.identity import is_elastic

    return around.has_children if info is None else config.run_mode == "shared" and is_elastic(info, os.environ)


def _claim(tracker: Tracker, run_plan: RunPlan, config: TrackingConfig, around: Surroundings) -> tuple[RunPlan, Claim]:
    """Make sure that no other process or thread here has the run open: two writers lose each other's rows.

    A rank's own child processes look like the rank itself, and a user's id may be in use: theirs are runs beside it. An
    earlier attempt that is still ending is waited for.
    """
    from flyteplugins_tracking.claims import Claim

    if run_plan.run_id is None or not run_plan.primary or around.is_simulated:
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
    around: Surroundings,
    info: DistributedInfo | None,
    ordinal: int,
    parent: Mapping[str, Any] | None,
) -> RunPlan:
    """The plan of this rank. A rank that gets no run asks nobody for an id: that would cost it imports and waits."""
    parent_id = None if parent is None else parent["id"]
    unnamed = plan(info, config.run_mode, config.rank_scope, None, parent_id)
    if not unnamed.opens or parent_id is not None:
        return replace(unnamed, label=unnamed.label or around.label)
    found = _identity(config, tracker, around, info, ordinal)
    run_plan = plan(info, config.run_mode, config.rank_scope, found.base_id)
    return replace(run_plan, group=run_plan.group or found.group, label=run_plan.label or around.label)


def _identity(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, info: DistributedInfo | None, ordinal: int
) -> Identity:
    # Only ranks that open a run come here; the others are spared what it imports.
    from flyteplugins_tracking.identity import Identity, from_launcher, from_variables

    imposed = tracker.imposed_id()
    if imposed is not None or config.id is not None:
        return Identity(imposed or config.id)
    chosen = from_variables(os.environ, tracker.run_id_variables)
    if chosen is not None:
        return chosen
    agreement = needs_agreement(info, config.run_mode, config.rank_scope)
    if around.base_id is not None:
        found = Identity(around.base_id, around.group)
    else:
        found = from_launcher(info, os.environ, agreement=agreement)
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


def _leave(entry: Entry, exit_code: int) -> None:
    if entry.pid != os.getpid():
        return
    try:
        with nullcontext() if entry.watch is None else entry.watch.ending():
            _end(entry, TERMINATED if _watch.terminated or _loop_watch.terminated else exit_code)
    finally:
        if entry.watch is not None:
            entry.watch.leave()
        if entry.aside is not None:
            entry.aside()


def _end(entry: Entry, exit_code: int) -> None:
    with _lock:  # from here on a signal does not end the run, but waits for this end
        if entry in _running:
            _running.remove(entry)
        owner, is_opener = entry.owner, entry.owner is entry
        if owner is not None and not is_opener:
            owner.joined -= 1
        if is_opener:
            entry.left_with = exit_code
        is_last = owner is None or (owner.joined == 0 and owner.left_with is not None)
    if is_last:
        # A run that was opened again since its opener left is ended with that one's status, unless a signal ends it.
        opener_code = None if owner is None else owner.left_with
        _finish(owner or entry, exit_code if opener_code is None or exit_code == TERMINATED else opener_code)
    elif is_opener and entry.handle is not None and entry.plan is not None and entry.plan.primary:
        _end_early(entry.tracker, entry.handle, exit_code)  # what the others log opens it again


def _finish(entry: Entry, exit_code: int) -> None:
    summary = _summary(entry, exit_code)
    try:
        if entry.handle is not None:
            entry.handle.finish(exit_code)
    except Exception:
        # The training has ended as it has: its tracker does not change that.
        logger.warning("%s: the run could not be finished with status %d", entry.tracker, exit_code, exc_info=True)
    finally:
        if entry.claim is not None:
            entry.claim.release()
    if entry.handle is None or entry.config is None:
        return
    if entry.around.keep is not None:
        in_time(entry.config.finish_timeout_s, _keep, entry.tracker, entry.handle, entry.around.keep)
    if summary is not None:
        in_time(entry.config.finish_timeout_s, _show, entry, exit_code, summary)


def _summary(entry: Entry, exit_code: int) -> Mapping[str, Any] | None:
    """The run's last values, if its task shows them. A task that is terminated has no time for that."""
    is_shown = entry.has_report and entry.around.show is not None and exit_code != TERMINATED
    if not is_shown or entry.handle is None or entry.plan is None or not entry.plan.primary:
        return None
    try:
        return entry.handle.summary()
    except Exception:
        logger.warning("%s: the task's report has no values of the run", entry.tracker, exc_info=True)
        return {}


def _show(entry: Entry, exit_code: int, summary: Mapping[str, Any]) -> None:
    """On rank 0, show what the runs of all ranks came to; on the others, tell it what this one came to."""
    from flyteplugins_tracking import report
    from flyteplugins_tracking.identity import job_store

    info, config, handle = entry.info, entry.config, entry.handle
    assert config is not None
    assert handle is not None
    rank = 0 if info is None else info.rank
    outcome = report.Outcome.of(handle.id, handle.url, rank, exit_code, summary)
    others = _other_runs(config, info)
    store = job_store(info, os.environ) if info is not None and others else None
    base = f"flyteplugins_tracking/report/{entry.tracker}/{info.restart_count if info else 0}"
    if info is not None and info.rank != 0:
        report.tell(store, base, outcome)
        return
    told = report.gather(store, base, others) if store is not None else []
    attempt = entry.around.facts.get("attempt_number", 0)
    shown = report.page(entry.tracker, info, attempt, [outcome, *told], others - len(told))
    if entry.around.show is not None:
        entry.around.show(report.TITLE, shown)


def _other_runs(config: TrackingConfig, info: DistributedInfo | None) -> int:
    """How many runs the job has beside rank 0's."""
    if info is None or (config.run_mode != "new" and config.rank_scope == "global"):
        return 0
    return (info.world_size if config.run_mode == "new" else info.num_workers or 1) - 1


def _keep(tracker: str, handle: Handle, keep: Callable[[str], str]) -> None:
    """Copy to safety what the service has not got: this machine's files end with it."""
    for directory in handle.unsent():
        try:
            kept = keep(directory)
        except Exception:
            logger.warning("%s: %s could not be kept, and is lost with this machine", tracker, directory, exc_info=True)
        else:
            logger.warning(
                "%s: what the service has not got is kept at %s. Download it to %s, and send it: %s",
                tracker,
                kept,
                os.path.basename(directory),
                handle.how_to_send(os.path.basename(directory)),
            )


def in_time(timeout_s: float | None, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` in a thread of this context, and wait for it, at most so long if it may not end."""
    thread = threading.Thread(target=copy_context().run, args=(function, *args), daemon=True)
    thread.start()
    thread.join(timeout_s)


def _end_runs(exit_code: int) -> None:
    """End every run that is open here, whichever thread's, while the functions may go on."""
    with _lock:
        owners = {id(entry.owner): entry.owner for entry in _running if entry.owner is not None}
    opened = [(owner.tracker, owner.handle) for owner in owners.values() if owner.handle is not None]
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


def _innermost() -> Entry | None:
    """The one that is running, for a thread without a context; None where it could be either of several trainings."""
    with _lock:
        last = _running[-1] if _running else None
        if len(_running) > 1 and any(entry is not last and not _encloses(entry, last) for entry in _running):
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
    global _lock, _opening
    _lock, _opening = threading.Lock(), threading.RLock()
    for claim in [one.claim for entry in _running for one in (entry, entry.owner) if one is not None]:
        if claim is not None:
            claim.release()
    _running.clear()
    _entered.clear()
    _current.set(None)


_watch = Watch(_end_runs)
_loop_watch = LoopWatch(_end_runs)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
    for each in (_watch, _loop_watch):
        os.register_at_fork(
            before=each.before_fork,
            after_in_parent=each.after_fork_in_parent,
            after_in_child=each.after_fork_in_child,
        )
