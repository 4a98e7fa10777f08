"""A rank that gets no run, rank 1 of 8 in mode auto: what the decorator costs it, ours and that of flyteplugins-wandb.

make bench ROWS=inert_rank
"""

from __future__ import annotations

from pathlib import Path

import peers
from child import measured, rank_of_eight
from paired import Figures, Found, Goal, Quantity, Result, difference, in_turn, publish, table

PAIRS = 11
OURS, UNDECORATED, PEER = KINDS = ("ours", "undecorated", "flyteplugins-wandb")
DECORATOR = {
    OURS: 'from flyteplugins_tracking import tracking_init; decorator = tracking_init(project="bench")',
    UNDECORATED: "decorator = lambda function: function",
    PEER: 'from flyteplugins.wandb import wandb_init; decorator = wandb_init(project="bench")',
}
# Texts and no modules of the benchmarks: a child imports what its script does, and nothing else.
FUNCTION = """\
{decorator}
@decorator
def train():
    pass
train()
"""
# As a worker of Elastic calls a task's function: see `launcher_entrypoint` of flyteplugins-pytorch.
TASK = """\
import flyte
from flyte._context import internal_ctx
from flyte.models import ActionID, RawDataPath, TaskContext
from flyte.report import Report
{decorator}
class Elastic:
    nnodes, nproc_per_node = 1, 8
@flyte.TaskEnvironment(name="bench").task
def train() -> None:
    pass
train.plugin_config = Elastic()
train = decorator(train)
context = TaskContext(
    action=ActionID(name="action", run_name="run", project="p", domain="d", org="o"), version="v", mode="remote",
    raw_data_path=RawDataPath(path="raw"), output_path=".", run_base_dir=".", report=Report(name="report"),
)
with internal_ctx().replace_task_context(context):
    train.func()
"""
# Its own high-water mark: what the system tells the parent of a child begins with the parent's own memory.
PEAK = """
mark = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
open("figures.json", "w").write('{"peak_mib": %f}' % (int(mark) / 1024))
"""
COUNTED = """\
import sys, threading
events, started, start = [], [], threading.Thread.start
sys.addaudithook(lambda event, _: events.append(event))
threading.Thread.start = lambda thread: started.append(thread) or start(thread)
"""
COUNTS = """
processes = sum(event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system") for event in events)
open("figures.json", "w").write('{"processes": %d, "threads": %d}' % (processes, len(started)))
"""
QUANTITIES = (
    Quantity("wall_ms", "process start to end, ms"),
    Quantity("cpu_ms", "CPU with its children's, ms"),
    Quantity("peak_mib", "its own memory at most (RSS), MiB"),
    Quantity("processes", "processes that it starts", "{:.0f}"),
    Quantity("threads", "threads that it starts", "{:.0f}"),
)


def measure(python: Path, text: str, kind: str) -> Figures:
    script = text.format(decorator=DECORATOR[kind])
    found = measured(python, "-c", script + PEAK, variables=rank_of_eight(1))
    return {"wall_ms": found["wall_s"] * 1e3, "cpu_ms": found["cpu_s"] * 1e3, "peak_mib": found["peak_mib"]}


def counts(python: Path, text: str, kind: str) -> Figures:
    """In a run of its own, which the watching would make slower, and which warms the file cache."""
    script = COUNTED + text.format(decorator=DECORATOR[kind]) + COUNTS
    found = measured(python, "-c", script, variables=rank_of_eight(1))
    return {"processes": found["processes"], "threads": found["threads"]}


def compared(python: Path, text: str) -> dict[str, list[Figures]]:
    counted = {kind: counts(python, text, kind) for kind in KINDS}
    return in_turn(KINDS, lambda kind: {**measure(python, text, kind), **counted[kind]}, PAIRS)


def goals(where: str, found: Found) -> list[Goal]:
    wall, mib = (difference(found, key, OURS, UNDECORATED) for key in ("wall_ms", "peak_mib"))
    peer_wall, peer_mib = (difference(found, key, PEER, UNDECORATED) for key in ("wall_ms", "peak_mib"))
    # What cannot be told from nothing counts as a little, not as a negative or endless ratio.
    times, mib_times = peer_wall / max(wall, 0.5), peer_mib / max(mib, 0.1)
    return [
        Goal(
            f"a rank that logs nothing, {where}, over undecorated",
            "15 ms, 3 MiB",
            f"{wall:.1f} ms, {mib:.1f} MiB",
            wall <= 15 and mib <= 3,
        ),
        Goal(
            f"a rank that logs nothing, {where}, against {PEER}",
            "20x less time and memory",
            f"{times:.0f}x less time, {mib_times:.0f}x less memory",
            times >= 20 and mib_times >= 20,
        ),
    ]


def main() -> None:
    python = peers.python(PEER)
    plain, task = compared(python, FUNCTION), compared(python, TASK)
    publish(
        "inert_rank",
        Result(
            f"{PAIRS} pairs.\n\n{table('a plain function', QUANTITIES, plain)}\n\n"
            f"{table('in a worker of a Flyte 2 task', QUANTITIES, task)}",
            [*goals("a plain function", plain), *goals("a worker of a Flyte 2 task", task)],
            {**{f"function, {kind}": plain[kind] for kind in KINDS}, **{f"task, {kind}": task[kind] for kind in KINDS}},
        ),
    )


if __name__ == "__main__":
    main()
