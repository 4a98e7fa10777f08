"""W&B runs with several writers: which jobs may write to one, what each tells, and which of its rows have arrived.

All writers of such a run are in W&B's own shared mode. They are the nodes of a job with `run_mode="shared"`, the tasks
of a Flyte task, and the jobs with `roles=` and `role=`: one owner, which the run ends with, and its roles.

W&B gives the rows of all writers one step counter, so that a step does not tell a row. So each process numbers its
rows, in the column `roles/NAME/row` of its role: 21 random bits, then a count. They are kept in journals until the
process has ended its part of the run. The next attempt of the role asks which of the numbers have arrived, and logs
the other rows again, with the same numbers.

It is not known whether W&B merges the configs, the definitions of columns and the summaries of writers, or keeps those
of the last one. So each writer passes the config of all, and defines the columns of all roles. What must not be lost
is a row too: `roles/NAME/state`, `roles/NAME/exit_code` and `roles/NAME/config`.

A role's end does not end the run. If it comes after the owner's end, W&B shows the run as running again: then the role
ends it once more, with the owner's exit code.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import check_roles, missing_run_error, status_of
from flyteplugins_tracking.trackers.config import OWNER, ROLES, own_values
from flyteplugins_tracking.trackers.vendor_parts import known_faults
from flyteplugins_tracking.trackers.wandb import forced_run_id, outbox, vendor
from flyteplugins_tracking.trackers.wandb.datastore import Row, rows
from flyteplugins_tracking.trackers.wandb.outbox import AttemptOnDisk, Left, Place, WandbOutbox
from flyteplugins_tracking.trackers.wandb.run import update_config
from flyteplugins_tracking.trackers.wandb.vendor import Stored

logger = logging.getLogger(__name__)

# The run's attribute that holds the step of a role's first row.
NEXT_STEP = "_flyteplugins_tracking_next_step"
# How many bits of a row's number are its count. A number has at most 53, as a float of JSON.
_COUNT_BITS, _RANDOM_BITS = 32, 21
# How long a question to W&B may take, and how often a role asks for its run, in seconds.
_ASK_S, _POLL_S = 5.0, 0.5
# The same where less time is left, and for a run with one writer; and how long it may take to end a run again.
_SHORT_ASK_S, _END_AGAIN_S = 2.0, 5
# How long rows may take to be found after their process was killed, in seconds: W&B counts 2 to 4 s late.
_LATE_S = 6.0


def name_of(request: RunRequest) -> str:
    """Return the writer's name in the run."""
    return request.plan.role or OWNER


def role_of(column: str) -> str:
    """Return the writer's name in the column with the numbers of its rows."""
    return column.split("/")[1]


def row_numbers() -> Iterator[int]:
    """Return the numbers of one process's rows. No other process has one of them."""
    return itertools.count(secrets.randbits(_RANDOM_BITS) << _COUNT_BITS)


# Before the run is opened


def look_up(request: RunRequest, place: Place, *, has_writers_elsewhere: bool) -> Stored | None:
    """Return what W&B has of a run that this job may write to; None if that is not known. A role waits for its run.

    Raises:
        ConfigError: The run has one writer, and this job is to share it; or it has roles, and this job is none.
        TrackerUnavailableError: A role has waited `init_timeout_s` for its run.
    """
    config, role = request.config, request.plan.role
    is_chosen = config.id is not None or ("WANDB_RUN_ID" in os.environ and forced_run_id() is None)
    if request.plan.run_id is None or not (has_writers_elsewhere or (is_chosen and not any(known_faults("wandb")))):
        return None  # with such a fault, a process with one writer does without `wandb.Api`
    while True:
        left_s = request.deadline - time.monotonic()
        limit_s = max(_POLL_S, min(_ASK_S if has_writers_elsewhere else _SHORT_ASK_S, left_s))
        found = vendor.stored_run(place, limit_s)
        if found is not None:
            check_roles(request, "W&B", own_values(found.config).get(ROLES), found.config)
        if found is not None or role is None:
            return found
        if left_s < _POLL_S:
            raise missing_run_error(request, "W&B", place.server)
        time.sleep(_POLL_S)


def config_beside(request: RunRequest, found: Stored, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with which a role or another node opens the run: that of all writers, and its own over it."""
    if request.plan.role is not None:  # what its earlier attempts have set stays
        config = {name: {**found.config.get(name, {}), **section} for name, section in config.items()}
    return {**found.config, **config}


# The open run


class Writer:
    """This job's part of a run with roles, on the rank that speaks for it."""

    def __init__(
        self, run: Any, request: RunRequest, log: Callable[[Mapping[str, Any]], object], define: Callable[..., object]
    ) -> None:
        """Define the columns of all roles, and tell that this one is running.

        Args:
            run: The open run.
            request: The decorator's request for it.
            log: Logs a row with these keys.
            define: Defines a column, as the run's method: again when the run is opened again.
        """
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
        section = dict(self._run.config).get(self._role) if self._role is not None else None
        if section and section != self._told:
            self._told, values["config"] = section, json.dumps(section, default=str)
        self._log({f"roles/{self._name}/{key}": value for key, value in values.items()})

    def end(self, exit_code: int) -> None:
        """Log the role's end, and pass what the configs of other writers have: W&B may keep the last one only."""
        self.tell(status_of(exit_code), {"exit_code": exit_code})
        found = None if self._run.offline else vendor.stored_run(Place.of(self._run), _ask_s(exit_code))
        if found is not None:
            current = dict(self._run.config)
            others = {k: v for k, v in found.config.items() if not self._is_own(k, current) and current.get(k) != v}
            if others:
                update_config(self._run, others)

    def _is_own(self, key: str, current: Mapping[str, Any]) -> bool:
        return key == self._role if self._role is not None else key in current and key not in self._roles

    def after_end(self, exit_code: int) -> None:
        """End the run again, if the owner had ended it before this role's last rows."""
        if self._role is not None and not self._run.offline:
            end_again(Place.of(self._run), self._role, _ask_s(exit_code))


def _ask_s(exit_code: int) -> float:
    return _ASK_S if exit_code == 0 else _SHORT_ASK_S


def _define(define: Callable[..., object], roles: Sequence[str]) -> None:
    """Define the columns of all roles, and hide their steps and the numbers of their rows."""
    define(outbox.column_of(None), hidden=True)
    for role in dict.fromkeys(roles):
        define(outbox.column_of(role), hidden=True)
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


def end_again(place: Place, role: str, ask_s: float = _ASK_S) -> None:
    """End a run as its owner has ended it, if it is shown as running only because a role has written to it since."""
    try:
        found = vendor.stored_run(place, ask_s)
        if found is None:
            raise TrackerUnavailableError("W&B does not say whether the run has ended")
        exit_code = threads.call_within(ask_s, _exit_code_of_owner, found)
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


def shared_settings(role: str, *, ends_run: bool) -> dict[str, Any]:
    """Return the settings of a client that writes to a run with roles for a moment."""
    return {"x_label": role, "x_primary": False, "x_update_finish_state": ends_run}


def _exit_code_of_owner(found: Stored) -> int | None:
    """Return the exit code of a run whose owner has ended it, and that is shown as running; None for another run."""
    if found.state != "running":
        return None
    states, codes = (found.values(f"roles/{OWNER}/{key}") for key in ("state", "exit_code"))
    return int(codes[-1]) if codes and states and states[-1] != "running" else None


# What earlier attempts have left


def column_in(attempt: AttemptOnDisk) -> str | None:
    """Return the column with the numbers of an attempt's rows; None if they have none."""
    headers = [journal.header.get("column") for journal in attempt.journals]
    known = next((str(column) for column in headers if column), None)
    if known is None and (first := next(iter(rows(attempt.directory)), None)) is not None:
        known = next((key for key in first.values if key.startswith("roles/") and key.endswith("/row")), None)
    return known


class NumberedRows:
    """The numbered rows that attempts of one role have left on this disk.

    Attributes:
        left: The attempts.
        since: A step of the run that it had before their first row.
        last_step: The role's last step in the rows that were read; -1 for none.
    """

    def __init__(self, left: Left, column: str) -> None:
        """`column` is that of the rows' numbers."""
        self.left, self._column = left, column
        self.attempts = [*left.online, *left.offline]
        journals = itertools.chain.from_iterable(attempt.journals for attempt in self.attempts)
        self.since = min((int(journal.header.get("since") or 0) for journal in journals), default=0)
        self.last_step = -1

    def await_late(self, deadline: float = math.inf) -> None:
        """Wait until rows are to be found that wandb-core has sent before it ended, at most until `deadline`."""
        logs = itertools.chain.from_iterable(one.directory.rglob("debug-internal.log") for one in self.attempts)
        age_s = min(map(outbox.age_s, logs), default=_LATE_S)
        time.sleep(max(0.0, min(_LATE_S - age_s, deadline - time.monotonic())))

    def lacking(self, arrived: Collection[int]) -> Iterator[Row]:
        """Yield the rows whose numbers are not among those that have arrived. Each is yielded once."""
        seen = set(arrived)
        for row in itertools.chain.from_iterable(map(_rows_of, self.attempts)):
            number, step = (row.values.get(key) for key in (self._column, f"{role_of(self._column)}/step"))
            if isinstance(step, (int, float)):
                self.last_step = max(self.last_step, int(step))
            if isinstance(number, (int, float)) and int(number) not in seen:
                seen.add(int(number))
                yield row._replace(step=-1)


def _rows_of(attempt: AttemptOnDisk) -> Iterator[Row]:
    if outbox.is_offline(attempt.directory):
        yield from rows(attempt.directory)
    for journal in attempt.journals:
        yield from outbox.rows_of(journal, 0)


def send_left(request: RunRequest, run: Any, known: Stored | None) -> None:
    """Log again what earlier attempts of this role have left on this disk, and W&B lacks.

    Args:
        request: The decorator's request for the run.
        run: The open run, before its methods are guarded. It gets the step of the role's first row.
        known: What W&B had of it before it was opened.
    """
    column = outbox.of(run).column
    last = None if known is None else known.summary.get(f"{request.plan.role}/step")
    steps = [int(last)] if isinstance(last, (int, float)) else [-1]
    node = request.plan.label if request.config.run_mode == "shared" else None
    # Tasks that continue a run may be several on one disk: what they have left is sent by the task that calls them.
    if column is not None and not run.offline and (request.plan.primary or node is not None):
        steps.append(_send_left(outbox.of(run), column, node, request.deadline))
    vars(run)[NEXT_STEP] = 1 + max(steps)


def _send_left(made: WandbOutbox, column: str, node: str | None, deadline: float) -> int:
    def is_to_send(attempt: AttemptOnDisk) -> bool:
        if not attempt.journals or attempt.node != node or column_in(attempt) != column:
            return False
        return not outbox.is_offline(attempt.directory) or outbox.was_automatic(attempt)

    def left_s() -> float:
        return max(_POLL_S, deadline - time.monotonic())

    parent, last_step = made.directory.parent, -1
    try:
        # Two processes may have one role, by mistake: only one of them sends what the role has left.
        with locked(parent / f"{made.place.run_id}.{node or role_of(column)}.lock", left_s()):
            found = NumberedRows(Left(made.place, parent, is_to_send), column)
            if not found.attempts:
                return -1
            made.keep_since(found.since)
            found.await_late(deadline)
            arrived = threads.call_within(left_s(), numbers_at, made.place, column, found.since)
            count = len(made.send_rows(found.left, found.lacking(arrived)))
        last_step = found.last_step
    except Exception:  # tracker errors must not change the training's outcome
        text = "W&B: run %s: the rows that an earlier attempt has left in %s could not be sent"
        logger.warning(text, made.place.run_id, parent, exc_info=True)
        return last_step
    if count:
        text = "W&B: run %s: sent %d rows that earlier attempts had logged, and W&B lacked, from %s"
        logger.warning(text, made.place.run_id, count, parent)
    return last_step


def numbers_at(place: Place, column: str, since: int) -> set[int]:
    """Return the numbers of a role's rows that W&B has, from a step of the run on.

    Raises:
        TrackerUnavailableError: W&B does not say.
    """
    found = vendor.stored_run(place, _ASK_S)
    if found is None:
        raise TrackerUnavailableError(f"W&B does not say which rows it has of run {place.run_id}")
    return {int(number) for number in found.all_values(column, since)}
