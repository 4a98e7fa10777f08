"""A node of eight ranks in flytekit's Elastic until each is in its function: no tracking, ours, and the peer's."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from node import Memory, children, cpu_s, wait_for
from paired import Figures, Found, Goal, Quantity, Result, in_turn, publish, ratio, table
from peers import python

OURS, BARE, PEER = KINDS = ("tracking_init", "no tracking", "flytekitplugins-wandb")
RANKS, ROUNDS = 8, 5
RUN = {"project": "bench", "entity": "recorded", "id": "one"}

QUANTITIES = (
    Quantity("others_s", "call of the task to the last of the seven other ranks in its function, s", "{:.2f}"),
    Quantity("others_cpu_s", "processor time of the seven until then, with their helpers, s", "{:.2f}"),
    Quantity("others_pss", "memory of the seven with their helpers, PSS, MiB", "{:.0f}"),
    Quantity("others_rss", "the same, RSS, MiB", "{:.0f}"),
    Quantity("first_s", "call of the task to rank 0 in its function, s", "{:.2f}"),
    Quantity("all_cpu_s", "processor time of all eight until then, s", "{:.2f}"),
    Quantity("all_pss", "memory of all eight, PSS, MiB", "{:.0f}"),
    Quantity("helpers", "helper processes of all eight", "{:.0f}"),
    Quantity("runs_opened", "clients that have opened the run", "{:.0f}"),
    Quantity("end_s", "last rank let go to the task's return, s", "{:.2f}"),
)


# In the task's process, and its workers


def train(directory: str) -> None:
    """Tell that this rank is in its function, and what it took; stay until it has been looked at."""
    entered = {"entered": time.time(), "cpu_s": time.process_time(), "pid": os.getpid()}
    place = Path(directory)
    written = place / f"{os.environ['RANK']}.part"
    written.write_text(json.dumps(entered))
    written.rename(place / f"entered-{os.environ['RANK']}")
    wait_for(place / "leave")


def key() -> str:
    return os.environ["WANDB_API_KEY"]


def decorated(kind: str) -> Any:
    if kind == OURS:
        from flyteplugins_tracking import tracking_init

        return tracking_init(**RUN)(train)
    if kind == PEER:
        from flytekitplugins.wandb import wandb_init

        return wandb_init(**RUN, secret=key, api_host=os.environ["WANDB_BASE_URL"])(train)
    return train


def call_task(kind: str, directory: str) -> None:
    from flytekit import task
    from flytekitplugins.kfpytorch import Elastic

    workers = Elastic(
        nnodes=1, nproc_per_node=RANKS, start_method="spawn", monitor_interval=1, increase_shared_mem=False
    )
    call = task(task_config=workers)(decorated(kind))
    called = time.time()
    call(directory=directory)
    Path(directory, "times").write_text(json.dumps({"called": called, "returned": time.time()}))


# In the one who measures


def measure(kind: str) -> Figures:
    """One call of the task."""
    from support.jobs import environment
    from support.wandb_server import WandbServer

    with tempfile.TemporaryDirectory() as name, WandbServer() as server:
        directory = Path(name)
        variables = environment(directory, **server.environment, PYTHONPATH="")
        command = [str(interpreter()), __file__, kind, name]
        job = subprocess.Popen(command, env=variables, cwd=name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for rank in range(RANKS):
                wait_for(directory / f"entered-{rank}", unless=lambda: job.poll() is not None)
            ranks = [json.loads((directory / f"entered-{rank}").read_text()) for rank in range(RANKS)]
            helpers = [children({rank["pid"]}) for rank in ranks]
            took = [rank["cpu_s"] + cpu_s(of_rank) for rank, of_rank in zip(ranks, helpers, strict=True)]
            pids = [{rank["pid"]} | of_rank for rank, of_rank in zip(ranks, helpers, strict=True)]
            others, everything = (Memory.of(set().union(*some)) for some in (pids[1:], pids))
            left = time.time()
            (directory / "leave").touch()
            assert job.wait(90) == 0
        finally:
            leave(job)
        times = json.loads((directory / "times").read_text())
        opened = sum(bool(given.get("host")) for run in server.runs for given in run.upserts)
    return {
        "others_s": max(rank["entered"] for rank in ranks[1:]) - times["called"],
        "others_cpu_s": sum(took[1:]),
        "others_pss": others.pss,
        "others_rss": others.rss,
        "first_s": ranks[0]["entered"] - times["called"],
        "all_cpu_s": sum(took),
        "all_pss": everything.pss,
        "helpers": sum(map(len, helpers)),
        "runs_opened": opened,
        "end_s": times["returned"] - left,
    }


def leave(job: subprocess.Popen[bytes]) -> None:
    """Have nothing stay of a job that has failed: its agent ends its workers."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


@functools.cache
def interpreter() -> Path:
    return python("flytekitplugins-wandb")


def main() -> None:
    for kind in KINDS[1:]:
        measure(kind)  # the files are in memory then
    found = in_turn(KINDS, measure, ROUNDS)
    publish("elastic_node", Result(table("8 ranks in Elastic", QUANTITIES, found), goals(found), found))


def goals(found: Found) -> list[Goal]:
    where = "8 ranks in Elastic, auto: the seven others' "
    whats = {"others_s": "start", "others_cpu_s": "processor time", "others_pss": "memory (PSS)"}
    return [goal(found, key, f"{where}{what}") for key, what in whats.items()]


def goal(found: Found, key: str, what: str) -> Goal:
    ours, peers = ratio(found, key, OURS, BARE), ratio(found, key, PEER, BARE)
    return Goal(what, "at most 1.05x no tracking", f"{ours:.3f}x (the peer: {peers:.2f}x)", ours <= 1.05)


if __name__ == "__main__":
    if sys.argv[1:]:
        call_task(*sys.argv[1:])
    else:
        main()
