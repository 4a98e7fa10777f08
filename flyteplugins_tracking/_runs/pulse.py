"""The pulse of a rank: its step time and memory on the board; and on the primary, what the run shows of all ranks.

The monitor's thread looks a few times a second where the function's thread is: a rank that waits for others is in a
collective then, and the one that they wait for is not. That needs no hooks, and works for any framework.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job import pulse as pulses
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._job.pulse import Pulse, SilenceWatch, State
from flyteplugins_tracking._job.waits import is_waiting
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.loaded import loaded
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

# How often the thread looks where the function is: at most so long between two looks, and so often within a pulse.
_LONGEST_LOOK_S, _LOOKS = 0.25, 20


class PulseDuty:
    """Puts this rank's pulse on the board. The first primary's also reads those of all ranks."""

    def __init__(
        self, info: DistributedInfo, pulse_s: float, log: Callable[[Mapping[str, float]], None] | None
    ) -> None:
        """Called in the thread that runs the decorated function.

        Args:
            info: This rank.
            pulse_s: Seconds between two pulses.
            log: What the first primary does with the values of all ranks; None on the other ranks.
        """
        self._info = info
        self._pulse_s = pulse_s
        self._log = log
        self._thread_id = threading.get_ident()
        self._look_s = min(_LONGEST_LOOK_S, pulse_s / _LOOKS)
        self._steps = StepClock()
        self._waits = WaitMeter()
        self._silence = SilenceWatch(info.world_size, pulse_s, time.monotonic())
        self._put_at = time.monotonic()
        self._started_at = proc.started_at()
        progress.reset_steps()
        self._stop_counting = progress.count_optimizer_steps()
        self._random = random.Random()  # noqa: S311 not for keys
        self._wait_s = self._look_s
        self._warn_once = WarnOnce(logger)

    def next_wait_s(self) -> float:
        """Return how long the thread waits before the next `look`: at random, as steps may have the same rhythm."""
        self._wait_s = self._look_s * self._random.uniform(0.5, 1.5)
        return self._wait_s

    def begin(self, board: Board) -> None:
        """Say that this rank is there."""
        pulses.put(board.of_topic(pulses.TOPIC), self._info.rank, self._pulse("running"))

    def look(self, board: Board) -> None:
        """See where the function is; and put a pulse if it is time."""
        now = time.monotonic()
        if self._stop_counting is None:  # the function may have imported torch since
            self._stop_counting = progress.count_optimizer_steps()
        self._steps.look(now, *progress.steps())
        frame = sys._current_frames().get(self._thread_id)
        self._waits.look(now, self._wait_s, frame is not None and is_waiting(frame))
        del frame  # it holds the function's variables
        if now - self._put_at >= self._pulse_s:
            self._put_at = now
            board = board.of_topic(pulses.TOPIC)
            pulses.put(board, self._info.rank, self._pulse("running"))
            if self._log is not None:
                self._read(board, self._log)

    def end(self, board: Board, has_failed: bool) -> None:
        """Say that this rank's function has ended: then it is not silent."""
        state: State = "failed" if has_failed else "returned"
        pulses.put(board.of_topic(pulses.TOPIC), self._info.rank, self._pulse(state))

    def close(self) -> None:
        """Remove the hook."""
        if self._stop_counting is not None:
            self._stop_counting()

    def _pulse(self, state: State) -> Pulse:
        now = time.monotonic()
        return Pulse(
            steps=self._steps.steps,
            step_s=self._steps.step_s(now),
            own_share=self._waits.own_share(),
            memory=proc.resident_memory(),
            cuda_memory=cuda_memory(),
            state=state,
        )

    def _read(self, board: Board, log: Callable[[Mapping[str, float]], None]) -> None:
        present = pulses.read(board, self._info.world_size, since=self._started_at)
        silent = self._silence.silent(present, time.monotonic())
        alive = {rank: pulse for rank, pulse in present.items() if pulse.state == "running" and rank not in silent}
        try:
            log({**pulses.metrics(alive), "ranks/silent": len(silent)})
        except Exception:
            self._warn_once("log", "the run does not show the pulse of its ranks", exc_info=True)


class StepClock:
    """Measures the time of a step from how many there are at each look."""

    def __init__(self) -> None:
        self.steps = 0
        self._kind = ""
        self._first: tuple[float, int] | None = None  # since the last pulse: when a step was seen, and the count then
        self._last: tuple[float, int] | None = None
        self._step_s: float | None = None

    def look(self, now: float, kind: str, count: int) -> None:
        """Note the count.

        Args:
            now: The time, in seconds of `time.monotonic`.
            kind: What counts as a step: another kind begins anew.
            count: How many steps there have been.
        """
        self.steps = count
        if kind != self._kind:
            self._kind, self._first, self._last = kind, None, None
        if count and (self._last is None or count != self._last[1]):
            self._last = (now, count)
            self._first = self._first or self._last

    def step_s(self, now: float) -> float | None:
        """Return the seconds per step since the last call; None before the second step.

        If there was none, it is that of the call before, or the time since the last step if that is longer.
        """
        if self._first is None or self._last is None:
            return None
        (first_at, first), (last_at, last) = self._first, self._last
        if last > first:
            self._step_s = (last_at - first_at) / (last - first)
            self._first = self._last
        return None if self._step_s is None else max(self._step_s, now - last_at if last == first else 0.0)


class WaitMeter:
    """Measures how much of its time a thread waits for other ranks, from looks at its stack."""

    def __init__(self) -> None:
        self._looked_at = self._began_at = time.monotonic()
        self._waited_s = 0.0
        self._share: float | None = None

    def look(self, now: float, wait_s: float, is_waiting: bool) -> None:
        """Note where the thread is.

        Args:
            now: The time, in seconds of `time.monotonic`.
            wait_s: How long after the look before this one it should have come. If it comes later, somebody has held
                the GIL: that is no waiting, though the thread may be in a collective by now, which sets the GIL free.
            is_waiting: Whether the thread waits.
        """
        if is_waiting:
            self._waited_s += min(now - self._looked_at, wait_s)
        self._looked_at = now

    def own_share(self) -> float | None:
        """Return the share of the time since the last call that the thread has not waited; None if none has passed."""
        passed_s = self._looked_at - self._began_at
        if passed_s > 0:
            self._share = 1 - self._waited_s / passed_s
        self._began_at, self._waited_s = self._looked_at, 0.0
        return self._share


def cuda_memory() -> int | None:
    """Return the bytes that torch has reserved on this process's GPUs; None if it uses none."""
    cuda: Any = loaded("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    return sum(int(cuda.memory_reserved(device)) for device in range(cuda.device_count()))
