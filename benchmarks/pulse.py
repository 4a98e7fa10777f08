"""What `pulse_s` costs: a rank's step, and the job's store with 1,024 ranks.

make bench ROWS=pulse
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RANKS, PULSE_S, PULSES, SLOW_RANK = 1024, 15.0, 3, 777
# How often a rank trains with each kind, and how long; the length of a step, half of which is Python and half torch.
TURNS, TRAINING_S, STEP_MS = 50, 1.0, 25.0
MOST_SLOWDOWN, MOST_CPU, MOST_READ_MS = 0.005, 0.05, 1000.0
OFF, ON, FREQUENT = KINDS = ("none", "15", "0.15")
PULSE_OF = {OFF: None, ON: PULSE_S, FREQUENT: PULSE_S / 100}
# A rank looks 133 times a second with 0.15 s and 4 times with 15 s; and it puts 100 times as many pulses.
TIMES_AS_OFTEN = (20 / 0.15) / 4


# In a rank


def train_in_turn(path: Path) -> None:
    """Write down a step's time and CPU time of each kind and turn."""
    step = calibrated_step()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(TURNS):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
            found[kind].append(trained(step, PULSE_OF[kind]))
    path.write_text(json.dumps(found))


def calibrated_step() -> Callable[[], None]:
    import torch

    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def torch_step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    batch = torch.randn(256, 256)
    taken = [seconds(torch_step, batch) for _ in range(50)]
    batch = torch.randn(max(1, int(256 * STEP_MS / 2e3 / statistics.median(taken))), 256)
    taken = [seconds(python_step, range(100_000)) for _ in range(50)]
    numbers = range(int(100_000 * STEP_MS / 2e3 / statistics.median(taken)))

    def step() -> None:
        torch_step(batch)
        python_step(numbers)

    return step


def python_step(numbers: range) -> None:
    """Holds the GIL."""
    for _ in map(int, numbers):
        pass


def seconds(function: Callable[[Any], Any], argument: Any) -> float:
    began = time.perf_counter()
    function(argument)
    return time.perf_counter() - began


def trained(step: Callable[[], None], pulse_s: float | None) -> dict[str, float]:
    from flyteplugins_tracking import get_run, tracking_init
    from flyteplugins_tracking.testing import RecordingTracker

    @tracking_init(tracker=RecordingTracker(), pulse_s=pulse_s)
    def train() -> dict[str, float]:
        taken, cpu_s, began = [], time.process_time(), time.perf_counter()
        while time.perf_counter() - began < TRAINING_S:
            taken.append(seconds(lambda _: step(), None))
            get_run().log({"step": len(taken)})
        cpu_s = time.process_time() - cpu_s
        return {"step_ms": statistics.median(taken) * 1e3, "cpu_ms": cpu_s / len(taken) * 1e3}

    return train()


# The store of a job, in a process of its own


def serve() -> None:
    """Print the port; then the CPU seconds, whenever a line is read."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


class Job:
    """1,024 ranks, each with a connection of its own, whose pulses are put by a thread; the primary reads them."""

    def __init__(self, port: int) -> None:
        from torch.distributed import TCPStore

        from flyteplugins_tracking._job.board import Board

        def board() -> Board:
            return Board(TCPStore("127.0.0.1", port, is_master=False), "pulse")

        with ThreadPoolExecutor(32) as pool:  # each takes a tenth of a second
            self.boards: list[Board] = list(pool.map(lambda _: board(), range(RANKS)))
        self.primary = board()
        self.is_slow = False

    def put(self, rank: int) -> None:
        from flyteplugins_tracking._job import pulse as pulses

        is_late = self.is_slow and rank == SLOW_RANK
        # All ranks meet in each step: the others wait for the slow one.
        own = 0.95 if is_late or not self.is_slow else 0.1
        pulse = pulses.Pulse(2.0 if self.is_slow else 0.2, own, 4 << 30, 70 << 30)
        pulses.put(self.boards[rank], rank, pulse)

    def run(self) -> dict[str, Any]:
        """Each rank's pulses are apart by 15 s, and the ranks' are spread over these."""
        from flyteplugins_tracking._job import pulse as pulses

        reads: list[float] = []
        named_after = 0
        began = time.monotonic()
        for number in range(PULSES):
            self.is_slow = number >= 1
            for rank in range(RANKS):
                time.sleep(max(0.0, began + (number + rank / RANKS) * PULSE_S - time.monotonic()))
                self.put(rank)
            started = time.perf_counter()
            values = pulses.metrics(pulses.read(self.primary, RANKS))
            reads.append((time.perf_counter() - started) * 1e3)
            if self.is_slow and not named_after and values["ranks/slowest"] == SLOW_RANK:
                named_after = number
        return {"first_read_ms": reads[0], "read_ms": statistics.median(reads[1:]), "named_after": named_after}

    def most_puts_per_s(self, lasting_s: float = 3.0) -> float:
        """As fast as two threads can."""
        counts = [0, 0]
        until = time.monotonic() + lasting_s

        def hammer(half: int) -> None:
            while time.monotonic() < until:
                self.put(half + 2 * (counts[half] % (RANKS // 2)))
                counts[half] += 1

        threads = [threading.Thread(target=hammer, args=(half,)) for half in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / lasting_s


# In the one who measures


def environment() -> dict[str, str]:
    import paired

    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(paired.ROOT)}


def measure_steps() -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "steps.json"
        subprocess.run([sys.executable, __file__, "rank", path], env=environment(), check=True, timeout=600)
        found: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
        return found


def measure_store() -> dict[str, float]:
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def cpu_s() -> float:
            server.stdin.write("\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        job = Job(port)
        before, began = cpu_s(), time.monotonic()
        found = job.run()
        found["cpu"] = (cpu_s() - before) / (time.monotonic() - began)
        before = cpu_s()
        found["most_puts_per_s"] = job.most_puts_per_s()
        server.stdin.close()
    return {**found, "requests_per_s": (RANKS + 1) / PULSE_S}


def shown(share: float | None) -> str:
    return "" if share is None else f"{share:+.2%}"


def main() -> None:
    import paired

    store = measure_store()
    steps = measure_steps()
    more = {
        (kind, key): paired.ratio(steps, key, kind, OFF) - 1 for kind in (ON, FREQUENT) for key in ("step_ms", "cpu_ms")
    }
    most = max(more[FREQUENT, "step_ms"], more[FREQUENT, "cpu_ms"])
    scaled = max(0.0, most) / TIMES_AS_OFTEN
    lines = [
        "| `pulse_s` | step, ms | more than none | CPU of the process a step, ms | more than none |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {kind} | {paired.median(steps, kind, 'step_ms'):.2f} | {shown(more.get((kind, 'step_ms')))} "
            f"| {paired.median(steps, kind, 'cpu_ms'):.2f} | {shown(more.get((kind, 'cpu_ms')))} |"
            for kind in KINDS
        ),
        "",
        f"| the store of {RANKS:,} ranks, `pulse_s=15` | |",
        "|---|---:|",
        f"| requests a second | {store['requests_per_s']:.0f} |",
        f"| CPU of the store's process, of one core | {store['cpu']:.2%} |",
        f"| the primary reads and judges all ranks, ms | {store['read_ms']:.1f} |",
        f"| the first time, ms | {store['first_read_ms']:.1f} |",
        f"| puts a second that two threads can make | {store['most_puts_per_s']:,.0f} |",
        f"| pulses until the one slow rank is named | {store['named_after']:.0f} |",
    ]
    goals = [
        paired.Goal(
            "a training step with `pulse_s=15`, against none",
            f"at most {MOST_SLOWDOWN:.1%} slower",
            f"{scaled:.3%} ({most:.2%} with {TIMES_AS_OFTEN:.0f} times as many looks)",
            scaled <= MOST_SLOWDOWN,
        ),
        paired.Goal(
            f"the pulse of {RANKS:,} ranks: the store's CPU, and the primary's read",
            f"at most {MOST_CPU:.0%} of a core, {MOST_READ_MS:g} ms",
            f"{store['cpu']:.2%}, {store['read_ms']:.0f} ms",
            store["cpu"] <= MOST_CPU and store["read_ms"] <= MOST_READ_MS,
        ),
        paired.Goal(
            f"one slow rank of {RANKS:,} is named",
            "within 2 pulses",
            f"{store['named_after']:.0f}",
            1 <= store["named_after"] <= 2,
        ),
    ]
    paired.publish("pulse", paired.Result("\n".join(lines), goals, {"store": [store], **steps}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train_in_turn(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["serve"]:
        serve()
    else:
        main()
