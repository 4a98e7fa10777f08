"""What `should_stop()` costs: a call, a step with it, and the job's store with 1,024 ranks; and how fast ranks agree.

make bench ROWS=stopping
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import get_run
import pulse

RANKS, WATCHED_S = 1024, 15.0
TURNS, TRAINING_S = 25, 1.0
LIMIT_NS, MOST_SLOWDOWN, MOST_CPU, MOST_AGREEMENT_S = 200, 0.005, 0.10, 10.0
OFF, ON = KINDS = ("without", "with should_stop()")
ALONE, IN_JOB = PLACES = ("in one process", "in a job, whose board is looked at")


# In a process


def call_in_turn(path: Path) -> None:
    """Write down the nanoseconds of a call."""
    from flyteplugins_tracking import should_stop, tracking_init
    from flyteplugins_tracking.testing import RecordingTracker

    @tracking_init(tracker=RecordingTracker())
    def train() -> float:
        should_stop()
        return get_run.nanoseconds(should_stop)

    path.write_text(json.dumps(train()))


def train_in_turn(path: Path) -> None:
    """Write down a step's time and CPU time of each kind and turn, on the only rank of a job of two that has come."""
    step = pulse.calibrated_step()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(TURNS):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
            found[kind].append(trained(step, kind))
    path.write_text(json.dumps(found))


def trained(step: Callable[[], None], kind: str) -> dict[str, float]:
    import statistics

    from flyteplugins_tracking import should_stop, tracking_init
    from flyteplugins_tracking.testing import RecordingTracker

    def stop() -> bool:
        return kind == ON and should_stop()

    @tracking_init(tracker=RecordingTracker())
    def train() -> dict[str, float]:
        stop()
        taken, cpu_s, began = [], time.process_time(), time.perf_counter()
        while time.perf_counter() - began < TRAINING_S:
            taken.append(pulse.seconds(lambda _: (step(), stop()), None))
        cpu_s = time.process_time() - cpu_s
        return {"step_ms": statistics.median(taken) * 1e3, "cpu_ms": cpu_s / len(taken) * 1e3}

    return train()


class Job:
    """The watches of 1,024 ranks in one process, each with a connection of its own: two threads look for all."""

    def __init__(self, port: int) -> None:
        from torch.distributed import TCPStore

        from flyteplugins_tracking import DistributedInfo
        from flyteplugins_tracking._job.agreement import Agreement
        from flyteplugins_tracking._job.board import Board

        def board() -> Board:
            return Board(TCPStore("127.0.0.1", port, is_master=False), "monitor")

        with ThreadPoolExecutor(32) as pool:  # each takes a tenth of a second
            boards = list(pool.map(lambda _: board(), range(RANKS)))
        place = {"local_rank": 0, "local_world_size": 8, "launcher": "torchelastic"}
        self.ranks = [Agreement(DistributedInfo(rank, RANKS, **place), "stop/1") for rank in range(RANKS)]
        for number, rank in enumerate(self.ranks):
            rank.begin(boards[number])
            rank.due_at = time.monotonic() + rank.next_wait_s() * number / RANKS
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._look, args=(half,)) for half in (0, 1)]
        for thread in self.threads:
            thread.start()

    def _look(self, half: int) -> None:
        """Look at the times at which the ranks' watches would."""
        while not self.ended.is_set():
            for rank in self.ranks[half::2]:
                if rank.due_at <= time.monotonic():
                    rank.look()
                    rank.due_at = time.monotonic() + rank.next_wait_s()
            time.sleep(0.001)

    def agreement_s(self) -> float:
        """Seconds from the request on one rank until the last one knows of the decision."""
        from flyteplugins_tracking._job.agreement import StopRequest

        began = time.monotonic()
        self.ranks[777].request(StopRequest("a reason"))
        while any(rank.committed is None for rank in self.ranks) and time.monotonic() < began + 60:
            time.sleep(0.005)
        return time.monotonic() - began

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


# In the one who measures


def job_of(port: int) -> dict[str, str]:
    """The variables of a rank whose agent has the job's store there."""
    from child import rank_of_eight

    return {
        **pulse.environment(),
        **rank_of_eight(0),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def measured(what: str, env: dict[str, str]) -> Any:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "figures.json"
        subprocess.run([sys.executable, __file__, what, path], env=env, check=True, timeout=600)
        return json.loads(path.read_text())


def main() -> None:
    import paired

    command = [sys.executable, pulse.__file__, "serve"]
    with subprocess.Popen(
        command, env=pulse.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout
        port = int(stdout.readline())

        def cpu_s() -> float:
            stdin.write("\n")
            stdin.flush()
            return float(stdout.readline())

        call_ns = {ALONE: measured("call", pulse.environment()), IN_JOB: measured("call", job_of(port))}
        steps = measured("train", job_of(port))
        job = Job(port)
        before, began = cpu_s(), time.monotonic()
        time.sleep(WATCHED_S)
        cpu = (cpu_s() - before) / (time.monotonic() - began)
        agreement_s = job.agreement_s()
        job.end()
        stdin.close()
    more = {key: paired.ratio(steps, key, ON, OFF) - 1 for key in ("step_ms", "cpu_ms")}
    lines = [
        "| `should_stop()` | ns a call |",
        "|---|---:|",
        *(f"| {place} | {call_ns[place]:.0f} |" for place in PLACES),
        "",
        "| a step | ms | more | CPU of the process, ms | more |",
        "|---|---:|---:|---:|---:|",
        f"| {OFF} | {paired.median(steps, OFF, 'step_ms'):.2f} | | {paired.median(steps, OFF, 'cpu_ms'):.2f} | |",
        f"| with `should_stop()` | {paired.median(steps, ON, 'step_ms'):.2f} | {more['step_ms']:+.2%} "
        f"| {paired.median(steps, ON, 'cpu_ms'):.2f} | {more['cpu_ms']:+.2%} |",
        "",
        f"| {RANKS:,} ranks | |",
        "|---|---:|",
        f"| CPU of the store's process, of one core | {cpu:.2%} |",
        f"| from the request until the last rank knows of the decision, s | {agreement_s:.1f} |",
    ]
    goals = [
        paired.Goal(
            "`should_stop()`",
            f"{LIMIT_NS} ns",
            f"{max(call_ns.values()):.0f} ns",
            max(call_ns.values()) <= LIMIT_NS,
        ),
        paired.Goal(
            "a training step with `should_stop()`, against none",
            f"at most {MOST_SLOWDOWN:.1%} slower",
            f"{more['step_ms']:+.2%} (CPU {more['cpu_ms']:+.2%})",
            more["step_ms"] <= MOST_SLOWDOWN,
        ),
        paired.Goal(
            f"{RANKS:,} ranks that may stop: the store's CPU, and the time to agree",
            f"at most {MOST_CPU:.0%} of a core, {MOST_AGREEMENT_S:g} s",
            f"{cpu:.2%}, {agreement_s:.1f} s",
            cpu <= MOST_CPU and agreement_s <= MOST_AGREEMENT_S,
        ),
    ]
    found = {"job": [{**call_ns, "cpu": cpu, "agreement_s": agreement_s}], **steps}
    paired.publish("stopping", paired.Result("\n".join(lines), goals, found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        call_in_turn(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["train"]:
        train_in_turn(Path(sys.argv[2]))
    else:
        main()
