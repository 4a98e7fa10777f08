"""How a rank gets its run: plan, lock, request, and the tracker's `open`; all undone if anything raises.

Only ranks with a run load this module.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.failures import FailureReader
from flyteplugins_tracking._job.identity import Identity
from flyteplugins_tracking._job.starts import outer_job
from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.plan import RunPlan, plan
from flyteplugins_tracking._rank.topology import Detection
from flyteplugins_tracking._runs.calls import state
from flyteplugins_tracking._runs.context import Asked, ExecutionContext
from flyteplugins_tracking._runs.identity import identity_of
from flyteplugins_tracking._runs.run import SIGTERM, Run, release
from flyteplugins_tracking._runs.run_file import RunFile
from flyteplugins_tracking._runs.stopping import request_of_service
from flyteplugins_tracking._util.fork import OwnLock, register
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.proc import INTERRUPTED
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.secrets import learn
from flyteplugins_tracking._util.text import digest
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerNotInstalledError, TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.config import OWN, roles_error

if TYPE_CHECKING:
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking.trackers.base import Handle, Tracker

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)


# Vendors' clients are not set up safely by several threads: one could see wandb's settings half read.
_opening = register(OwnLock())


def open_run(asked: Asked, who: Detection, number: int, parent_id: str | None) -> Run:
    """Open the run of a call, or join it if this process has it open.

    Args:
        asked: What the call asks for.
        who: This process.
        number: The number of the call among those of the tracker in this process.
        parent_id: The run of the calling task, if this task continues it.

    Raises:
        TrackerNotInstalledError: The vendor's package is missing.
        TrackerUnavailableError: The service, or a key for it, is missing.
        IdentityError: The ranks cannot agree on an id.
    """
    config, tracker, info, attempt = asked.config, asked.tracker, who.info, _attempt(asked, who)
    # From here on, and not when the run is open: that may take seconds, and a rank may die meanwhile.
    is_alone = info is None or info.world_size == 1 or not asked.world.is_real
    failures = FailureReader(info, is_alone=is_alone, is_own_run=config.run_mode == "new")
    locks, run_file, run = list[RunLock | RunFile | None](), None, None
    try:
        if config.run_file is not None and not who.is_child:
            run_file = RunFile(asked, config.run_file, info, number, attempt)
            locks.append(run_file)
        identity = Identity(None) if parent_id is not None else identity_of(asked, who, number, run_file)
        planned = _plan(asked, who, identity, parent_id)
        with _opening.lock:
            if joined := _join_callers_run(asked, info, planned):
                return joined
            _warn_of_unused_arguments(asked, info, planned)
            deadline = time.monotonic() + config.init_timeout_s
            run_plan = _lock_run(asked, info, planned, locks)
            logger.debug("%s: opening %s", tracker.name, run_plan)
            earlier = 0 if run_file is None else run_file.earlier
            request = _request(asked, who, planned, run_plan, attempt + earlier, deadline)
            require(tracker)
            handle = _opened(tracker, request)
            if planned.run_id is None and tracker.package is not None:
                # Another job may learn the id that it has made, from a copy of the run file for one.
                locks.append(RunLock.acquire(_lock_name(asked, handle.id)))
            logger.debug("%s: run %s is open", tracker.name, handle.id)
            if run_file is not None:
                # Another id, if that run is open in another process.
                is_moved = identity.base_id == planned.run_id
                run_file.base_id = run_plan.run_id if is_moved else identity.base_id
                run_file.write(handle, has_ended=False)
            run = Run(asked, info, run_plan, handle, run_file, locks, failures)
            run.begin()
            return run
    except BaseException as error:
        if run is None:
            release(locks, failures)
        else:  # a signal has kept it from being used
            run.close(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, None)
        raise


def _attempt(asked: Asked, who: Detection) -> int:
    """Return how many attempts of the run came before: told by the launcher or the job, and by the platform."""
    is_program = asked.context.base_id is None and who.pool is None and children.is_program()
    outer = outer_job(os.environ) if is_program else None
    return asked.context.attempt + (who.info.restart_count if who.info else outer.restarts if outer else 0)


def _plan(asked: Asked, who: Detection, identity: Identity, parent_id: str | None) -> RunPlan:
    config = asked.config
    mode, scope = config.run_mode, config.rank_scope
    planned = plan(who.info, mode, scope, identity.base_id, parent_id, config.primary_rank, config.role)
    return replace(planned, group=planned.group or identity.group, label=planned.label or asked.context.label)


def _join_callers_run(asked: Asked, info: DistributedInfo | None, planned: RunPlan) -> Run | None:
    """Join the run of the calling task if this process has it open: a container may run several tasks."""
    if planned.primary or info is not None:
        return None
    name = asked.tracker.name
    with state.lock:
        own = [run for run in state.runs if (run.asked.tracker.name, run.handle.id) == (name, planned.run_id)]
        for run in own:
            if run.users > 0:
                run.users += 1
                return run
    for run in own:  # wandb-core refuses the id until the run is closed
        run.closed.wait(asked.config.init_timeout_s)
    return None


def _warn_of_unused_arguments(asked: Asked, info: DistributedInfo | None, planned: RunPlan) -> None:
    if not planned.first:
        return
    config, warning = asked.config, f"{asked.tracker.name}: %s is ignored: %s"
    if config.rank_prefix and config.run_mode != "shared":
        reason = f"with run_mode={config.run_mode!r} each run has one writer. Use run_mode='shared'"
        logger.warning(warning, "rank_prefix=True", reason)
    if config.download_logs and info is not None:
        reason = f"the training has {info.world_size} ranks, and a task's output comes from one process"
        logger.warning(warning, "download_logs=True", reason)
    elif config.download_logs and not asked.context.can_publish_files:
        logger.warning(warning, "download_logs=True", "the function does not run as a Flyte task")


def _lock_run(asked: Asked, info: DistributedInfo | None, planned: RunPlan, locks: list[Any]) -> RunPlan:
    """Lock the run against other processes and threads of this machine: two writers would lose each other's rows.

    A child process has the variables of its rank, and the user's id may be in use. If the lock is taken, the run gets
    another id. An earlier attempt that is still ending is waited for. Each rank that shares a run locks its own part.
    The owner of a run with roles has a second lock, so that a job which asks for its id is told what the tracker would
    say once the run is stored.

    Raises:
        ConfigError: The run has roles, and this job is none.
    """
    config, name = asked.config, asked.tracker.name
    is_shared = info is not None and config.run_mode == "shared" and planned.role is None
    if planned.run_id is None or not (planned.ends_run or is_shared) or not asked.world.is_real:
        return planned
    of_run = _lock_name(asked, planned.run_id) + ("" if planned.ends_run else f"/{planned.label}")
    if config.roles is None and config.id is not None and RunLock.is_held(f"{of_run}/roles"):
        raise roles_error(f"{name}: run {planned.run_id}", "its owner runs now")
    lock = RunLock.acquire(of_run, timeout_s=config.init_timeout_s / 2)
    if lock is not None:
        locks.append(lock)
        locks.append(None if config.roles is None else RunLock.acquire(f"{of_run}/roles"))
        return planned
    # A name that all ranks of this job know, and no other job on this machine has at the same time.
    job = digest(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), length=6)
    new_id = f"{planned.run_id}-{job if is_shared else os.urandom(3).hex()}"
    logger.warning("%s: run %s is open in another process or thread: this one is %s", name, planned.run_id, new_id)
    return replace(planned, run_id=new_id)


def _lock_name(asked: Asked, run_id: str) -> str:
    return f"{asked.tracker.name}/{asked.config.project}/{run_id}"


def require(tracker: Tracker) -> None:
    """Check that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: The package is missing, or too old.
    """
    from importlib.util import find_spec

    from flyteplugins_tracking.trackers.vendor_parts import known_faults

    package = tracker.package
    for fault in known_faults(package or tracker.name):
        if fault.level == "error":
            raise TrackerNotInstalledError(f"{tracker.title}: {fault.text}. Install a newer one: {fault.fix}")
        _warn_once(fault.text, "%s: %s. Install another version: %s", tracker.title, fault.text, fault.fix)
    if package is not None and package not in sys.modules and find_spec(package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or package}")


def _opened(tracker: Tracker, request: RunRequest) -> Handle:
    """Open the run at the service.

    Raises:
        TrackerNotInstalledError: The vendor's package cannot be imported, as when a package that it needs is too old.
    """
    try:
        return tracker.open(request)
    except Exception as error:
        if isinstance(error, TrackingError) or tracker.package is None or tracker.package in sys.modules:
            raise
        text = f"{tracker.package} cannot be imported: {type(error).__name__}: {error}"
        raise TrackerNotInstalledError(
            f"{text}. See which packages are missing or do not fit together: pip check; if an earlier import was "
            "interrupted, start the process again"
        ) from error


def _request(
    asked: Asked, who: Detection, planned: RunPlan, run_plan: RunPlan, attempt: int, deadline: float
) -> RunRequest:
    """Return what the tracker gets to open a run.

    Args:
        asked: What the call asks for.
        who: This process.
        planned: The plan, with the id that all ranks know.
        run_plan: The plan with the id that the run has: another process may have the planned one open.
        attempt: How many attempts of the run came before.
        deadline: When the run must be open, in seconds of `time.monotonic`.
    """
    config, context, info, pool = asked.config, asked.context, who.info, who.pool
    shape = ("world_size", "num_workers", "local_world_size", "launcher")
    own = {**({} if info is None else {name: info[name] for name in shape}), **context.run_metadata}
    if own or attempt:
        own["restart_count"] = attempt
    trial = {} if pool is None or pool.trial is None else plain_config(pool.trial.config, "the trial's config")
    return RunRequest(
        plan=run_plan,
        planned_run_id=planned.run_id,
        config=config,
        info=info,
        has_other_writers=config.has_roles or (context.has_children if info is None else config.run_mode == "shared"),
        run_metadata={**trial, **({OWN: own} if own else {})},
        read_secret=functools.partial(_read_secret, config.secret, context),
        may_prompt=may_prompt(info, context),
        sigterm=SIGTERM,
        deadline=deadline,
        ask_to_stop=functools.partial(request_of_service, asked.tracker.name),
    )


def may_prompt(info: DistributedInfo | None, context: ExecutionContext) -> bool:
    """Whether this process may ask the user for a key: it runs alone, in a terminal."""
    return info is None and not context.on_cluster and sys.stdin is not None and sys.stdin.isatty()


def _read_secret(secret: Any, context: ExecutionContext) -> str | None:
    """Read the user's key, which no message of the library shows from now on."""
    if callable(secret):
        try:
            key = secret()
        except Exception as error:
            # The error's text may hold the key.
            text = f"secret= raised {type(error).__name__} and returned no API key"
            raise TrackerUnavailableError(text, is_outage=False) from None
        if key is not None and not isinstance(key, str):
            text = f"secret= must return the API key as a string, got a {type(key).__name__}"
            raise TrackerUnavailableError(text, is_outage=False)
    else:
        key = None if secret is None else context.read_secret(secret)
    if key is not None:
        learn(key)
    return key
