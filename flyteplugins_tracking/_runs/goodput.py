"""The steps of each attempt of a run. A restart reads what the attempts before it have made.

The rows of the run tell them: their `step=`, or a column that is known to have steps. `should_stop(step)` tells them
better. An attempt may be killed at any moment. So a thread notes its steps while it trains: in a file of this machine,
and more rarely with the run at its service, for an attempt on another machine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import numbers
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flyteplugins_tracking._job.agreement import CallCounter
from flyteplugins_tracking._job.board import make_private, user_directory
from flyteplugins_tracking._job.goodput import Attempt, Note, merged, metrics
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking._util.whole_file import write_whole

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)

# An attempt is noted when a tenth of its time is new, but not more often than this, and at least as often as that.
_NEW_SHARE, _SHORTEST_S, _LONGEST_S = 0.1, 0.1, 5.0
# And so often with the run at its service.
_SERVICE_S = 15.0
# How long the end of a run waits for the thread, whose service may not answer.
_PATIENCE_S = 1.0
# Notes of runs that were never continued are removed after so long.
_KEPT_S = 30 * 24 * 3600.0
# The columns in which rows without `step=` have their step: transformers' WandbCallback, Lightning's WandbLogger, and
# most loops that log it themselves.
_USUAL_COLUMNS = ("train/global_step", "trainer/global_step", "step")
# A first step this many times farther from the second than the others from each other belongs to something else: to an
# evaluation before the training, for one.
_FAR = 10


class _Seen(NamedTuple):
    """A step, and when it was first seen, in seconds of `time.monotonic`."""

    at: float
    step: float


class Steps:
    """The steps of this attempt. All of it is in memory. The `steps` of a `RunRequest`."""

    _first: _Seen | None
    _second: _Seen | None
    _last: _Seen | None
    _count: int  # of different steps
    _calls_before: int  # the number of the call before the first one that was passed a step
    _went_down: bool

    def __init__(self, step_metric: str) -> None:
        """Initialize an attempt without a step.

        Args:
            step_metric: The column in which rows without `step=` may have it.
        """
        self._columns: tuple[str, ...] = (step_metric, *_USUAL_COLUMNS)
        self._calls: CallCounter | None = None  # of `should_stop(step)`
        self._last_seen: Any = None  # what was passed last: it may be an array
        self._last_passed: float | None = None  # from the first number on, the rows' steps do not count
        self._looking = threading.Lock()
        self._opened_at = time.time()
        self._to_epoch = self._opened_at - time.monotonic()  # one clock for the attempt: the other one may be set
        self._seen_from = self.seen_until = 0.0  # when the first and the last row or step was seen; 0 for none
        self.rows_until = 0.0  # the same for rows
        self._forget_steps()

    @property
    def next_note_s(self) -> float:
        """How long to wait with the next note."""
        if not self.seen_until:
            return _SHORTEST_S
        return min(_LONGEST_S, max(_SHORTEST_S, (time.monotonic() - self._seen_from) * _NEW_SHARE))

    @property
    def attempt(self) -> Attempt | None:
        """The attempt until now; None if nothing was seen of it."""
        first, last, count = self._first, self._last, self._count
        if first is None or last is None or self._went_down:
            began_at, ended_at = self._to_epoch + self._seen_from, self._to_epoch + self.seen_until
            steps = (None, None, None) if last is None else (0, 0, 0)
            return Attempt(self._opened_at, began_at, ended_at, *steps) if self.seen_until else None
        gap = (last.step - first.step) / (count - 1) if count > 2 else None
        if gap is not None and self._second is not None and self._last_passed is None:
            rest = (last.step - self._second.step) / (count - 2)
            if self._second.step - first.step > _FAR * rest:
                first, gap = self._second, rest
        began_at, ended_at = self._to_epoch + first.at, self._to_epoch + last.at
        return Attempt(self._opened_at, began_at, ended_at, first.step, last.step, gap)

    def row_logged(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of a `log`, also wrong ones."""
        self.rows_until = now = self._saw()
        self.look()
        if self._last_passed is None:
            step = args[1] if len(args) > 1 else kwargs.get("step")
            if step is None:
                step = self._in_column(args[0] if args else kwargs.get("data"))
            if step is not None:
                self._move_to(step, now)

    def column_defined(self, column: str) -> None:
        """Take the steps of rows without `step=` from this column, if they have it."""
        self._columns = (column, *(other for other in self._columns if other != column))

    def follow(self, calls: CallCounter) -> None:
        """Take the steps that these calls are passed, if they are, and not those of the rows: they may be others."""
        self.look()
        if self._last_passed is not None:  # a function within this one is called again
            self._calls_before = calls.count - self._count
        self._calls = calls

    def look(self) -> None:
        """Take the step of the last call. Called by several threads: one of them is enough."""
        calls = self._calls
        if calls is None or calls.step is self._last_seen or not self._looking.acquire(blocking=False):
            return
        try:
            self._look(calls)
        finally:
            self._looking.release()

    def _look(self, calls: CallCounter) -> None:
        count, self._last_seen = calls.count, calls.step
        step = _number(self._last_seen)
        if step is None or step == self._last_passed:
            return
        if self._last_passed is None:
            self._forget_steps()
            self._calls_before = count - 1
        self._last_passed = step
        self._move_to(step, self._saw())
        self._count = count - self._calls_before

    def _saw(self) -> float:
        self.seen_until = now = time.monotonic()
        self._seen_from = self._seen_from or now
        return now

    def _in_column(self, data: Any) -> Any:
        if type(data) is dict or isinstance(data, Mapping):
            for column in self._columns:
                if column in data:
                    return data[column]
        return None

    def _forget_steps(self) -> None:
        self._first = self._second = self._last = None
        self._count = self._calls_before = 0
        self._went_down = False

    def _move_to(self, step: Any, now: float) -> None:
        number = _number(step)
        last = self._last
        if number is None or (last is not None and number == last.step):
            return
        if last is not None and number < last.step:
            self._went_down = True
            return
        self._last = seen = _Seen(now, number)
        self._count += 1
        if self._first is None:
            self._first = seen
        elif self._second is None:
            self._second = seen


def _number(step: Any) -> float | None:
    """Return a step that is a number. A tensor may be on a GPU: reading it would wait for that."""
    if type(step) is int:
        return step
    with suppress(OverflowError):
        if isinstance(step, numbers.Real) and math.isfinite(step):
            return float(step)
    return None


class Attempts:
    """The attempts of a run. This process makes the last one."""

    def __init__(self, file: Path, handle: Handle, steps: Steps, is_retry: bool, may_restart: bool) -> None:
        """Read what earlier attempts have noted, and note this one from its first row on.

        Args:
            file: Where this machine notes the attempts.
            handle: The open run.
            steps: The steps of this attempt.
            is_retry: Whether the job is at a later attempt.
            may_restart: Whether the job may be restarted although this rank succeeds: another one may fail.
        """
        self.continues = False  # whether another attempt shall follow, though this one succeeds
        self._file, self._handle, self._steps = file, handle, steps
        self._may_restart = may_restart
        self._warn_once = WarnOnce(logger)
        self._earlier = self._read(is_retry)
        self._noting = threading.Lock()
        self._ended = threading.Event()
        self._ended_until: float | None = None  # the last row that the last `end` has seen
        # Not in the function's thread: a disk may be slow, and an exception of a signal's handler is the function's.
        self._thread = threading.Thread(target=self._watch, name="flyteplugins_tracking.goodput", daemon=True)
        self._thread.start()

    def follow(self, counter: CallCounter) -> None:
        """Take the steps from the calls of `should_stop(step)`."""
        self._steps.follow(counter)

    def look(self) -> None:
        """Take the step of the last call: the first one is looked at at once."""
        self._steps.look()

    def end(self, exit_code: int) -> Mapping[str, float]:
        """Keep the attempts for the next one. Called before the run is ended, and again if it was opened again.

        Returns:
            The run's `goodput/*`; nothing in its first attempt. Nothing either if this attempt has been ended before
            and has logged nothing since: what is recorded with a run that has ended opens it again.
        """
        self._steps.look()
        attempts, rows_until = self._attempts(), self._steps.rows_until
        if not attempts or self._ended_until == rows_until:
            return {}
        is_good = exit_code == 0 and not self.continues
        has_lock = self._noting.acquire(timeout=_PATIENCE_S)
        try:
            self._ended_until = rows_until
            self._note(attempts, time.time() if is_good else None)
        finally:
            if has_lock:
                self._noting.release()
        return metrics(attempts)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        threads.join(self._thread, _PATIENCE_S)

    def _attempts(self) -> list[Attempt]:
        attempt = self._steps.attempt
        return [*self._earlier.attempts, *([] if attempt is None else [attempt])]

    def _read(self, is_retry: bool) -> Note:
        try:
            text = self._file.read_text() if self._file.exists() else None
            return merged([text, self._handle.kept_note()], is_retry)
        except Exception:
            logger.warning("the goodput of run %s leaves out earlier attempts", self._handle.id, exc_info=True)
            return Note(0.0, None, [])

    def _watch(self) -> None:
        remove_old_notes(self._file.parent)
        noted_until, service_due_s = 0.0, 0.0
        if self._earlier.since and not self._earlier.attempts:  # also for a restart before the first row
            with self._noting:
                self._note([], None)
        while not self._ended.wait(self._steps.next_note_s):
            self._steps.look()
            with self._noting:
                seen_until = self._steps.seen_until
                if seen_until == noted_until or self._ended.is_set():
                    continue
                # What is kept with a run that was ended opens it again: only a row may do that.
                is_open = self._steps.rows_until != self._ended_until
                is_due = is_open and time.monotonic() >= service_due_s
                self._note(self._attempts(), None, is_due)
                noted_until, service_due_s = seen_until, time.monotonic() + _SERVICE_S if is_due else service_due_s

    def _note(self, attempts: list[Attempt], ended_at: float | None, at_service: bool = True) -> None:
        text = Note(self._earlier.since, ended_at, attempts).to_text()
        is_over = ended_at is not None and not self._may_restart
        self._keep(self._remove if is_over else self._write, text)
        if at_service:
            self._keep(self._handle.keep_note, text)

    def _keep(self, keep: Callable[[str], object], text: str) -> None:
        try:
            keep(text)
        except Exception:
            warning = "run %s: its next attempt will not know all steps of this one"
            self._warn_once("note", warning, self._handle.id, exc_info=True)

    def _remove(self, _: str) -> None:
        self._file.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        make_private(self._file.parent)
        write_whole(self._file, text)


def file_of(tracker: str, namespace: str, run_id: str) -> Path:
    """Return the file for the attempts of a run."""
    name = hashlib.sha256("\0".join((tracker, namespace, run_id)).encode()).hexdigest()[:32]
    return user_directory() / "goodput" / f"{name}.json"


def remove_old_notes(directory: Path) -> None:
    """Remove the notes of runs that were not continued."""
    with suppress(OSError):
        for path in directory.iterdir():
            if path.stat().st_mtime < time.time() - _KEPT_S:
                path.unlink()


def text_of(values: Mapping[str, float]) -> str:
    """Return the goodput in one line."""
    text = f"{values['goodput/attempts']:g} attempts, {values['goodput/restart_s']:.0f} s between them"
    if math.isnan(values.get("goodput/share", math.nan)):
        return f"{text}. How many steps were made again is unknown: the rows do not tell the steps"
    return f"goodput {values['goodput/share']:.0%} in {text}, {values['goodput/repeated_s']:.0f} s for steps made again"
