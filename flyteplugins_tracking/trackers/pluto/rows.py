"""The rows of a Pluto run: the values that the client takes, and the steps of rows that are logged without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.rows import MetricSanitizer

# Larger integers are not JSON numbers to the service.
_LARGEST_INT = 2**63
# The last step of each run's rows in this process. The process that sends several ranks' files has several handles.
_last_steps: dict[str, int] = {}


class PlutoSanitizer(MetricSanitizer):
    """Makes rows of what a rank logs, and warns about values that Pluto's client drops silently."""

    def __init__(self, title: str, prefix: str) -> None:
        super().__init__(title, prefix, odd_floats="stored, and left out of Pluto's charts and statistics")

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        row = super().clean(data)
        return {key: plain for key, value in row.items() if (plain := self._accepted(key, value)) is not None}

    def _accepted(self, key: str, value: Any) -> Any:
        if not (key.isascii() and key.isprintable()):
            self.warn_once(key, "Pluto replaces each character of a key that is not printable ASCII by '-'")
        if isinstance(value, int) and abs(value) >= _LARGEST_INT:
            return float(value)
        return value if isinstance(value, (int, float)) else self._text_or_media(key, value)

    def _text_or_media(self, key: str, value: Any) -> Any:
        from pluto import Data, File

        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(isinstance(item, (int, float)) for item in items):
            self.warn_once(key, "Pluto keeps only the last number of a list")
        if items and all(isinstance(item, (int, float, str, File, Data)) for item in items):
            return value
        kind = type(value).__name__
        self.warn_once(key, f"the value is left out: Pluto takes numbers, texts and its media classes, not {kind}")
        return None


class StepCounter:
    """Gives a step to rows that are logged without one.

    Pluto's charts have one value for a key and a step, the latest. So the steps continue where an earlier attempt has
    stopped. Where ranks share a run without a prefix, each takes steps that no other rank takes.
    """

    def __init__(self, request: RunRequest, run_id: str) -> None:
        info, config = request.info, request.config
        is_interleaved = info is not None and config.run_mode == "shared" and not config.rank_prefix
        self._run_id = run_id
        self._stride = (request.plan.writers or 1) if is_interleaved else 1
        position = (info.local_rank if config.rank_scope == "worker" else info.rank) if info is not None else 0
        self._offset = (position or 0) % self._stride

    @property
    def last(self) -> int:
        """The run's last step in this process."""
        return _last_steps.get(self._run_id, 0)

    def step_of(self, step: Any, sanitizer: MetricSanitizer) -> int:
        """Return `step` if Pluto takes it, or the next one."""
        if step is not None:
            number = _whole(step)
            if number is not None:
                _last_steps[self._run_id] = max(number, _last_steps.get(self._run_id, 0))
                return number
            sanitizer.warn_once(
                f"step={step!r}", "Pluto takes whole numbers from 0 on as steps: the row gets the next step"
            )
        last = _last_steps.get(self._run_id, 0)
        following = (last // self._stride + 1) * self._stride + self._offset
        _last_steps[self._run_id] = following
        return following


def has_steps(run_id: str) -> bool:
    """Whether this process knows the last step of the run."""
    return bool(_last_steps.get(run_id))


def continue_after(run_id: str, last_step: int) -> None:
    """Have the next step be the one after `last_step`."""
    _last_steps[run_id] = last_step


def _whole(step: Any) -> int | None:
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == step and 0 <= number < 2**63 else None
