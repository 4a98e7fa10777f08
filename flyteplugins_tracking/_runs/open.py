"""Open the run of a rank that has one: its id, its claim, its request to the tracker. No other rank loads this."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.identity import Identity, from_launcher, from_variables, is_elastic
from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking._job.plan import RunPlan, needs_agreement, plan
from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs import close as closing
from flyteplugins_tracking._runs.calls import Entry, Surroundings
from flyteplugins_tracking._util.lock import Claim
from flyteplugins_tracking.errors import TrackerNotInstalledError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Tracker

logger = logging.getLogger(__name__)
# Vendors' own set-up is not made for several threads at once: wandb's settings are seen half read.
_opening = threading.RLock()


def open_for(entry: Entry, tracker: Tracker) -> None:
    """Open the run that the entry's plan asks for, or join it where this process has it open.

    Raises:
        TrackerNotInstalledError: The vendor's package is missing.
        TrackerUnavailableError: The service, or a key for it, is not there.
    """
    config, info, around, run_plan = entry.config, entry.info, entry.around, entry.plan
    assert config is not None
    assert run_plan is not None
    entry.watch = closing.entered_watch(tracker, config, around)
    with _opening:
        if not run_plan.primary and info is None and calls.join_here(entry, str(run_plan.run_id)):
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
            watch=entry.watch or closing.WATCH,
            deadline=deadline,
        )
        require(tracker)
        entry.handle = tracker.open(request)
        entry.run, entry.owner = entry.handle.run, entry
        calls.begin(entry)
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


def require(tracker: Tracker) -> None:
    """See that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: It is not.
    """
    from importlib.util import find_spec

    if tracker.package is not None and tracker.package not in sys.modules and find_spec(tracker.package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or tracker.package}")


def may_prompt(info: DistributedInfo | None, around: Surroundings) -> bool:
    """Whether somebody sits at this process's terminal, alone."""
    return info is None and not around.on_cluster and sys.stdin is not None and sys.stdin.isatty()


def _has_other_writers(config: TrackingConfig, around: Surroundings, info: DistributedInfo | None) -> bool:
    return around.has_children if info is None else config.run_mode == "shared" and is_elastic(info, os.environ)


def _claim(tracker: Tracker, run_plan: RunPlan, config: TrackingConfig, around: Surroundings) -> tuple[RunPlan, Claim]:
    """Make sure that no other process or thread here has the run open: two writers lose each other's rows.

    A rank's own child processes look like the rank itself, and a user's id may be in use: theirs are runs beside it. An
    earlier attempt that is still ending is waited for.
    """
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


def named(
    unnamed: RunPlan,
    config: TrackingConfig,
    tracker: Tracker,
    around: Surroundings,
    info: DistributedInfo | None,
    ordinal: int,
) -> RunPlan:
    """The plan of this rank with its run's id, on which the ranks agree.

    Raises:
        IdentityError: They cannot.
    """
    if unnamed.run_id is not None:  # of the task that has called this one
        return replace(unnamed, label=unnamed.label or around.label)
    found = _identity(config, tracker, around, info, ordinal)
    run_plan = plan(info, config.run_mode, config.rank_scope, found.base_id)
    return replace(run_plan, group=run_plan.group or found.group, label=run_plan.label or around.label)


def _identity(
    config: TrackingConfig, tracker: Tracker, around: Surroundings, info: DistributedInfo | None, ordinal: int
) -> Identity:
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


def _forget_the_parents() -> None:
    """In a forked child: the lock may be held by a thread that is not there any more."""
    global _opening
    _opening = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
