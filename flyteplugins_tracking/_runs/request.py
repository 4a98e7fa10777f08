"""What a tracker is asked for: the plan of a rank that opens a run, and the request that is made of it."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.identity import (
    Identity,
    from_launcher,
    from_variables,
    id_beside,
    identity_of_parent,
    identity_of_program,
    identity_of_trial,
)
from flyteplugins_tracking._job.starts import outer_job, start_in
from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RunPlan, needs_shared_id, plan
from flyteplugins_tracking._runs.run_file import RunFile
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.secrets import learn
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import ConfigError, IdentityError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Sigterm
from flyteplugins_tracking.trackers.config import OWN

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.call import Call
    from flyteplugins_tracking._runs.context import ExecutionContext

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)


def plan_of(call: Call) -> RunPlan:
    """Return the plan of a rank that opens a run, with the run's id, on which the ranks agree.

    Raises:
        IdentityError: They cannot agree.
    """
    config = call.config
    if config.run_file is not None and not call.found.is_child:
        call.run_file = RunFile(call, config.run_file)
    identity = Identity(None) if call.parent_id is not None else _identity(call)
    if call.run_file is not None:
        call.run_file.base_id = identity.base_id
    run_plan = plan(
        call.info,
        config.run_mode,
        config.rank_scope,
        identity.base_id,
        call.parent_id,
        config.primary_rank,
        config.role,
    )
    return replace(run_plan, group=run_plan.group or identity.group, label=run_plan.label or call.context.label)


def _identity(call: Call) -> Identity:
    context, found = call.context, call.found
    chosen = _chosen_identity(call)
    if chosen is not None:
        return chosen
    if context.base_id is not None:
        identity = Identity(context.base_id, context.group)
        if found.is_child and call.world.is_real:
            return _identity_beside(call, identity)
    elif found.pool is not None and found.pool.trial is not None:
        identity = identity_of_trial(found.pool.trial)
    elif found.parent is not None:
        return _identity_beside(call, identity_of_parent(found.parent, os.environ))
    else:
        identity = _started_identity(call)
        children.mark(found.variables, identity.base_id)
    if identity.base_id is None or call.number == 1:
        return identity
    # The second call in one process gets its own run, so that it cannot hide a failure of the first.
    return Identity(f"{identity.base_id}-{call.number}", identity.group)


def _started_identity(call: Call) -> Identity:
    found, config = call.found, call.config
    is_shared = found.info is not None and needs_shared_id(found.info, config.run_mode, config.rank_scope)
    if not (is_shared or call.tracker.resumes(config)):
        return Identity(None)
    if found.info is None:
        return Identity(None) if found.pool is not None else identity_of_program(os.environ)
    return from_launcher(found.info, os.environ, agreement=is_shared, in_pool=found.pool is not None)


def _chosen_identity(call: Call) -> Identity | None:
    """Return what the user has chosen: `id=`, the tracker's variable, or an earlier job with the same `run_file=`.

    Raises:
        ConfigError: The variable's value cannot be an id.
        IdentityError: This job has a role, and nothing says in which run.
    """
    tracker, config = call.tracker, call.config
    forced_run_id = tracker.forced_run_id()
    if forced_run_id is not None or config.id is not None:
        return Identity(forced_run_id or config.id)
    from_env = from_variables(os.environ, tracker.run_id_variables)
    if from_env is not None:
        _check_variable(call, str(from_env.base_id))
        is_ranks = call.found.parent is None or config.role is not None
        return from_env if is_ranks else _identity_beside(call, from_env)
    if config.role is not None and call.world.is_real:
        variables = "".join(f", or set {name}" for name in tracker.run_id_variables[:1])
        raise IdentityError(
            f"role={config.role!r} joins the run of another job, and nothing says which: pass id=..., that of the job "
            f"with roles=[...]{variables}; or call this task from the task that has roles=[...]"
        )
    kept = None if call.run_file is None else call.run_file.find()
    if kept is not None and call.found.parent is None and call.found.pool is None:
        start_in(outer_job(os.environ), call.info)  # the next start in the job has the next number
    return None if kept is None else Identity(kept)


def _check_variable(call: Call, run_id: str) -> None:
    variable = next(name for name in call.tracker.run_id_variables if os.environ.get(name, "").strip())
    try:
        call.tracker.check(replace(call.config, id=run_id))
    except ConfigError as error:
        raise ConfigError(f"{error}. The id is from {variable}") from None
    check_run_id(variable, run_id)


def _identity_beside(call: Call, identity: Identity) -> Identity:
    """Return an identity for a process that a rank has started: the rank's run, `identity`, is not its run."""
    own_id, parent = id_beside(identity.base_id), call.found.parent
    _warn_once(
        "child",
        "%s: this process was started by %s that has run %s, and is not that rank: its own run is %s. Each further "
        "call here has a run of its own too",
        call.tracker.name,
        "the process" if parent is None else f"rank {parent.rank}",
        identity.base_id or "(not known here)",
        own_id or "a new one",
    )
    return Identity(own_id, identity.group)


def request_of(call: Call, planned: RunPlan, run_plan: RunPlan, sigterm: Sigterm, deadline: float) -> RunRequest:
    """Return what the tracker gets to open a run.

    Args:
        call: The call that opens the run.
        planned: The plan, with the id that all ranks know.
        run_plan: The plan with the id that the run has: another process may have the planned one open.
        sigterm: What is known of SIGTERM.
        deadline: When the run must be open, in seconds of `time.monotonic`.
    """
    config, context, info = call.config, call.context, call.info
    own, attempt = {**_job_metadata(info), **context.run_metadata}, call.attempt
    if own or attempt:
        own["restart_count"] = attempt
    return RunRequest(
        plan=run_plan,
        planned_run_id=planned.run_id,
        config=config,
        info=info,
        has_other_writers=config.has_roles or (context.has_children if info is None else config.run_mode == "shared"),
        run_metadata={**_trial_config(call), **({OWN: own} if own else {})},
        read_secret=functools.partial(_read_secret, config.secret, context),
        may_prompt=may_prompt(info, context),
        sigterm=sigterm,
        deadline=deadline,
        ask_to_stop=functools.partial(_ask_to_stop, call.tracker.name),
    )


def may_prompt(info: DistributedInfo | None, context: ExecutionContext) -> bool:
    """Whether this process may ask the user for a key: it runs alone, in a terminal."""
    return info is None and not context.on_cluster and sys.stdin is not None and sys.stdin.isatty()


def _ask_to_stop(service: str, otherwise: Callable[[], object]) -> None:
    from flyteplugins_tracking._runs import stopping

    stopping.request_of_service(service, otherwise)


def _trial_config(call: Call) -> dict[str, Any]:
    """Return the hyperparameters of a trial of Ray Tune."""
    pool = call.found.pool
    return {} if pool is None or pool.trial is None else plain_config(pool.trial.config, "the trial's config")


def _job_metadata(info: DistributedInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    return {name: info[name] for name in ("world_size", "num_workers", "local_world_size", "launcher")}


def _read_secret(secret: Any, context: ExecutionContext) -> str | None:
    """Read the user's key, which no message of the library shows from now on."""
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
        text = f"secret= raised {type(error).__name__} and returned no API key"
        raise TrackerUnavailableError(text, is_outage=False) from None
    if value is not None and not isinstance(value, str):
        text = f"secret= must return the API key as a string, got a {type(value).__name__}"
        raise TrackerUnavailableError(text, is_outage=False)
    return value
