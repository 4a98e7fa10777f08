"""A rank that gets no run, rank 1 of 8 in mode auto: what the decorator costs it, ours and that of flyteplugins-wandb.

make bench ROWS=inert_rank
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peers
from child import measured, rank_of_eight
from paired import Figures, Found, Goal, Quantity, Result, difference, in_turn, median, publish, table

PAIRS = 7
OURS, UNDECORATED, PEER = KINDS = ("ours", "undecorated", "flyteplugins-wandb")
DECORATOR = {
    OURS: 'from flyteplugins_tracking import tracking_init; decorator = tracking_init(project="bench")',
    UNDECORATED: "decorator = lambda function: function",
    PEER: 'from flyteplugins.wandb import wandb_init; decorator = wandb_init(project="bench")',
}
# Texts and no modules of the benchmarks: a child imports what its script does, and nothing else.
TORCH = "import torch, torch.distributed\n"
FLYTE = """\
import flyte
from flyte._context import internal_ctx
from flyte.models import ActionID, RawDataPath, TaskContext
from flyte.report import Report
"""
FUNCTION = """\
{decorator}
@decorator
def train():
    pass
train()
"""
# As a worker of Elastic calls a task's function: see `launcher_entrypoint` of flyteplugins-pytorch.
TASK = """\
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
# The costs of what stands between the two, in this process and in the helpers that it has waited for.
BEFORE = """\
import gc, os, time
gc.collect()
def costs():
    times = os.times()
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return time.process_time() + times.children_user + times.children_system, resident
cpu_s, resident = costs()
"""
AFTER = """\
now_s, now_resident = costs()
figures = '{"cpu_ms": %f, "rss_mib": %f}' % ((now_s - cpu_s) * 1e3, (now_resident - resident) / 2**20)
open("figures.json", "w").write(figures)
"""
COUNTED = """\
import os, sys, threading
events, written, started, start, loaded = [], [], [], threading.Thread.start, set(sys.modules)
def see(event, arguments):
    events.append(event)
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.append(arguments[0])
sys.addaudithook(see)
threading.Thread.start = lambda thread: started.append(thread) or start(thread)
"""
COUNTS = """
processes = sum(event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system") for event in events)
packages = {name.partition(".")[0] for name in set(sys.modules) - loaded} - {"flyteplugins_tracking"}
foreign = len(packages - sys.stdlib_module_names)
figures = (processes, len(started), len(written), foreign)
open("figures.json", "w").write('{"processes": %d, "threads": %d, "files": %d, "foreign": %d}' % figures)
"""
COUNTED_KEYS = ("processes", "threads", "files", "foreign")
QUANTITIES = (
    Quantity("cpu_ms", "CPU, ms"),
    Quantity("rss_mib", "memory (RSS), MiB"),
    Quantity("processes", "processes that it starts", "{:.0f}"),
    Quantity("threads", "threads that it starts", "{:.0f}"),
    Quantity("files", "files that it opens to write", "{:.0f}"),
    Quantity("foreign", "packages that it loads: not its own, not the standard library's", "{:.0f}"),
)


@dataclass(frozen=True)
class Case:
    """A process that calls a function: what it has imported before, how it calls it, and what that may cost."""

    title: str
    before: str
    script: str
    limit_ms: float
    limit_mib: float | None = None


CASES = (
    Case("a plain function, torch imported", TORCH, FUNCTION, 15, 1),
    Case("in a worker of a Flyte 2 task, torch imported", TORCH + FLYTE, TASK, 15, 1),
    Case("a plain function, bare interpreter", "", FUNCTION, 40),
)


def measure(python: Path, case: Case, kind: str, before: str = BEFORE, after: str = AFTER) -> Figures:
    script = case.before + before + case.script.format(decorator=DECORATOR[kind]) + after
    return {**measured(python, "-c", script, variables=rank_of_eight(1))}


def compared(python: Path, case: Case) -> dict[str, list[Figures]]:
    # Counted in a run of its own, which the watching would make slower, and which warms the file cache.
    counts = {kind: measure(python, case, kind, COUNTED, COUNTS) for kind in KINDS}
    counted = {kind: {key: counts[kind][key] for key in COUNTED_KEYS} for kind in KINDS}
    return in_turn(KINDS, lambda kind: {**measure(python, case, kind), **counted[kind]}, PAIRS)


def goals(case: Case, found: Found) -> list[Goal]:
    ms, mib = (difference(found, key, OURS, UNDECORATED) for key in ("cpu_ms", "rss_mib"))
    peer_ms = difference(found, "cpu_ms", PEER, UNDECORATED)
    started = sum(median(found, OURS, key) - median(found, UNDECORATED, key) for key in COUNTED_KEYS)
    memory = "" if case.limit_mib is None else f", {case.limit_mib:.0f} MiB"
    return [
        Goal(
            f"a rank that logs nothing, {case.title}, over undecorated",
            f"{case.limit_ms:.0f} ms of CPU{memory}; no process, thread, file or vendor",
            f"{ms:.1f} ms{f', {mib:.1f} MiB' if memory else ''}; {started:.0f} of these",
            ms <= case.limit_ms and (case.limit_mib is None or mib <= case.limit_mib) and not started,
        ),
        Goal(
            f"a rank that logs nothing, {case.title}, against {PEER}",
            "20x less CPU",
            f"{peer_ms / max(ms, 0.5):.0f}x less CPU",  # what cannot be told from nothing counts as a little
            peer_ms / max(ms, 0.5) >= 20,
        ),
    ]


def main() -> None:
    python = peers.python(PEER)
    found = {case: compared(python, case) for case in CASES}
    tables = "\n\n".join(table(case.title, QUANTITIES, figures) for case, figures in found.items())
    publish(
        "inert_rank",
        Result(
            f"{PAIRS} pairs.\n\n{tables}",
            [goal for case, figures in found.items() for goal in goals(case, figures)],
            {f"{case.title}, {kind}": figures[kind] for case, figures in found.items() for kind in KINDS},
        ),
    )


if __name__ == "__main__":
    main()
