"""The goodput of a run: the share of its time that has made steps which were kept, over all attempts of its job.

The steps come from `should_stop(step)`, or from the rows: their `step=`, or the column of steps. What the attempts have
made is kept in the run itself, at its service, where the next attempt reads it. It is saved with rows and steps, so
that an attempt which is killed is known too, but for its last seconds.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import numbers
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking._util.warn_once import WarnOnce

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)

# How long after a save the next one is due: as long as the attempt has lasted, within these limits. So an attempt that
# is killed early is known by half of its time at least.
_SHORTEST_S, _LONGEST_S = 0.1, 15.0
# An older attempt is forgotten: a tag of MLflow's has 5,000 characters.
_MOST_ATTEMPTS = 50
# How long a signal waits for a save: an exception out of its handler is the function's, and not a failure to save.
_PATIENCE_S = 1.0


class Attempt(NamedTuple):
    """One attempt of the job.

    Attributes:
        began_at: When it was first seen to make a step, in seconds since the epoch: its first step is made. For an
            attempt that does not tell its steps, when it logged its first row.
        ended_at: When it was last seen to make a step, or its last row.
        first_step: The first step; None if it does not tell its steps.
        last_step: The last step.
    """

    began_at: float
    ended_at: float
    first_step: float | None
    last_step: float | None


class Attempts(PerProcess):
    """The attempts of a run. This process makes the last one. The `steps` of a `RunRequest`."""

    def __init__(self, step_metric: str) -> None:
        """Initialize an attempt without a step.

        Args:
            step_metric: The column in which rows without `step=` may have it.
        """
        self.continues = False  # whether another attempt shall follow, even if this one succeeds
        self._column = step_metric
        self._handle: Handle | None = None
        self._warn_once = WarnOnce(logger)
        self._to_epoch = time.time() - time.monotonic()  # one clock for the attempt: the other one may be set
        self._save_at = 0.0
        self._earlier: list[Attempt] = []
        self._seen_from = self._seen_until = 0.0  # when the first and the last row or step was seen; 0 for none
        self._first_step: float | None = None
        self._last_step: float | None = None
        self._made_from = self._made_until = 0.0  # when these steps were made
        self._went_down = False  # then the steps count several things, epochs and steps for one
        self._is_passed = False  # whether `should_stop` was passed a step: from then on the rows' do not count
        self._rows_until = 0.0  # when the last row was logged
        self._ended_until: float | None = None  # the last row that the last `end` has seen
        register(self)

    def after_fork_in_child(self) -> None:
        """Save nothing: the run is the parent's."""
        self._handle = None

    def begin(self, handle: Handle, is_retry: bool) -> None:
        """Read what earlier attempts have saved in the run, which is open now. From here on, this one is saved too.

        Args:
            handle: The run.
            is_retry: Whether the job is at a later attempt. Then a good end was that of one rank, and not of the job.
                If not, the run begins again after it.
        """
        try:
            is_over, self._earlier = _parsed(handle.saved_state())
        except Exception:
            logger.warning("the goodput of run %s leaves out earlier attempts", handle.id, exc_info=True)
            is_over = False
        self._handle = handle
        if is_over and not is_retry:
            self._earlier = []
            self._save(is_over=False)  # now, since this attempt may fail before its first row

    def row_logged(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of a `log`, also wrong ones."""
        now = self._rows_until = self._see()
        if not self._is_passed:
            step = args[1] if len(args) > 1 else kwargs.get("step")
            if step is None:
                data = args[0] if args else kwargs.get("data")
                step = data.get(self._column) if isinstance(data, Mapping) else None
            self._move_to(_number(step), now)
        self._save_at_times(now)

    def column_defined(self, column: str) -> None:
        """Take the steps of rows without `step=` from this column."""
        self._column = column

    def step_made(self, step: Any) -> None:
        """Take the step that was passed to `should_stop`, which may be anything, and not those of the rows."""
        number = _number(step)
        if number is None:
            return
        if not self._is_passed:
            self._is_passed, self._last_step, self._went_down = True, None, False
        now = self._see()
        self._move_to(number, now)
        self._save_at_times(now)

    def end(self, exit_code: int) -> Mapping[str, float]:
        """Save the attempts for the next one. Called before the run is ended, and again if it was opened again.

        Returns:
            The run's `goodput/*`; nothing in its first attempt. Nothing either if this attempt has been ended before
            and has logged nothing since: what is recorded with a run that has ended opens it again.
        """
        attempts = self._attempts()
        if not attempts or self._ended_until == self._rows_until:
            return {}
        self._ended_until = self._rows_until
        self._save(is_over=exit_code == 0 and not self.continues)
        return metrics(attempts)

    def _see(self) -> float:
        self._seen_until = now = self._to_epoch + time.monotonic()
        self._seen_from = self._seen_from or now
        return now

    def _move_to(self, step: float | None, now: float) -> None:
        last = self._last_step
        if step is None or step == last:
            return
        if last is not None and step < last:
            self._went_down = True
            return
        if last is None:
            self._first_step, self._made_from = step, now
        self._last_step, self._made_until = step, now

    def _attempts(self) -> list[Attempt]:
        attempts = self._earlier
        if self._last_step is not None and not self._went_down:
            attempts = [*attempts, Attempt(self._made_from, self._made_until, self._first_step, self._last_step)]
        elif self._seen_until:
            attempts = [*attempts, Attempt(self._seen_from, self._seen_until, None, None)]
        return attempts[-_MOST_ATTEMPTS:]

    def _save_at_times(self, now: float) -> None:
        if now < self._save_at:
            return
        self._save_at = now + min(_LONGEST_S, max(_SHORTEST_S, now - self._seen_from))
        self._save(is_over=False)

    @critical_section(_PATIENCE_S)
    def _save(self, is_over: bool) -> None:
        handle = self._handle
        if handle is None:
            return
        try:
            handle.save_state(_text(is_over, self._attempts()))
        except Exception:
            warning = "run %s: its next attempt will not know all steps of this one"
            self._warn_once("save", warning, handle.id, exc_info=True)


def _number(step: Any) -> float | None:
    """Return a step that is a number. A tensor may be on a GPU: reading it would wait for that."""
    with suppress(OverflowError):
        if isinstance(step, numbers.Real) and math.isfinite(step):
            return float(step)
    return None


def _text(is_over: bool, attempts: Sequence[Attempt]) -> str:
    """Return what is saved, as a string of less than 5,000 characters.

    Args:
        is_over: Whether the last attempt has succeeded, so that no other follows.
        attempts: The attempts, in their order.
    """
    values = [[None if value is None else round(value, 6) for value in attempt] for attempt in attempts]
    return json.dumps([is_over, values], separators=(",", ":"))


def _parsed(text: str | None) -> tuple[bool, list[Attempt]]:
    """Return the values that `_text` has saved in a string: none if it is another string."""
    try:
        is_over, rows = json.loads(text or "")
        attempts = [
            Attempt(float(b), float(e), *(None if s is None else float(s) for s in steps)) for b, e, *steps in rows
        ]
    except (TypeError, ValueError):
        return False, []
    return bool(is_over), attempts


def metrics(attempts: Sequence[Attempt]) -> Mapping[str, float]:
    """Return `goodput/*`; nothing for a run of one attempt.

    A step is kept if no later attempt begins at it or before it. An attempt's time is that between its first and its
    last step. If an attempt does not tell its steps, only the time between the attempts is known.
    """
    if len(attempts) < 2:
        return {}
    # Attempts on two machines have two clocks.
    waits = (max(0.0, attempt.began_at - before.ended_at) for before, attempt in itertools.pairwise(attempts))
    restart = [0.0, *waits]
    values = {"goodput/attempts": float(len(attempts)), **_listed("restart_s", restart)}
    kept: list[float] = []
    repeated: list[float] = []
    next_first = math.inf  # the first step that a later attempt makes again
    for began_at, ended_at, first, last in reversed(attempts):
        if first is None or last is None:
            return values
        share = (next_first - first) / (last - first) if last > first else 1.0
        seconds = ended_at - began_at
        kept.insert(0, seconds * min(1.0, max(0.0, share)))
        repeated.insert(0, seconds - kept[0])
        next_first = min(next_first, first)
    wall_s = sum(restart) + sum(kept) + sum(repeated)
    share_kept = {"goodput/share": sum(kept) / wall_s if wall_s else 0.0}
    return {**values, **share_kept, **_listed("kept_s", kept), **_listed("repeated_s", repeated)}


def _listed(name: str, values: Sequence[float]) -> dict[str, float]:
    # Not {name}/0: in a directory of MLflow's, a name is a file, or the directory of others.
    of_attempts = {f"goodput/attempt_{number}/{name}": value for number, value in enumerate(values)}
    return {f"goodput/{name}": sum(values), **of_attempts}


def text_of(values: Mapping[str, float]) -> str:
    """Return the goodput in one line."""
    text = f"{values['goodput/attempts']:g} attempts, {values['goodput/restart_s']:.0f} s between them"
    if "goodput/share" not in values:
        return f"{text}. How many steps were made again is unknown: not all attempts tell their steps"
    return f"goodput {values['goodput/share']:.0%} in {text}, {values['goodput/repeated_s']:.0f} s for steps made again"
