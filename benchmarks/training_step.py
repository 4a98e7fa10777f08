"""The step of a training on two ranks, with and without tracking: DDP of a small model, over gloo, on this machine.

One torchrun job trains in turn without tracking, with wandb as it is on rank 0, and with this package. In each of these
trainings a few steps log and a few do not, in turn, since two ranks on a machine's only cores have no steady step.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NONE, BARE, AUTO, SHARED = KINDS = ("no tracking", "wandb on rank 0", "ours, auto", "ours, shared by both ranks")
# How often each kind trains, and for how many steps; and how many steps in a row log, or do not.
TURNS, STEPS, BLOCK = 4, 360, 5
STEP_MS, MOST_STEP, MOST_P99 = 25.0, 1.02, 1.1
WIDTH = 256
# A step with its `log`, and the `log` alone, in ms.
Steps = list[tuple[float, float]]
Training = Callable[[Callable[[], Any]], Steps]


# In a rank


def train_in_turn(directory: Path) -> None:
    """Train in all kinds in turn; rank 0 writes down what each step has taken, in ms."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = calibrated_step()
    trainings = kinds_of_training()
    found: dict[str, list[Steps]] = {kind: [] for kind in KINDS}
    for turn in range(TURNS):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
            dist.barrier()
            found[kind].append(trainings[kind](step))
    if dist.get_rank() == 0:
        (directory / "steps.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def calibrated_step() -> Callable[[], Any]:
    """A step that takes about `STEP_MS` on this machine, by the size of its batch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(64, WIDTH)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(4):
        size = torch.tensor([len(batch) * STEP_MS / statistics.median(took for took, _ in timed(step, nothing, 30))])
        dist.broadcast(size, 0)
        batch = torch.randn(max(1, int(size)), WIDTH)
    return step


def timed(step: Callable[[], Any], log: Callable[[dict[str, Any]], Any], steps: int = STEPS) -> Steps:
    taken = []
    for n in range(steps):
        began = time.perf_counter()
        loss = step()
        stepped = time.perf_counter()
        if logs(n):
            log({"loss": loss, "epoch": n // 50, "step": n, "lr": 1e-4, "samples": n * 64})
        ended = time.perf_counter()
        taken.append(((ended - began) * 1e3, (ended - stepped) * 1e3))
    return taken


def logs(n: int) -> bool:
    """Whether the step logs, in blocks: A B B A."""
    return n // BLOCK % 4 in (1, 2)


def nothing(_: object) -> None:
    pass


def kinds_of_training() -> dict[str, Training]:
    from flyteplugins_tracking import get_run, tracking_init

    def tracked(step: Callable[[], Any]) -> Steps:
        run = get_run()
        return timed(step, nothing if run is None else run.log)

    def bare(step: Callable[[], Any]) -> Steps:
        if os.environ["RANK"] != "0":
            return timed(step, nothing)
        import wandb

        with wandb.init(project="bench") as run:
            return timed(step, run.log)

    return {
        NONE: lambda step: timed(step, nothing),
        BARE: bare,
        AUTO: tracking_init(project="bench", run_mode="auto")(tracked),
        SHARED: tracking_init(project="bench", run_mode="shared")(tracked),
    }


# In the one who measures


def measure(python: Path) -> dict[str, list[Steps]]:
    """The steps of one job, by kind and turn."""
    from support import jobs

    with tempfile.TemporaryDirectory() as name, served_at_leisure() as server:
        # So often that sending, every 15 s by default, is in the steps of each turn.
        env = {**server.environment, "PYTHONPATH": "", "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "rank", name]
        done = jobs.run(command, Path(name), env, timeout_s=280)
        assert done.returncode == 0, done.output
        rows, logged = sorted(len(run.rows) for run in server.runs), sum(map(logs, range(STEPS)))
        assert rows == [logged] * 2 * TURNS + [2 * logged] * TURNS, rows
        found: dict[str, list[Steps]] = json.loads((Path(name) / "steps.json").read_text())
        return found


@contextlib.contextmanager
def served_at_leisure() -> Iterator[Any]:
    """A server whose threads run where the ranks leave time: in life it is on another machine."""
    from support.wandb_server import WandbServer

    server = WandbServer()

    def start() -> None:
        if sys.platform == "linux":  # of this thread, and of those that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        server.__enter__()

    starting = threading.Thread(target=start)
    starting.start()
    starting.join()
    try:
        yield server
    finally:
        server.__exit__(None)


def figures(steps: Steps) -> dict[str, float]:
    """Of one turn: medians, and 99th percentiles."""
    with_log = [took for n, (took, _) in enumerate(steps) if logs(n)]
    without = [took for n, (took, _) in enumerate(steps) if not logs(n)]
    return {
        "without_ms": statistics.median(without),
        "with_ms": statistics.median(with_log),
        "without_p99_ms": p99(without),
        "with_p99_ms": p99(with_log),
        "log_us": statistics.median(own for n, (_, own) in enumerate(steps) if logs(n)) * 1e3,
    }


def ratios(turns: Sequence[Steps]) -> tuple[float, float]:
    """Of the steps that log to those that do not: of the medians, and of the 99th percentiles.

    Each step is taken relative to its own turn's, and then all turns together: a turn alone has too few.
    """
    with_log, without = [], []
    for steps in turns:
        typical = figures(steps)["without_ms"]
        for n, (took, _) in enumerate(steps):
            (with_log if logs(n) else without).append(took / typical)
    return statistics.median(with_log) / statistics.median(without), p99(with_log) / p99(without)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


HEADS = ("step without `log`, ms", "with `log`, ms", "ratio", "99th percentile without, ms", "with, ms", "ratio")


def table(found: Mapping[str, Sequence[Mapping[str, float]]], related: Mapping[str, tuple[float, float]]) -> str:
    lines = [f"| rank 0 | {' | '.join(HEADS)} | `log` itself, us |", f"|---|{'---:|' * (len(HEADS) + 1)}"]
    for kind, turns in found.items():
        middle = {key: statistics.median(one[key] for one in turns) for key in turns[0]}
        lines.append(
            f"| {kind} | {middle['without_ms']:.1f} | {middle['with_ms']:.1f} | {related[kind][0]:.3f} "
            f"| {middle['without_p99_ms']:.1f} | {middle['with_p99_ms']:.1f} | {related[kind][1]:.2f} "
            f"| {middle['log_us']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    import paired
    import peers

    steps = measure(peers.python("flytekitplugins-wandb"))
    found = {kind: [figures(turn) for turn in turns] for kind, turns in steps.items()}
    related = {kind: ratios(turns) for kind, turns in steps.items()}
    goals = []
    for kind in (AUTO, SHARED):
        step, last = related[kind]
        goals.append(
            paired.Goal(
                f"a training step that logs 5 keys, {kind}: median and 99th percentile",
                f"at most {MOST_STEP}x and {MOST_P99}x",
                f"{step:.3f}x and {last:.2f}x (wandb on rank 0: {related[BARE][0]:.3f}x and {related[BARE][1]:.2f}x)",
                step <= MOST_STEP and last <= MOST_P99,
            )
        )
    text = (
        f"{table(found, related)}\n\nMedians of {TURNS} turns of {STEPS} steps, of which every other {BLOCK} log; the "
        "ratios are those of all turns together."
    )
    paired.publish("training_step", paired.Result(text, goals, found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train_in_turn(Path(sys.argv[2]))
    else:
        main()
