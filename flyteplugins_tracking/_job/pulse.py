"""The pulse of a job: what each rank puts on the board every few seconds, and what follows from that of all ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Literal

from flyteplugins_tracking._job.board import Board

TOPIC = "pulse"
# A rank is silent if it has put nothing on the board for so many pulses.
SILENT_PULSES = 2

State = Literal["running", "returned", "failed"]


@dataclass(frozen=True)
class Pulse:
    """The state that a rank has put on the board.

    Attributes:
        steps: The steps that it has made since the function began.
        step_s: Seconds per step between this pulse and the one before; None if that is unknown.
        own_share: The share of the time since the pulse before that it has not waited for other ranks; None if unknown.
        memory: Its resident memory, in bytes; None if unknown.
        cuda_memory: What torch has reserved on its GPUs, in bytes; None without CUDA.
        state: Whether its function runs, has returned or has failed.
        host: The host's name.
        pid: The process.
        put_at: When, in seconds since the epoch, by the clock of the host.
    """

    steps: int = 0
    step_s: float | None = None
    own_share: float | None = None
    memory: int | None = None
    cuda_memory: int | None = None
    state: State = "running"
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    put_at: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """Return the pulse as text for the job's board."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Pulse:
        """Return the pulse from the text of `to_json`."""
        return cls(**json.loads(text))


def put(board: Board, rank: int, pulse: Pulse) -> None:
    """Put the pulse of a rank on the board, in the place of its last one."""
    board.put(str(rank), pulse.to_json())


def read(board: Board, world_size: int, since: float = 0.0) -> dict[int, Pulse]:
    """Return the last pulse of each rank that has one.

    Args:
        board: The board of the topic `TOPIC`.
        world_size: The number of ranks.
        since: Leave out pulses that are older, in seconds since the epoch: of an earlier attempt on the same board.
    """
    texts = board.get_all(str(rank) for rank in range(world_size))
    pulses = {rank: Pulse.from_json(text) for rank, text in enumerate(texts) if text is not None}
    return {rank: pulse for rank, pulse in pulses.items() if pulse.put_at >= since}


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
        longest_s = SILENT_PULSES * self._pulse_s
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
