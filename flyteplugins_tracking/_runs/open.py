"""Open the run of a rank that has one: its id, its lock, and the request to the tracker. No other rank loads this."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.failures import FailureReader
from flyteplugins_tracking._job.identity import (
    Identity,
    from_launcher,
    from_variables,
    id_beside,
    identity_of_parent,
    identity_of_trial,
    is_elastic,
)
from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RunPlan, needs_shared_id, plan
from flyteplugins_tracking._rank.pools import Pool
from flyteplugins_tracking._rank.topology import Detection
from flyteplugins_tracking._runs import calls
from flyteplugins_tracking._runs import close as closing
from flyteplugins_tracking._runs.calls import Override, TrackedCall
from flyteplugins_tracking._runs.context import ExecutionContext
from flyteplugins_tracking._runs.goodput import Attempts
from flyteplugins_tracking._runs.run import OpenRun
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.secrets import learn
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import ConfigError, TrackerNotInstalledError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Uncounted
from flyteplugins_tracking.trackers.config import TrackingConfig

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.sigterm.loop import AsyncioSigtermWatcher
    from flyteplugins_tracking._runs.sigterm.main import SigtermWatcher
    from flyteplugins_tracking.trackers.base import Handle, SigtermWatch, StepWatch, Tracker

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)


class _Opening(PerProcess):
    """Vendors' clients are not set up safely by several threads: one could see wandb's settings half read."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


_opening = register(_Opening())


@dataclass(frozen=True)
class Opener:
    """Opens the run of one call.

    Attributes:
        tracker: The tracker.
        plan: The plan of this rank, with the run's id.
        config: The user's arguments.
        info: This rank; None outside a distributed job.
        context: The platform's side of the call.
        watcher: What watches for SIGTERM; None if nothing does.
        failures: What reads why the job ends.
        has_report: Whether the task has a report.
        pool: The pool whose worker this process is; None for none.
        timeout_s: See `TrackedCall`.
    """

    tracker: Tracker
    plan: RunPlan
    config: TrackingConfig
    info: DistributedInfo | None
    context: ExecutionContext
    watcher: SigtermWatcher | AsyncioSigtermWatcher | None
    failures: FailureReader
    has_report: bool
    pool: Pool | None = None
    timeout_s: float | None = None

    def open(self, parent: TrackedCall | None, override: Override | None) -> TrackedCall:
        """Open the run, or join it if this process has it open, and return the call, registered as running.

        Raises:
            TrackerNotInstalledError: The vendor's package is missing.
            TrackerUnavailableError: The service, or a key for it, is missing.
        """
        with _opening.lock:
            run = self._join_run()
            is_opener = run is None
            call = TrackedCall(
                self.tracker.name,
                parent,
                override,
                run or self._open_run(),
                is_opener,
                self.watcher,
                self.info,
                config=self.config,
                is_simulated=self.context.is_simulated,
                timeout_s=self.timeout_s,
            )
            calls.begin(call)
            return call

    def _join_run(self) -> OpenRun | None:
        """Join the run of the calling task if this process has it open."""
        if self.plan.primary or self.info is not None:
            return None
        tracker, run_id = self.tracker.name, str(self.plan.run_id)
        run = calls.join_open_run(tracker, run_id)
        if run is None:
            calls.await_closing(tracker, run_id, self.config.init_timeout_s)
        return run

    def _open_run(self) -> OpenRun:
        self._warn_of_unused_prefix()
        self._warn_of_unused_rewind()
        deadline = time.monotonic() + self.config.init_timeout_s
        run_plan, lock = _lock_run(self.tracker, self.plan, self.config, self.context)
        try:
            watch: SigtermWatch = self.watcher or closing.WATCHER
            if self.config.is_monitored:
                from flyteplugins_tracking._runs.monitor import ProgressWatch

                watch = ProgressWatch(watch)
            # Only one rank keeps the attempts of a run, and only if another attempt can find it.
            can_continue = run_plan.run_id is not None and run_plan.primary and not self.context.is_simulated
            attempts = Attempts(self.config.step_metric) if can_continue else None
            request = self._request(run_plan, watch, deadline, attempts or Uncounted())
            require(self.tracker)
            handle = self.tracker.open(request)
            closing.close_at_exit()
            if attempts is not None:
                attempts.begin(handle, request.is_retry)
        except BaseException:
            lock.release()
            raise
        return OpenRun(
            tracker=self.tracker.name,
            handle=handle,
            vendor_run=handle.run,
            plan=run_plan,
            config=self.config,
            info=self.info,
            context=self.context,
            lock=lock,
            failures=self.failures,
            attempts=attempts,
            shows_report=self.has_report and self.context.can_render_report,
            published_dir=self._published_dir(handle) if self.config.download_logs else None,
        )

    def _request(self, run_plan: RunPlan, watch: SigtermWatch, deadline: float, steps: StepWatch) -> RunRequest:
        return RunRequest(
            plan=run_plan,
            planned_run_id=self.plan.run_id,
            config=self.config,
            info=self.info,
            has_other_writers=_has_other_writers(self.config, self.context, self.info),
            run_metadata={**_trial_config(self.pool), **_job_metadata(self.info), **self.context.run_metadata},
            read_secret=lambda: _read_secret(self.config.secret, self.context),
            may_prompt=may_prompt(self.info, self.context),
            watch=watch,
            deadline=deadline,
            ask_to_stop=functools.partial(_ask_to_stop, self.tracker.name),
            steps=steps,
        )

    def _warn_of_unused_prefix(self) -> None:
        if self.config.rank_prefix and self.config.run_mode != "shared" and self.plan.first:
            text = "%s: rank_prefix=True is ignored: with run_mode=%r each run has one writer. Use run_mode='shared'"
            logger.warning(text, self.tracker.name, self.config.run_mode)

    def _warn_of_unused_rewind(self) -> None:
        if self.config.rollback != "rewind" or not self.plan.first:
            return
        reason = None
        if self.config.run_mode == "shared":
            reason = "several ranks write to the run"
        elif not getattr(self.tracker, "rewinds", False):
            reason = "the service cannot do that"
        if reason is not None:
            text = "%s: rollback='rewind' is ignored: %s. Rows that are logged again after a restart are kept"
            logger.warning(text, self.tracker.name, reason)

    def _published_dir(self, handle: Handle) -> str | None:
        reason = None
        if self.info is not None:
            reason = f"the training has {self.info.world_size} ranks, and a task's output comes from one process"
        elif not self.context.can_publish_files:
            reason = "the function does not run as a Flyte task"
        if reason is not None and self.plan.first:
            logger.warning("%s: download_logs=True is ignored: %s", self.tracker.name, reason)
        return handle.files if reason is None else None


def _ask_to_stop(service: str, otherwise: Callable[[], object]) -> None:
    from flyteplugins_tracking._runs import stopping

    stopping.request_of_service(service, otherwise)


def call_of_joined_run(
    tracker: Tracker,
    run: OpenRun,
    config: TrackingConfig,
    context: ExecutionContext,
    parent: TrackedCall | None,
    override: Override | None,
    timeout_s: float | None,
) -> TrackedCall:
    """Return a call for a run that has just been joined. If its watcher cannot start, the run is left again."""
    call = functools.partial(
        TrackedCall,
        tracker.name,
        parent,
        override,
        run,
        info=run.info,
        config=config,
        is_simulated=context.is_simulated,
        timeout_s=timeout_s,
    )
    try:
        return call(watcher=closing.start_watcher(tracker, run.config, context))
    except BaseException:
        closing.close(call(), run, exit_code=1)
        raise


def require(tracker: Tracker) -> None:
    """Check that the vendor's package is installed, without importing it.

    Raises:
        TrackerNotInstalledError: The package is missing, or an import of it has ended early in this process.
    """
    from importlib.util import find_spec

    package = tracker.package
    if package is None or package in sys.modules:
        return
    if find_spec(package) is None:
        raise TrackerNotInstalledError(f"pip install {tracker.distribution or package}")
    if any(name.startswith(f"{package}.") for name in sys.modules):  # an import of it has ended early, as by Ctrl-C
        try:
            import_module(package)
        except Exception as error:
            raise TrackerNotInstalledError(
                f"{package} cannot be imported, since an earlier import of it in this process was interrupted or has "
                f"failed: start the process again ({error})"
            ) from error


def may_prompt(info: DistributedInfo | None, context: ExecutionContext) -> bool:
    """Whether this process may ask the user for a key: it runs alone, in a terminal."""
    return info is None and not context.on_cluster and sys.stdin is not None and sys.stdin.isatty()


def _has_other_writers(config: TrackingConfig, context: ExecutionContext, info: DistributedInfo | None) -> bool:
    return context.has_children if info is None else config.run_mode == "shared" and is_elastic(info, os.environ)


def _lock_run(
    tracker: Tracker, run_plan: RunPlan, config: TrackingConfig, context: ExecutionContext
) -> tuple[RunPlan, RunLock]:
    """Lock the run against other processes and threads of this machine: two writers would lose each other's rows.

    A child process has the variables of its rank, and the user's id may be in use. If the lock is taken, the run gets
    another id. An earlier attempt that is still ending is waited for.
    """
    if run_plan.run_id is None or not run_plan.primary or context.is_simulated:
        return run_plan, RunLock()
    lock = RunLock.acquire(f"{tracker.name}/{config.project}/{run_plan.run_id}", timeout_s=config.init_timeout_s / 2)
    if lock is not None:
        return run_plan, lock
    new_id = f"{run_plan.run_id}-{os.urandom(3).hex()}"
    logger.warning(
        "%s: run %s is open in another process or thread: this one is %s", tracker.name, run_plan.run_id, new_id
    )
    return replace(run_plan, run_id=new_id), RunLock()


@contextmanager
def watching(
    tracker: Tracker, config: TrackingConfig, context: ExecutionContext, info: DistributedInfo | None
) -> Iterator[tuple[SigtermWatcher | AsyncioSigtermWatcher | None, FailureReader]]:
    """Watch for SIGTERM, and watch the other ranks, from now on; no longer if the body raises.

    Opening a run may take seconds: a rank that dies meanwhile is seen too.
    """
    with ExitStack() as stop:
        watcher = closing.start_watcher(tracker, config, context)
        if watcher is not None:
            stop.callback(watcher.stop)
        is_alone = context.is_simulated or info is None or info.world_size == 1
        failures = FailureReader(info, is_alone=is_alone, is_own_run=config.run_mode == "new")
        stop.callback(failures.stop)
        yield watcher, failures
        stop.pop_all()


def plan_run(
    config: TrackingConfig,
    tracker: Tracker,
    context: ExecutionContext,
    found: Detection,
    call_index: int,
    parent_id: str | None,
) -> RunPlan:
    """Return the plan of a rank that opens a run, with the run's id, on which the ranks agree.

    Raises:
        IdentityError: They cannot agree.
    """
    identity = Identity(None)
    if parent_id is None:
        identity = _identity(config, tracker, context, found, call_index)
    run_plan = plan(found.info, config.run_mode, config.rank_scope, identity.base_id, parent_id, config.primary_rank)
    return replace(run_plan, group=run_plan.group or identity.group, label=run_plan.label or context.label)


def _identity(
    config: TrackingConfig, tracker: Tracker, context: ExecutionContext, found: Detection, call_index: int
) -> Identity:
    forced_run_id = tracker.forced_run_id()
    if forced_run_id is not None or config.id is not None:
        return Identity(forced_run_id or config.id)
    from_env = from_variables(os.environ, tracker.run_id_variables)
    if from_env is not None:
        variable = next(name for name in tracker.run_id_variables if os.environ.get(name, "").strip())
        try:
            tracker.check(replace(config, id=from_env.base_id))
        except ConfigError as error:
            raise ConfigError(f"{error}. The id is from {variable}") from None
        check_run_id(variable, from_env.base_id)
        return from_env if found.parent is None else _identity_beside(tracker, from_env, found)
    if context.base_id is not None:
        identity = Identity(context.base_id, context.group)
        if found.is_child and not context.is_simulated:
            return _identity_beside(tracker, identity, found)
    elif found.pool is not None and found.pool.trial is not None:
        identity = identity_of_trial(found.pool.trial)
    elif found.parent is not None:
        return _identity_beside(tracker, identity_of_parent(found.parent, os.environ), found)
    else:
        is_shared = needs_shared_id(found.info, config.run_mode, config.rank_scope)
        identity = from_launcher(found.info, os.environ, agreement=is_shared)
        children.mark(found.variables, identity.base_id)
    if identity.base_id is None or call_index == 1:
        return identity
    # The second call in one process gets its own run, so that it cannot hide a failure of the first.
    return Identity(f"{identity.base_id}-{call_index}", identity.group)


def _identity_beside(tracker: Tracker, identity: Identity, found: Detection) -> Identity:
    """Return an identity for a process that a rank has started: the rank's run, `identity`, is not its run."""
    own_id = id_beside(identity.base_id)
    who = "the process" if found.parent is None else f"rank {found.parent.rank}"
    _warn_once(
        "child",
        "%s: this process was started by %s that has run %s, and is not that rank: its own run is %s. Each further "
        "call here has a run of its own too",
        tracker.name,
        who,
        identity.base_id or "(not known here)",
        own_id or "a new one",
    )
    return Identity(own_id, identity.group)


def _trial_config(pool: Pool | None) -> dict[str, Any]:
    """Return the hyperparameters of a trial of Ray Tune. What is not a plain value is text: it may be any object."""
    if pool is None or pool.trial is None:
        return {}
    plain = (str, int, float, bool, list, tuple, dict, type(None))
    return {str(name): value if isinstance(value, plain) else repr(value) for name, value in pool.trial.config.items()}


def _job_metadata(info: DistributedInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    shape = ("world_size", "num_workers", "local_world_size", "launcher")
    return {"distributed": {name: info[name] for name in shape}, "restart_count": info.restart_count}


def _read_secret(secret: Any, context: ExecutionContext) -> str | None:
    """Read the user's key, which no text of ours shows from now on."""
    key = _secret_of(secret, context)
    if key is not None:
        learn(key)
    return key


def _secret_of(secret: Any, context: ExecutionContext) -> str | None:
    if secret is None:
        return None
    if not callable(secret):
        return context.read_secret(secret)
    try:
        value = secret()
    except Exception as error:
        # The error's text may hold the key.
        raise TrackerUnavailableError(f"secret= raised {type(error).__name__} and returned no API key") from None
    if value is not None and not isinstance(value, str):
        raise TrackerUnavailableError(f"secret= must return the API key as a string, got a {type(value).__name__}")
    return value
