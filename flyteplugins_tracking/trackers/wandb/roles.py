"""W&B runs with several writers: which jobs may write to one, what each tells, and which of its rows have arrived.

All writers of such a run are in W&B's own shared mode. They are the ranks of a job with `run_mode="shared"`, the tasks
of a Flyte task, and the jobs with `roles=` and `role=`: one owner, which the run ends with, and its roles.

W&B gives the rows of all writers one step counter, so that a step does not tell a row. So each process numbers its
rows, in the column `roles/NAME/row` of its role: 25 random bits, then a count. They are kept in journals until the
process has ended its part of the run. The next attempt of the role asks which of the numbers have arrived, and logs
the other rows again, with the same numbers: see `sender`.

It is not known whether W&B merges the configs, the definitions of columns and the summaries of writers, or keeps those
of the last one. So each writer passes the config that it finds, and defines the columns of all roles. What must not be
lost is a row too: `roles/NAME/state`, `roles/NAME/exit_code`, and the config with which a role has begun.

What a process logs arrives in that order: wandb-core sends one request after the other. So the last one of its own
rows that W&B has tells that it has all before that, and a look at the run's last rows is enough. The summary does not
tell it: wandb-core may send that before the rows that it is of.

A role's end does not end the run. If it comes after the owner's end, W&B shows the run as running again: then the role
ends it once more, with the owner's exit code. W&B's answers are 2 to 4 s old, so that the role waits before it asks.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.config import OWNER, ROLES, own_values, roles_error
from flyteplugins_tracking.trackers.outbox import pauses
from flyteplugins_tracking.trackers.vendor_parts import known_faults
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.attempts import LATE_S, Place
from flyteplugins_tracking.trackers.wandb.names import forced_run_id
from flyteplugins_tracking.trackers.wandb.vendor import Stored

logger = logging.getLogger(__name__)

# How long a question to W&B may take, and how long each half of ending a run again, in seconds.
_ASK_S, _END_AGAIN_S = 5.0, 5


def name_of(request: RunRequest) -> str:
    """Return the writer's name in the run."""
    return request.plan.role or OWNER


def role_of(column: str | None) -> str:
    """Return the writer's name in the column with the numbers of its rows; the owner's if there is none."""
    return OWNER if column is None else column.split("/")[1]


# Before the run is opened


def look_up(request: RunRequest, place: Place) -> Stored | None:
    """Return what W&B has of a run that this job may write to; None if that is not known. A role waits for its run.

    Raises:
        ConfigError: The run has one writer, and this job is to share it; or it has roles, and this job is none.
        TrackerUnavailableError: A role has waited `init_timeout_s` for its run, or W&B does not take its key.
    """
    config, role = request.config, request.plan.role
    is_chosen = config.id is not None or ("WANDB_RUN_ID" in os.environ and forced_run_id() is None)
    if request.plan.run_id is None or not (request.has_other_writers or (is_chosen and not any(known_faults("wandb")))):
        return None  # with such a fault, a process with one writer does without `wandb.Api`
    reader, waits = vendor.Reader(place), pauses()
    while True:
        # The rest of the time is for the opening, and for another look if an answer is lost.
        part_s = max(_ASK_S, (request.deadline - time.monotonic()) / 2)
        try:
            found, missing = reader.stored(part_s), missing_run_error(request, place.server)
        except TrackerUnavailableError as error:
            if role is None:  # the opening says so
                return None
            if not error.is_outage:
                raise missing_run_error(request, place.server, str(error)) from error
            found, missing = None, error
        if found is not None:
            check_roles(request, own_values(found.config).get(ROLES), found.config)
        if found is not None or role is None:
            return found
        if time.monotonic() > request.deadline:
            raise missing
        time.sleep(next(waits))


def check_roles(request: RunRequest, known: Any, found: Mapping[str, Any]) -> None:
    """Refuse to open a run that exists, if this job must not write to it.

    Args:
        request: The decorator's request for the run.
        known: The roles that the run's owner has named; None for a run without roles.
        found: The run's config, in which a role has its section.

    Raises:
        ConfigError: The run has one writer, and this job is to share it; or it has roles, and this job is none, or one
            with the name of a key of the owner's config.
    """
    config, role, run = request.config, request.plan.role, f"W&B: run {request.plan.run_id}"
    if known is None and config.has_roles:
        text = "it exists, and has one writer. Pass roles=[...] in the job that makes the run, and another id in all"
        raise ConfigError(f"{run} cannot be shared by jobs with roles: {text}")
    names = [str(name) for name in known] if isinstance(known, (list, tuple)) else []
    is_joined = request.info is None and not request.plan.primary  # by a task that a task with roles has called
    if known is not None and not config.has_roles and not is_joined:
        raise roles_error(run, ", ".join(names) or "none named")
    if role is not None and not isinstance(found.get(role, {}), Mapping):
        raise ConfigError(f"{run} cannot be joined by role={role!r}: its config has this key. Use another name")


def missing_run_error(request: RunRequest, place: str, refusal: str = "") -> TrackerUnavailableError:
    """Return the error for a role that has not found its run.

    Args:
        request: The decorator's request for the run.
        place: Where it was looked for.
        refusal: Why the service does not let this job look; empty if the owner has not opened the run in time.
    """
    config = request.config
    why = refusal or (
        f"within init_timeout_s={config.init_timeout_s:g}, the job with roles=[...] and the same id has not opened "
        "it, or the server does not answer or does not let this job's key read it. Start that job, or pass a longer "
        "init_timeout_s."
    )
    return TrackerUnavailableError(
        f"W&B: role {config.role!r} has not found run {request.plan.run_id} of project "
        f"{config.project or '(the default)'} at {place}: {why}",
        is_outage=False,
    )


def config_beside(request: RunRequest, found: Stored, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with which a role or another rank opens the run: that of all writers, and its own over it."""
    if request.plan.role is not None:  # what its earlier attempts have set stays
        config = {name: {**found.config.get(name, {}), **section} for name, section in config.items()}
    return {**found.config, **config}


# The open run


def define_columns(run: Any, role: str | None) -> None:
    """Define the columns of all roles, and hide their steps and the numbers of their rows.

    Args:
        run: The open run, before its methods are guarded.
        role: The role; None for the owner.
    """
    known, define = own_values(run.config).get(ROLES), run.define_metric
    define(outbox.column_of(None), hidden=True)
    for name in dict.fromkeys([*(known if isinstance(known, list) else []), *filter(None, [role])]):
        define(outbox.column_of(name), hidden=True)
        define(f"{name}/step", hidden=True)
        define(f"{name}/*", step_metric=f"{name}/step")


def end_again(place: Place, role: str, waits: bool = False) -> None:
    """End a run as its owner has ended it, if it is shown as running only because a role has written to it since.

    Args:
        place: The run.
        role: The role.
        waits: Whether to wait until W&B's answers have what was sent just now.
    """
    try:
        time.sleep(LATE_S if waits else 0)
        exit_code = _exit_code_of_owner(place)
        if exit_code is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            limits = {"init_timeout": _END_AGAIN_S, "finish_timeout": _END_AGAIN_S}
            run = vendor.open_to_send(place, {}, folder, {**shared_settings(role, ends_run=True), **limits})
            if exit_code == TERMINATED:
                run.mark_preempting()
            run.finish(exit_code=exit_code)
    except Exception:  # tracker errors must not change the training's outcome
        text = "W&B: run %s may be shown as running if its owner has ended it: W&B did not answer at role %r's end"
        logger.warning(text, place.run_id, role, exc_info=True)


def _exit_code_of_owner(place: Place) -> int | None:
    """Return the exit code of a run whose owner has ended it, and that is shown as running; None for another run.

    Raises:
        TrackerUnavailableError: W&B does not say.
    """
    found = vendor.Reader(place).stored(_ASK_S)
    if found is None:
        raise TrackerUnavailableError("W&B does not say whether the run has ended")
    if found.state != "running":
        return None
    states, codes = (
        threads.call_within(_ASK_S, found.values, f"roles/{OWNER}/{key}") for key in ("state", "exit_code")
    )
    return int(codes[-1]) if codes and states and states[-1] != "running" else None


def shared_settings(role: str, *, ends_run: bool) -> dict[str, Any]:
    """Return the settings of a client that writes to a run with roles for a moment."""
    return {"x_label": role, "x_primary": False, "x_update_finish_state": ends_run}
