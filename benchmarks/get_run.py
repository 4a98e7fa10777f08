"""`get_run()` in a training loop: nanoseconds a call, and whether anything grows.

make bench ROWS=get_run
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPEATS, CALLS, TRACED_CALLS = 11, 100_000, 1_000_000
LIMIT_NS = 300
PRIMARY, INERT = KINDS = ("the primary", "a rank without a run")
PLACES = {"main": "in the function itself", "thread": "in a thread that it has started", "task": "in a task of asyncio"}


# In a rank. The rest of the benchmarks is not there.


def rank() -> None:
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench", id="bench")
    def train() -> dict[str, float]:
        found = {"main": nanoseconds(get_run), "thread": in_a_thread(nanoseconds, get_run)}
        return {**found, "task": asyncio.run(in_a_task(get_run)), "grown": grown(get_run)}

    Path("figures.json").write_text(json.dumps(train()))


def nanoseconds(call: Callable[[], Any]) -> float:
    """Of one call, without those of the loop."""
    return statistics.median(_of_a_loop(call) for _ in range(REPEATS))


def _of_a_loop(call: Callable[[], Any]) -> float:
    numbers = range(CALLS)
    began = time.perf_counter_ns()
    for _ in numbers:
        pass
    looped = time.perf_counter_ns()
    for _ in numbers:
        call()
    return (time.perf_counter_ns() - looped - (looped - began)) / CALLS


def in_a_thread(measure: Callable[[Callable[[], Any]], float], call: Callable[[], Any]) -> float:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(measure(call)))
    thread.start()
    thread.join()
    return found[0]


async def in_a_task(call: Callable[[], Any]) -> float:
    async def task() -> float:
        return nanoseconds(call)

    return await asyncio.create_task(task())


def grown(call: Callable[[], Any]) -> float:
    """Bytes that are allocated after so many calls, and were not before."""
    tracemalloc.start()
    in_a_thread(lambda called: float(called() is None), call)
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(TRACED_CALLS):
        call()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


# In the one who measures


def main() -> None:
    import peers
    from child import measured, rank_of_eight
    from paired import Goal, Quantity, Result, in_turn, median, publish, table

    python = peers.python("wandb")
    ranks = {PRIMARY: 0, INERT: 1}
    found = in_turn(
        KINDS, lambda kind: measured(python, __file__, "rank", variables=rank_of_eight(ranks[kind])), pairs=3
    )
    quantities = [Quantity(place, f"{where}, ns a call", "{:.0f}") for place, where in PLACES.items()]
    quantities.append(Quantity("grown", f"bytes that {TRACED_CALLS:,} calls leave allocated", "{:.0f}"))
    slowest = {place: max(median(found, kind, place) for kind in KINDS) for place in PLACES}
    # The run's threads allocate too, in some of the processes. What a call keeps is there in each of them.
    most_grown = max(min(one["grown"] for one in found[kind]) for kind in KINDS)
    goals = [
        Goal(f"`get_run()` {where}", f"{LIMIT_NS} ns", f"{slowest[place]:.0f} ns", slowest[place] <= LIMIT_NS)
        for place, where in PLACES.items()
    ]
    # Some bytes are those of the measuring.
    goals.append(
        Goal(f"{TRACED_CALLS:,} calls of `get_run()`", "nothing grows", f"{most_grown:.0f} bytes", most_grown < 1024)
    )
    publish(
        "get_run",
        Result(
            f"Medians of {REPEATS} loops of {CALLS:,} calls, in 3 processes of each kind.\n\n"
            + table("`get_run()`", quantities, found),
            goals,
            found,
        ),
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        main()
