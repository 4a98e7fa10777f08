"""The pulse of a job: how fast each rank is, what the run shows of all ranks, and which of them are silent.

Each rank puts its step time and its memory on the board every few seconds. Local rank 0 of each node adds the load of
its node (`node_load`), and the first primary reads all that. The watch looks a few times a second where the function's
thread is: a rank that waits for others is in a collective then, and the one that they wait for is not. That needs no
hooks, and works for any framework.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import FrameType
from typing import Any, Literal

from flyteplugins_tracking._job import node_load, progress
from flyteplugins_tracking._job.board import Board, from_text, to_text
from flyteplugins_tracking._job.failure import COLLECTIVES
from flyteplugins_tracking._job.watch import Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import loaded
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

# A rank is silent if it has put nothing on the board for this many pulses.
_SILENT_PULSES = 2
# The most characters of a pulse: that of a node with 16 GPUs has half of them.
_LONGEST = 4096
# The most seconds between two looks at the function's stack, and the number of looks within a short pulse.
_LONGEST_LOOK_S, _LOOKS = 0.25, 20
# Code that waits for the GPU.
_SYNCHRONIZATIONS = re.compile(r"[/\\]torch[/\\]cuda[/\\](?:__init__|streams)\.py$")
# Code that only passes a call on.
_DISPATCHER = re.compile(r"[/\\]torch[/\\]_ops\.py$")

State = Literal["running", "returned", "failed"]


@dataclass(frozen=True)
class Pulse:
    """The state that a rank has put on the board.

    Attributes:
        step_s: Seconds per step between this pulse and the one before; None if that is unknown.
        own_share: The share of the time since the pulse before that it has not waited for other ranks; None if unknown.
        memory: Its resident memory, in bytes; None if unknown.
        cuda_memory: What torch has reserved on its GPUs, in bytes; None without CUDA.
        state: Whether its function runs, has returned or has failed.
        node: The index of the node that it measures; None if another rank does.
        load: The load of that node, as `LoadMeter.measure` returns it.
        put_at: When, in seconds since the epoch, by the clock of the host.
    """

    step_s: float | None = None
    own_share: float | None = None
    memory: int | None = None
    cuda_memory: int | None = None
    state: State = "running"
    node: int | None = None
    load: dict[str, float] = field(default_factory=dict)
    put_at: float = field(default_factory=time.time)


def read(board: Board, world_size: int, since: float = 0.0) -> dict[int, Pulse]:
    """Return the last pulse of each rank that has one.

    Args:
        board: The board of the pulses.
        world_size: The number of ranks.
        since: Leave out pulses that are older, in seconds since the epoch: of an earlier attempt on the same board.
    """
    texts = board.get_all(str(rank) for rank in range(world_size))
    pulses = {rank: from_text(Pulse, text[:_LONGEST]) for rank, text in enumerate(texts) if text is not None}
    return {rank: pulse for rank, pulse in pulses.items() if pulse is not None and pulse.put_at >= since}


class SilenceWatch:
    """Knows which ranks have put nothing on the board for two pulses, by the clock of the reader alone."""

    def __init__(self, world_size: int, pulse_s: float, now: float) -> None:
        """Begin to count at `now`, in seconds of `time.monotonic`: then no rank is silent."""
        self._pulse_s = pulse_s
        self._seen: list[tuple[float, float]] = [(0.0, now)] * world_size  # `put_at`, and when we have first seen it

    def silent(self, pulses: Mapping[int, Pulse], now: float) -> list[int]:
        """Return the silent ranks. One whose function has ended is not silent."""
        for rank, pulse in pulses.items():
            if pulse.put_at != self._seen[rank][0]:
                self._seen[rank] = (pulse.put_at, now)
        ended = {rank for rank, pulse in pulses.items() if pulse.state != "running"}
        longest_s = _SILENT_PULSES * self._pulse_s
        return [rank for rank, (_, at) in enumerate(self._seen) if rank not in ended and now - at > longest_s]


def metrics(pulses: Mapping[int, Pulse]) -> dict[str, float]:
    """Return what the run shows of these ranks; without what none of them knows.

    A rank's own time is its step time without what it has waited for other ranks. The slowest rank has the most of it:
    if the ranks meet in each step, their step times are equal, and those that wait have little time of their own.
    """
    step_times = [pulse.step_s for pulse in pulses.values() if pulse.step_s is not None]
    # A rank whose steps nobody counts is taken to be in step with the others.
    usual_s = median(step_times) if step_times else 1.0
    own_times = {
        rank: pulse.own_share * (usual_s if pulse.step_s is None else pulse.step_s)
        for rank, pulse in pulses.items()
        if pulse.own_share is not None
    }
    values: dict[str, float] = {}
    if step_times:
        values |= {"ranks/step_time/median": usual_s, "ranks/step_time/max": max(step_times)}
    if step_times and own_times:
        values |= {"ranks/own_time/median": median(own_times.values()), "ranks/own_time/max": max(own_times.values())}
    if own_times:
        values["ranks/slowest"] = max(own_times, key=lambda rank: (own_times[rank], -rank))
    for key, sizes in (
        ("ranks/memory/max", [pulse.memory for pulse in pulses.values() if pulse.memory is not None]),
        ("ranks/cuda_memory/max", [pulse.cuda_memory for pulse in pulses.values() if pulse.cuda_memory is not None]),
    ):
        if sizes:
            values[key] = round(max(sizes) / 2**20, 1)
    return values


class PulseDuty(Duty):
    """Puts this rank's pulse on the board. The first primary's also reads those of all ranks."""

    topic = "pulse"

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
        self._put_at = time.monotonic()
        self._started_at = proc.started_at()
        self._node = info.worker_index if info.local_rank == 0 else None
        self._load = None if self._node is None else node_load.open_meter()
        progress.reset_steps()
        self._stop_counting = progress.count_optimizer_steps()
        self._random = random.Random()  # noqa: S311 not for keys
        self._wait_s = self._look_s
        self._warn_once = WarnOnce(logger)

    def next_wait_s(self) -> float:
        """Return a time at random, as steps may have the same rhythm."""
        self._wait_s = self._look_s * self._random.uniform(0.5, 1.5)
        return self._wait_s

    def begin(self, board: Board) -> None:
        """Say that this rank is there."""
        super().begin(board)
        self._silence = SilenceWatch(self._info.world_size, self._pulse_s, time.monotonic())
        self._put("running")

    def look(self) -> None:
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
            self._put("running")
            if self._log is not None:
                self._read(self._log)

    def end(self, has_failed: bool) -> None:
        """Say that this rank's function has ended: then it is not silent."""
        if self._stop_counting is not None:
            self._stop_counting()
        if self._load is not None:
            self._load.close()
        self._put("failed" if has_failed else "returned")

    def _put(self, state: State) -> None:
        now = time.monotonic()
        pulse = Pulse(
            step_s=self._steps.step_s(now),
            own_share=self._waits.own_share(),
            memory=proc.resident_memory(),
            cuda_memory=cuda_memory(),
            state=state,
            node=self._node,
            load={} if self._load is None or state != "running" else self._load.measure(),
        )
        self.board.put(str(self._info.rank), to_text(pulse))

    def _read(self, log: Callable[[Mapping[str, float]], None]) -> None:
        now = time.monotonic()
        present = read(self.board, self._info.world_size, since=self._started_at)
        silent = self._silence.silent(present, now)
        alive = {rank: pulse for rank, pulse in present.items() if pulse.state == "running" and rank not in silent}
        num_nodes = self._info.num_workers or self._info.world_size
        loads = {pulse.node: pulse.load for pulse in alive.values() if pulse.node is not None and pulse.load}
        knows_ranks = self._info.world_size == 1 or not self.board.is_own  # a job without a store has no other pulses
        of_ranks = {**metrics(alive), "ranks/silent": len(silent)} if knows_ranks else {}
        try:
            log({**of_ranks, **node_load.metrics(loads, num_nodes)})
        except Exception:
            self._warn_once("log", "the run does not show the pulse of its ranks", exc_info=True)


class StepClock:
    """Measures the time of a step from how many there are at each look."""

    def __init__(self) -> None:
        self._kind = ""
        self._first: tuple[float, int] | None = None  # since the last pulse: when a step was seen, and the count then
        self._last: tuple[float, int] | None = None
        self._step_s: float | None = None

    def look(self, now: float, kind: str, count: int) -> None:
        """Note the count.

        Args:
            now: The time, in seconds of `time.monotonic`.
            kind: What counts as a step: another kind begins from 0.
            count: How many steps there have been.
        """
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


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame is `frame` waits in a collective, in `backward` or for its GPU."""
    if _DISPATCHER.search(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return bool(COLLECTIVES.search(file) or _SYNCHRONIZATIONS.search(file))
