"""The goodput of a run: the share of its time that has made steps which were kept, over all of its attempts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# An older attempt is forgotten: a tag of MLflow's has 5,000 characters.
_MOST_ATTEMPTS = 50


class Attempt(NamedTuple):
    """One attempt of a run. Times are in seconds since the epoch.

    Attributes:
        opened_at: When its run was opened: no other attempt has the same.
        began_at: When it was first seen to make a step: its first step is made. For an attempt that tells no steps,
            when it logged its first row.
        ended_at: When it was last seen to make a step, or its last row.
        first_step: The first step; None if it has told none.
        last_step: The last step.
        gap: The distance of the steps that were seen; None if they are too few. 0 if they went down: they count several
            things, epochs and steps for one, and nobody knows which were made.
    """

    opened_at: float
    began_at: float
    ended_at: float
    first_step: float | None
    last_step: float | None
    gap: float | None

    @property
    def seconds(self) -> float:
        """How long it has made steps."""
        return self.ended_at - self.began_at


class Note(NamedTuple):
    """What is kept of a run between its attempts.

    Attributes:
        since: When the run has begun, in seconds since the epoch; it may have ended well before that, and begun anew.
        ended_at: When it ended well; None if it has not.
        attempts: Its attempts, in their order.
    """

    since: float
    ended_at: float | None
    attempts: Sequence[Attempt]

    def to_text(self) -> str:
        """Return it as text of less than 5,000 characters."""
        ended_at = None if self.ended_at is None else round(self.ended_at, 3)
        attempts = [
            [*(round(at, 3) for at in attempt[:3]), *(_short(number) for number in attempt[3:])]
            for attempt in self.attempts[-_MOST_ATTEMPTS:]
        ]
        return json.dumps([round(self.since, 3), ended_at, attempts], separators=(",", ":"))


def _short(number: float | None) -> float | None:
    """Return a number with nine digits: a gap of fractions of an epoch must not become 0."""
    return float(f"{number:.9g}") if isinstance(number, float) else number


def merged(texts: Iterable[str | None], is_retry: bool) -> Note:
    """Return what these texts of the same run say together. Of two texts about an attempt, the later one counts.

    Args:
        texts: The texts. One that is none of `Note.to_text` says nothing.
        is_retry: Whether the job is at a later attempt. Then a good end was that of one rank, and not of the job. If
            not, the run begins anew after it.
    """
    notes = [note for note in map(_parsed, texts) if note is not None]
    begins = [note.since for note in notes]
    ends = [note.ended_at for note in notes if note.ended_at is not None and not is_retry]
    since = max([*begins, *ends], default=0.0)
    found: dict[float, Attempt] = {}
    for attempt in itertools.chain.from_iterable(note.attempts for note in notes):
        known = found.get(attempt.opened_at)
        if attempt.opened_at >= since and (known is None or known.ended_at < attempt.ended_at):
            found[attempt.opened_at] = attempt
    return Note(since, None, [found[opened_at] for opened_at in sorted(found)])


def _parsed(text: str | None) -> Note | None:
    try:
        since, ended_at, attempts = json.loads(text or "")
        note = Note(since, ended_at, [Attempt(*attempt) for attempt in attempts])
        numbers = [since, *(number for attempt in note.attempts for number in attempt[:3])]
        others = [ended_at, *(number for attempt in note.attempts for number in attempt[3:]), *numbers]
        are_numbers = None not in numbers and all(isinstance(number, (int, float, type(None))) for number in others)
        return note if are_numbers else None
    except (TypeError, ValueError):
        return None


def metrics(attempts: Sequence[Attempt]) -> Mapping[str, float]:
    """Return `goodput/*`; nothing for a run of one attempt.

    A step is kept if no later attempt makes it again. An attempt's time is that between its first and its last step.
    If no attempt tells its steps, only the time between the attempts is known. If some do, the rest is NaN.
    """
    if len(attempts) < 2:
        return {}
    tells = any(attempt.last_step is not None for attempt in attempts)
    # Attempts on two machines have two clocks.
    waits = (max(0.0, attempt.began_at - before.ended_at) for before, attempt in itertools.pairwise(attempts))
    restart = [0.0, *waits]
    if tells:  # an attempt without a step has only cost time
        restart = [s + a.seconds * (a.last_step is None) for s, a in zip(restart, attempts, strict=True)]
    values = {"goodput/attempts": float(len(attempts)), **_listed("restart_s", restart)}
    if not tells or all(attempt.gap == 0 or attempt.last_step is None for attempt in attempts):
        return values
    kept, repeated = _kept_and_repeated(attempts)
    wall_s = sum(restart) + sum(kept) + sum(repeated)
    share = {"goodput/share": sum(kept) / wall_s if wall_s else 0.0}
    return {**values, **share, **_listed("kept_s", kept), **_listed("repeated_s", repeated)}


def _listed(name: str, values: Sequence[float]) -> dict[str, float]:
    # Not {name}/0: in a directory of MLflow's, a name is a file, or the directory of others.
    of_attempts = {f"goodput/attempt_{number}/{name}": value for number, value in enumerate(values)}
    return {f"goodput/{name}": sum(values), **of_attempts}


def _kept_and_repeated(attempts: Sequence[Attempt]) -> tuple[list[float], list[float]]:
    """Return the seconds of each attempt for steps that were kept, and for steps that were made again."""
    if any(attempt.gap == 0 for attempt in attempts):
        return [math.nan] * len(attempts), [math.nan] * len(attempts)
    kept, repeated = [], []
    usual_gap = min((attempt.gap for attempt in attempts if attempt.gap is not None), default=0.0)
    first = next((attempt.first_step for attempt in attempts if attempt.first_step is not None), 0.0)
    last_kept = math.inf  # the last step that no later attempt makes
    for attempt in reversed(attempts):
        seconds = 0.0 if attempt.last_step is None else attempt.seconds
        kept.append(seconds * _kept_share(attempt, last_kept))
        repeated.append(seconds - kept[-1])
        # Of few steps, the first may be that of an evaluation before the training, and no step that is made again.
        if attempt.first_step is not None and (attempt.gap is not None or attempt.first_step > first):
            gap = usual_gap if attempt.gap is None else attempt.gap
            last_kept = min(last_kept, attempt.first_step - gap)
    return kept[::-1], repeated[::-1]


def _kept_share(attempt: Attempt, last_kept: float) -> float:
    """Return the share of its steps behind the first one: that was made before the attempt's time begins."""
    if attempt.first_step is None or attempt.last_step is None:
        return 0.0
    if attempt.first_step == attempt.last_step:
        return float(attempt.last_step <= last_kept)
    share = (last_kept - attempt.first_step) / (attempt.last_step - attempt.first_step)
    return min(1.0, max(0.0, share))
