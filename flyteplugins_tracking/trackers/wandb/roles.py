"""W&B runs with several writers: which jobs may write to one, what each tells, and which of its rows have arrived.

All writers of such a run are in W&B's own shared mode. They are the ranks of a job with `run_mode="shared"`, the tasks
of a Flyte task, and the jobs with `roles=` and `role=`: one owner, which the run ends with, and its roles.

W&B gives the rows of all writers one step counter, so that a step does not tell a row. So each process numbers its
rows, in the column `roles/NAME/row` of its role: 25 random bits, then a count. They are kept in journals until the
process has ended its part of the run. The next attempt of the role asks which of the numbers have arrived, and logs
the other rows again, with the same numbers: see `sender`.

It is not known whether W&B merges the configs, the definitions of columns and the summaries of writers, or keeps those
of the last one. So each writer passes the config of all, and defines the columns of all roles. What must not be lost
is a row too: `roles/NAME/state`, `roles/NAME/exit_code` and `roles/NAME/config`.

What a process logs arrives in that order: wandb-core sends one request after the other. So the last one of its own
rows that W&B has tells that it has all before that, and a look at the run's last rows is enough. The summary does not
tell it: wandb-core may send that before the rows that it is of.

A role's end does not end the run. If it comes after the owner's end, W&B shows the run as running again: then the role
ends it once more, with the owner's exit code. W&B's answers may be seconds old. One that has the role's own last row
has the owner's end too, if that came before.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import status_of
from flyteplugins_tracking.trackers.config import OWNER, ROLES, own_values, roles_error
from flyteplugins_tracking.trackers.outbox import pauses
from flyteplugins_tracking.trackers.vendor_parts import known_faults
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.attempts import LATE_S, Place
from flyteplugins_tracking.trackers.wandb.names import forced_run_id
from flyteplugins_tracking.trackers.wandb.vendor import Stored

logger = logging.getLogger(__name__)

# The run's attribute that holds the step of a role's first row.
NEXT_STEP = "_flyteplugins_tracking_next_step"
# How long a question to W&B may take, at least, and a shorter time, in seconds.
_ASK_S, _POLL_S = 5.0, 0.5
# The same after an ordinary end: without an answer, W&B may show a run as running that has ended.
_END_ASK_S = 15.0
# The same where less time is left, and for a run with one writer; and how long it may take to end a run again.
_SHORT_ASK_S, _END_AGAIN_S = 2.0, 5
# When nothing is as late as `LATE_S`, in seconds.
_OLD_S = 12.0


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
    config, role, has_others = request.config, request.plan.role, request.has_other_writers
    is_chosen = config.id is not None or ("WANDB_RUN_ID" in os.environ and forced_run_id() is None)
    if request.plan.run_id is None or not (has_others or (is_chosen and not any(known_faults("wandb")))):
        return None  # with such a fault, a process with one writer does without `wandb.Api`
    reader, waits = vendor.Reader(place), pauses()
    while True:
        left_s = request.deadline - time.monotonic()
        # The rest of the time is for the opening, and for another look if an answer is lost.
        part_s = max(_ASK_S, left_s / 2) if has_others else max(_SHORT_ASK_S, left_s / 3)
        found, missing = None, missing_run_error(request, place.server)
        try:
            found = reader.stored(max(_POLL_S, min(part_s, left_s)))
        except TrackerUnavailableError as error:
            if not error.is_outage and role is None:  # the opening says so
                return None
            if not error.is_outage:
                raise missing_run_error(request, place.server, str(error)) from error
            missing = error
        if found is not None:
            check_roles(request, own_values(found.config).get(ROLES), found.config)
        left_s = request.deadline - time.monotonic()
        if found is not None or role is None:
            return found
        if left_s < _POLL_S:
            raise missing
        time.sleep(min(next(waits), left_s - _POLL_S / 2))


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
    if known is None and role is not None:
        text = f"it has one writer, its own job. Pass roles=[{role!r}] in that job, and another id in both"
        raise ConfigError(f"{run} cannot be joined by role={role!r}: {text}")
    if known is None and config.roles is not None:
        text = "it exists, and has one writer: pass another id, or leave out roles="
        raise ConfigError(f"{run} cannot have roles={list(config.roles)}: {text}")
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
    why = (
        f" within init_timeout_s={config.init_timeout_s:g}: the job with roles=[...] and the same id has not opened "
        "it, or the server does not answer or does not let this job's key read it. Start that job, or pass a longer "
        "init_timeout_s."
    )
    return TrackerUnavailableError(
        f"W&B: role {config.role!r} has not found run {request.plan.run_id} of project "
        f"{config.project or '(the default)'} at {place}{f': {refusal}' if refusal else why}",
        is_outage=False,
    )


def config_beside(request: RunRequest, found: Stored, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with which a role or another rank opens the run: that of all writers, and its own over it."""
    if request.plan.role is not None:  # what its earlier attempts have set stays
        config = {name: {**found.config.get(name, {}), **section} for name, section in config.items()}
    return {**found.config, **config}


# The open run


class Writer:
    """This job's part of a run with roles, on the rank that speaks for it."""

    def __init__(
        self,
        run: Any,
        request: RunRequest,
        log: Callable[[Mapping[str, Any]], int],
        define: Callable[..., object],
        next_step: Callable[[], int | None],
    ) -> None:
        """Define the columns of all roles, and tell that this one is running.

        Args:
            run: The open run.
            request: The decorator's request for it.
            log: Logs a row with these keys. Returns its number.
            define: Defines a column, as the run's method: again when what is kept is sent with another wandb-core.
            next_step: Returns the step of the role's next row; None for the owner.
        """
        # If the run's owner had ended it, it is running again since then.
        self._opened_at = time.monotonic()
        self._next_step = next_step
        self._run, self._request, self._log = run, request, log
        self._role, self._name = request.plan.role, name_of(request)
        known = own_values(run.config).get(ROLES)
        self._roles = [str(name) for name in known] if isinstance(known, list) else []
        _define(define, [*self._roles, *filter(None, [self._role])])
        self._told: Any = None  # the role's config in the last row that has it
        self.tell("running", {})

    def tell(self, state: str, more: Mapping[str, Any]) -> None:
        """Log the state of the role, and its config if that has changed: another writer may replace that of the run."""
        values = {"state": state, **more}
        if (next_step := self._next_step()) is not None:
            values["next_step"] = next_step
        section = dict(self._run.config).get(self._role) if self._role is not None else None
        if section and section != self._told:
            self._told, values["config"] = section, json.dumps(section, default=str)
        self._last_row = self._log({f"roles/{self._name}/{key}": value for key, value in values.items()})

    def end(self, exit_code: int) -> None:
        """Log the role's end, and pass what the configs of other writers have: W&B may keep the last one only."""
        self.tell(status_of(exit_code), {"exit_code": exit_code})
        found = None if self._run.offline else vendor.stored_run(Place.of(self._run), _ask_s(exit_code))
        if found is not None:
            current = dict(self._run.config)
            others = {key: value for key, value in found.config.items() if not self._is_own(key, current)}
            if others:
                vendor.update_config(self._run, others)

    def _is_own(self, key: str, current: Mapping[str, Any]) -> bool:
        return key == self._role if self._role is not None else key in current and key not in self._roles

    def after_end(self, exit_code: int) -> None:
        """End the run again, if the owner had ended it before this role's last rows."""
        if self._role is None or self._run.offline:
            return
        wait_s = 0.0 if exit_code in (INTERRUPTED, TERMINATED) else LATE_S
        is_recent = time.monotonic() < self._opened_at + _OLD_S
        # An answer from before the opening would not have the owner's end.
        end_again(Place.of(self._run), self._role, _ask_s(exit_code), self._last_row if is_recent else None, wait_s)


def _ask_s(exit_code: int) -> float:
    return _END_ASK_S if exit_code == 0 else _SHORT_ASK_S


def _define(define: Callable[..., object], roles: Sequence[str]) -> None:
    """Define the columns of all roles, and hide their steps and the numbers of their rows."""
    define(outbox.column_of(None), hidden=True)
    for role in dict.fromkeys(roles):
        define(outbox.column_of(role), hidden=True)
        define(_next_step_column(role), hidden=True)
        define(f"{role}/step", hidden=True)
        define(f"{role}/*", step_metric=f"{role}/step")


def leave_summary_to_roles(request: RunRequest, run: Any) -> None:
    """Remove from the summary what roles have set: W&B gives it to an owner that resumes, which would send it again."""
    if request.config.roles is None or not run.resumed:
        return
    keys = list(run.summary.keys())
    names = {key.split("/")[1] for key in keys if key.startswith("roles/")} - {OWNER}
    for key in keys:
        if key.removeprefix("roles/").partition("/")[0] in names:
            del run.summary[key]


def end_again(
    place: Place, role: str, ask_s: float = _END_ASK_S, last_row: int | None = None, wait_s: float = 0.0
) -> None:
    """End a run as its owner has ended it, if it is shown as running only because a role has written to it since.

    Args:
        place: The run.
        role: The role.
        ask_s: How long a question may take.
        last_row: The number of the role's last row, if an answer that lacks it may be too old.
        wait_s: How long to wait for an answer that has it.
    """
    try:
        found, is_fresh = _fresh(place, role, ask_s, last_row, wait_s)
        exit_code = threads.call_within(ask_s, _exit_code_of_owner, found)
        if exit_code is None and not is_fresh:
            raise TrackerUnavailableError(f"W&B does not show the last row of role {role!r} yet")
        if exit_code is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            limits = {"init_timeout": _END_AGAIN_S, "finish_timeout": _END_AGAIN_S}
            run = vendor.open_to_send(place, {}, folder, {**shared_settings(role, ends_run=True), **limits})
            _define(
                run.define_metric,
                [name for name in (*own_values(found.config).get(ROLES, ()), role) if isinstance(name, str)],
            )
            if exit_code == TERMINATED:
                run.mark_preempting()
            run.finish(exit_code=exit_code)
    except Exception:  # tracker errors must not change the training's outcome
        text = "W&B: run %s may be shown as running if its owner has ended it: W&B did not answer at role %r's end"
        logger.warning(text, place.run_id, role, exc_info=True)


def _fresh(place: Place, role: str, ask_s: float, last_row: int | None, wait_s: float) -> tuple[Stored, bool]:
    """Return what W&B has of the run, and whether that is new enough. Asks again if it is not.

    Raises:
        TrackerUnavailableError: W&B does not say.
    """
    reader, waits, deadline = vendor.Reader(place), pauses(), time.monotonic() + wait_s
    while True:
        found = reader.stored(ask_s)
        if found is None:
            raise TrackerUnavailableError("W&B does not say whether the run has ended")
        columns = outbox.column_of(role), f"roles/{role}/state"
        if last_row is None or last_row in threads.call_within(ask_s, found.values, *columns):
            return found, True
        if time.monotonic() > deadline:
            return found, False
        time.sleep(next(waits))


def shared_settings(role: str, *, ends_run: bool) -> dict[str, Any]:
    """Return the settings of a client that writes to a run with roles for a moment."""
    return {"x_label": role, "x_primary": False, "x_update_finish_state": ends_run}


def _exit_code_of_owner(found: Stored) -> int | None:
    """Return the exit code of a run whose owner has ended it, and that is shown as running; None for another run."""
    if found.state != "running":
        return None
    states, codes = (found.values(f"roles/{OWNER}/{key}") for key in ("state", "exit_code"))
    return int(codes[-1]) if codes and states and states[-1] != "running" else None


def next_step(role: str, known: Stored | None, sent: Mapping[str, Any], timeout_s: float) -> int:
    """Return the step of a role's next row.

    Args:
        role: The role.
        known: What W&B has of the run. Its summary may be another writer's alone.
        sent: The last values of rows that earlier attempts have left.
        timeout_s: How long W&B may be asked, in seconds.
    """
    summary = {} if known is None else known.summary
    columns = (f"{role}/step", 1), (_next_step_column(role), 0)
    found = [(values.get(name), more) for values in (summary, sent) for name, more in columns]
    steps = [value + more for value, more in found if isinstance(value, (int, float)) and math.isfinite(value)]
    with suppress(Exception):  # W&B does not say
        for column, more in columns if known is not None and not steps else ():
            assert known is not None
            steps += [more + value for value in threads.call_within(timeout_s, known.values, column)]
    return int(max(steps, default=0))


def _next_step_column(role: str) -> str:
    return f"roles/{role}/next_step"
