"""Which run it is: the base id of a call, from the first of nine sources that has one.

`_job.identity` knows what the launcher and the job offer. `_rank.plan` makes the ids of the runs from the base id.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flyteplugins_tracking._job.identity import (
    Identity,
    from_launcher,
    identity_of_parent,
    identity_of_program,
    readable,
)
from flyteplugins_tracking._job.starts import outer_job, start_in
from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.plan import needs_shared_id
from flyteplugins_tracking._rank.topology import Detection
from flyteplugins_tracking._runs.context import Asked
from flyteplugins_tracking._util.checks import check_run_id
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import digest
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import ConfigError, IdentityError

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.run_file import RunFile

_warn_once = WarnOnce(logging.getLogger(__name__))


def identity_of(asked: Asked, who: Detection, number: int, run_file: RunFile | None) -> Identity:
    """Return the identity of a call that opens a run, the same on all ranks that have the run.

    Args:
        asked: What the call asks for.
        who: This process.
        number: The number of the call among those of the tracker in this process.
        run_file: The file of `run_file=`; None without one.

    Raises:
        ConfigError: What the user has chosen cannot be an id.
        IdentityError: The ranks cannot agree on one; or this job has a role, and nothing says in which run.
    """
    for source, is_counted in _SOURCES:
        identity = source(asked, who, run_file)
        if identity is None:
            continue
        if not is_counted or identity.base_id is None or number == 1:
            return identity
        # The second call in one process gets its own run, so that it cannot hide a failure of the first.
        return Identity(f"{identity.base_id}-{number}", identity.group)
    return Identity(None)


# What the user chooses


def _of_service(asked: Asked, _: Detection, __: RunFile | None) -> Identity | None:
    """The next trial of a sweep."""
    run_id = asked.tracker.forced_run_id()
    return None if run_id is None else Identity(run_id)


def _of_argument(asked: Asked, _: Detection, __: RunFile | None) -> Identity | None:
    """`id=`."""
    return None if asked.config.id is None else Identity(asked.config.id)


def _of_variable(asked: Asked, who: Detection, run_file: RunFile | None) -> Identity | None:
    """The tracker's own, as `WANDB_RUN_ID`. Nothing behind it says which run another job has, that a role joins."""
    config, names = asked.config, asked.tracker.run_id_variables
    variable = next((name for name in names if os.environ.get(name, "").strip()), None)
    if variable is not None:
        run_id = os.environ[variable]
        try:
            asked.tracker.check(replace(config, id=run_id, run_file=None))
        except ConfigError as error:
            raise ConfigError(f"{error}. The id is from {variable}") from None
        check_run_id(variable, run_id)
        if run_file is not None and run_file.find() != run_id:  # it is locked, and has this run from now on
            run_file.earlier = 0
        identity = Identity(run_id)
        return identity if who.parent is None or config.role is not None else _beside(asked, who, identity)
    if config.role is not None and asked.world.is_real:
        variables = "".join(f", or set {name}" for name in names[:1])
        raise IdentityError(
            f"role={config.role!r} joins the run of another job, and nothing says which: pass id=..., that of the job "
            f"with roles=[...]{variables}; or call this task from the task that has roles=[...]"
        )
    return None


def _of_run_file(_: Asked, who: Detection, run_file: RunFile | None) -> Identity | None:
    """An earlier job with the same `run_file=`."""
    run_id = None if run_file is None else run_file.find()
    if run_id is not None and who.pool is None:
        start_in(outer_job(os.environ), who.info)  # the next start in the job has the next number
    return None if run_id is None else Identity(run_id)


# What is given


def _of_platform(asked: Asked, who: Detection, _: RunFile | None) -> Identity | None:
    """Flyte's execution of the task."""
    context = asked.context
    if context.base_id is None:
        return None
    identity = Identity(context.base_id, context.group)
    return _beside(asked, who, identity) if who.is_child and asked.world.is_real else identity


def _of_trial(_: Asked, who: Detection, __: RunFile | None) -> Identity | None:
    """A trial of Ray Tune. Its name is the same when Ray starts it again."""
    trial = None if who.pool is None else who.pool.trial
    return None if trial is None else Identity(readable(trial.name, digest(trial.experiment)), group=trial.name)


def _of_parent(asked: Asked, who: Detection, _: RunFile | None) -> Identity | None:
    """The rank that has started this process."""
    return None if who.parent is None else _beside(asked, who, identity_of_parent(who.parent, os.environ))


def _of_ranks(asked: Asked, who: Detection, _: RunFile | None) -> Identity | None:
    """The launcher, or what the ranks agree on."""
    if who.info is None:
        return None
    is_shared = needs_shared_id(who.info, asked.config.run_mode, asked.config.rank_scope)
    identity = Identity(None)
    if is_shared or asked.tracker.resumes(asked.config):
        identity = from_launcher(who.info, os.environ, agreement=is_shared, in_pool=who.pool is not None)
    children.mark(who.variables, identity.base_id)
    return identity


def _of_program(asked: Asked, who: Detection, _: RunFile | None) -> Identity | None:
    """This start of a program in a batch job."""
    is_program = who.pool is None and asked.tracker.resumes(asked.config)
    identity = identity_of_program(os.environ) if is_program else Identity(None)
    children.mark(who.variables, identity.base_id)
    return identity


# The first that holds counts. With each, whether each call of a process has an id of its own.
_SOURCES = (
    (_of_service, False),
    (_of_argument, False),
    (_of_variable, False),
    (_of_run_file, False),
    (_of_platform, True),
    (_of_trial, True),
    (_of_parent, False),
    (_of_ranks, True),
    (_of_program, True),
)


def _beside(asked: Asked, who: Detection, identity: Identity) -> Identity:
    """Return an identity for a process that a rank has started: the rank's run, `identity`, is not its run."""
    own_id = None if identity.base_id is None else f"{identity.base_id}-{os.urandom(3).hex()}"
    _warn_once(
        "child",
        "%s: this process was started by %s that has run %s, and is not that rank: its own run is %s. Each further "
        "call here has a run of its own too",
        asked.tracker.name,
        "the process" if who.parent is None else f"rank {who.parent.rank}",
        identity.base_id or "(not known here)",
        own_id or "a new one",
    )
    return Identity(own_id, identity.group)
