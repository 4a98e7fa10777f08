"""The goodput of a run: the share of its time that has made steps which were kept, over all of its attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run. Times are in seconds since the epoch.

    Attributes:
        began_at: When its function has called `should_stop(step)` for the first time: its first step is made.
        first_step: That step.
        ended_at: When it was last seen to make a step.
        last_step: That step.
    """

    began_at: float
    first_step: int
    ended_at: float
    last_step: int

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """Return the attempt of this text."""
        return cls(**json.loads(text))


def metrics(attempts: Sequence[Attempt]) -> Mapping[str, float]:
    """Return `goodput/*`; nothing for a run of one attempt.

    A step is kept if no later attempt makes it again. An attempt's time is that between its first and its last step.
    """
    if len(attempts) < 2:
        return {}
    kept, repeated, restart = [], [], []
    for number, attempt in enumerate(attempts):
        # Its first step was made before its time begins.
        last_kept = min([attempt.last_step, *(other.first_step - 1 for other in attempts[number + 1 :])])
        steps, kept_steps = attempt.last_step - attempt.first_step, last_kept - attempt.first_step
        share = max(0, kept_steps) / steps if steps > 0 else 0.0
        seconds = attempt.ended_at - attempt.began_at
        kept.append(share * seconds)
        repeated.append(seconds - share * seconds)
        restart.append(attempt.began_at - attempts[number - 1].ended_at if number else 0.0)
    wall_s = attempts[-1].ended_at - attempts[0].began_at
    values = {
        "goodput/share": sum(kept) / wall_s if wall_s > 0 else 0.0,
        "goodput/attempts": len(attempts),
        "goodput/restart_s": sum(restart),
        "goodput/repeated_s": sum(repeated),
    }
    for number in range(len(attempts)):
        values[f"goodput/kept_s/{number}"] = kept[number]
        values[f"goodput/repeated_s/{number}"] = repeated[number]
        values[f"goodput/restart_s/{number}"] = restart[number]
    return values
