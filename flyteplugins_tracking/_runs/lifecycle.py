"""The life of a run around one call: whether this rank opens one, and the status that it ends with.

Every rank comes here. What only ranks with a run need is in `open` and `close`, which the others do not load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.plan import plan
from flyteplugins_tracking._job.topology import detect
from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs.calls import Entry, Surroundings, Task
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import RunRequest as RunRequest

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Tracker


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
    stand_in = calls.stand_in()
    if stand_in is not None:
        tracker, around = stand_in.tracker(tracker), stand_in.around(around)
    # Only this thread's own parent: decorated functions in several threads at once are several trainings.
    entry = Entry(tracker.name, parent=calls.current.get(), stand_in=stand_in)
    token = None
    exit_code = 0
    try:
        _enter(entry, config, tracker, around, task)
        token = calls.current.set(entry)
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
                calls.current.reset(token)


def hand_out(entry: Entry, is_async: bool = False) -> Any:
    """Make the files of a run that has ended an output of its task, if that was asked for. That fails no training.

    Returns:
        Something to await if `is_async`; None where there is nothing to do.
    """
    if entry.files is None:
        return None
    from flyteplugins_tracking._runs import close as closing

    return closing.hand_out(entry, is_async)


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
    if is_joining and calls.join_enclosing(entry):
        _watch_for_the_owner(entry, tracker, around)
    else:
        entry.has_report = around.has_report if task is None else task.has_report
        _open(entry, config, tracker, around, has_workers)
    calls.begin(entry)


def _watch_for_the_owner(entry: Entry, tracker: Tracker, around: Surroundings) -> None:
    if entry.owner is not None and entry.owner.config is not None:
        from flyteplugins_tracking._runs import close as closing

        entry.watch = closing.entered_watch(tracker, entry.owner.config, around)


def _passing_on(entry: Entry, tracker: Tracker, around: Surroundings) -> AbstractContextManager[None]:
    """Tasks that the function calls go on in the run that it has opened."""
    if entry.handle is None or around.passing_on is None:
        return nullcontext()
    passed_on = tracker.pass_on(entry.run)
    return nullcontext() if passed_on is None else around.passing_on(tracker.name, passed_on)


def _open(
    entry: Entry, config: TrackingConfig, tracker: Tracker, around: Surroundings, has_workers: bool | None
) -> None:
    ordinal = calls.count(tracker.name, around.entered)
    info = detect(os.environ)
    parent = _parent(config, tracker, around, has_workers or info is not None)
    if parent is not None:
        config = config.joining(parent)
    elif has_workers is False and info is None and config.run_mode == "shared":
        raise ConfigError(
            "run_mode='shared' in a task without workers of its own is for going on in the run of the task that calls "
            f"it, and that has no {tracker.name} run: put tracking_init on that task too, or use run_mode='auto'"
        )
    # A rank that gets no run asks nobody for an id: that would cost it imports and waits.
    unnamed = plan(info, config.run_mode, config.rank_scope, None, None if parent is None else parent["id"])
    if not unnamed.opens:
        entry.aside = tracker.stand_aside(config, info)
        return
    from flyteplugins_tracking._runs import open as opening

    entry.around, entry.config, entry.info = around, config, info
    entry.plan = opening.named(unnamed, config, tracker, around, info, ordinal)
    opening.open_for(entry, tracker)


def _parent(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, has_workers: bool
) -> Mapping[str, Any] | None:
    return None if has_workers or config.run_mode == "new" else around.parents.get(tracker.name)


def _leave(entry: Entry, exit_code: int) -> None:
    if entry.pid != os.getpid():
        return
    if entry.config is None and entry.owner is None:  # it has no run
        try:
            calls.end(entry, exit_code)
        finally:
            if entry.aside is not None:
                entry.aside()
        return
    from flyteplugins_tracking._runs import close as closing

    closing.leave(entry, exit_code)
