"""The progress of this rank, for those who watch whether it hangs and how fast it is: rows, heartbeats and steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flyteplugins_tracking._util.modules import loaded

# When this rank has last logged or called `heartbeat`, in seconds of `time.monotonic`; 0 if it has not.
_last_s = 0.0
_rows = _heartbeats = 0
# The steps of each of torch's optimizers, by `id`: a training run may have several.
_optimizer_steps: dict[int, int] = {}
# The thread whose rows do not count.
_ignored_thread = 0
# What a thread calls that logs a row, if none has for so many seconds; and when one has.
looks: list[Callable[[], object]] = []
_LOOK_S, _looked_at = 0.1, 0.0


def heartbeat() -> None:
    """Count progress that is not a row: an evaluation, a compilation, a checkpoint, a step on a rank without a run.

    `hang_timeout_s` counts from the last row or heartbeat of a rank. With `pulse_s` the heartbeats are the rank's steps
    if torch's optimizers make none. It does nothing else, so you can call it at every step.
    """
    global _last_s, _heartbeats
    _last_s = time.monotonic()
    _heartbeats += 1


def count_row() -> None:
    """Count a row that this rank is about to log, unless it is of the thread that is ignored. Fast: for each row."""
    global _last_s, _rows, _looked_at
    now = time.monotonic()
    if threading.get_ident() != _ignored_thread:
        _last_s = now
        _rows += 1
    if now > _looked_at + _LOOK_S:
        _looked_at = now
        for look in looks:
            look()


def last_progress() -> float:
    """Return when this rank has last logged or called `heartbeat`, in seconds of `time.monotonic`; 0 if it has not."""
    return _last_s


def has_logged() -> bool:
    """Whether this rank has logged a row."""
    return _rows > 0


def steps() -> tuple[str, int]:
    """Return what counts as this rank's steps, and how many it has made.

    They are those of torch's optimizers: of the one with the most steps. Without any, they are the rank's heartbeats or
    its rows, whichever are more.
    """
    if _optimizer_steps:
        return "optimizer", max(list(_optimizer_steps.values()))
    return ("heartbeats", _heartbeats) if _heartbeats > _rows else ("rows", _rows)


def reset_steps() -> None:
    """Count this rank's steps from 0."""
    global _rows, _heartbeats
    _rows = _heartbeats = 0
    _optimizer_steps.clear()


def count_optimizer_steps() -> Callable[[], object] | None:
    """Count the steps of torch's optimizers from now on, and return what ends that; None if that is not possible yet.

    Torch must be imported. A thread must not add a hook while the training may be calling others: then nothing is
    counted.
    """
    module = loaded("torch.optim.optimizer")
    if module is None or getattr(module, "_global_optimizer_post_hooks", None):
        return None
    remove: Callable[[], object] = module.register_optimizer_step_post_hook(_count_optimizer_step).remove
    return remove


def _count_optimizer_step(optimizer: object, *_: object) -> None:
    _optimizer_steps[id(optimizer)] = _optimizer_steps.get(id(optimizer), 0) + 1


def ignore_this_thread() -> None:
    """Do not count what this thread logs as progress."""
    global _ignored_thread
    _ignored_thread = threading.get_ident()
