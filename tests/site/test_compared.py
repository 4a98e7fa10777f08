"""The table of the README that compares: each cell is measured, with the real clients and a server that records.

A job has two ranks. Its training (`compared.py`) logs 50 rows on one of them, and then meets what the row is about.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import flyte2_pods, jobs, kills
from support.loopback import Fault
from support.waiting import wait_until
from support.wandb_server import WandbServer

ROWS = 50  # as `compared.py` logs
README = (Path(__file__).parents[2] / "README.md").read_text()
CLIENTS = {
    "bare": "wandb",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "flyte": "flyteplugins.wandb",
    "ours": "flyteplugins_tracking",
}
OTHERS = [name for name in CLIENTS if name != "ours"]
CASES = (
    "a requeue",
    "SIGTERM",
    "SIGTERM in a collective",
    "another rank raises",
    "an outage at the start",
    "no internet",
    "a pipeline's last rank",
)
SLURM = {
    "SLURM_CLUSTER_NAME": "gpu",
    "SLURM_JOB_ID": "4711",
    **dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"), "1"),
}


class Measured:
    """A job of a client, and what came of it."""

    def __init__(self, client: str, case: str, directory: Path, server: WandbServer) -> None:
        self.client, self.case, self.directory, self.server = client, case, directory, server
        self.env = {**server.environment, "WANDB_INIT_TIMEOUT": "5"}  # seconds; 90 unless given

    def start(self, attempt: int = 0, **more: str) -> jobs.Process:
        env = {**self.env, **more}
        if self.client == "flyte":
            case = {"module": "compared_flyte2", "COMPARED": self.case}
            return flyte2_pods.start("workers", self.directory, attempt=attempt, **case, **env)
        if self.case == "a requeue":
            env |= {**SLURM, **({"SLURM_RESTART_COUNT": str(attempt)} if attempt else {})}
        command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), jobs.PROGRAMS / "compared.py"]
        return jobs.start([*command, self.client, self.case], self.directory, env)

    def wait(self, job: jobs.Process) -> None:
        """Wait until both ranks have logged, or the job has ended."""
        ready = [self.directory / f"ready-{rank}" for rank in (0, 1)]
        wait_until(lambda: job.poll() is not None or all(path.exists() for path in ready))
        time.sleep(1)  # until rank 0 is in its collective

    def go(self) -> None:
        (self.directory / "go").touch()

    def run(self) -> str:
        """Run the job, and return the cell."""
        if self.case == "an outage at the start":
            self.server.fault = Fault.refuse()
        job = self.start(**({"WANDB_MODE": "offline"} if self.case == "no internet" else {}))
        self.wait(job)
        self.server.fault = None
        if self.case.startswith("SIGTERM"):
            os.kill(job.pid, signal.SIGTERM)
        elif self.case == "a requeue":
            kills.kill_with_children(job.pid)
            jobs.finish(job, self.directory)
            self.go()
            job = self.start(attempt=1)
        elif self.case == "no internet":
            return self.sent(job)
        elif self.case != "another rank raises":
            self.go()
        done = jobs.finish(job, self.directory)
        if self.case == "an outage at the start" and self.client == "ours":
            self.send("flyteplugins-tracking", "send", "wandb")
        return self.cell(done)

    def sent(self, job: jobs.Process) -> str:
        """Send what the job logs to files, as from a login node, and return the cell."""
        directories = [str(path) for path in (self.directory / "wandb").glob("offline-run-*")]
        command = ["wandb", "beta", "sync", "--live", *directories]
        if self.client == "ours":
            command = ["flyteplugins-tracking", "send", "--watch", "--until-done", "wandb"]
        sender = self.start_sender(*command)
        with suppress(TimeoutError):
            self.server.wait_for(lambda: self.rows() == ROWS, 60)
        is_live = self.rows() == ROWS
        self.go()
        jobs.finish(job, self.directory)
        jobs.finish(sender, self.directory)
        assert self.rows() == ROWS
        return "all rows, live" if is_live else "all rows, at its end"

    def start_sender(self, program: str, *arguments: str) -> jobs.Process:
        path = Path(sys.executable).with_name(program)
        return jobs.start([path, *arguments], self.directory, self.server.environment, cold=True)

    def send(self, program: str, *arguments: str) -> None:
        jobs.finish(self.start_sender(program, *arguments), self.directory)

    def rows(self) -> int:
        """How many of the training's rows the server has. Lightning logs the last one again in later steps."""
        return len({row["row"] for run in self.server.runs for row in run.rows if "row" in row})

    def cell(self, done: jobs.Done) -> str:
        runs = self.server.runs
        if not self.rows():
            if self.case == "an outage at the start":
                assert not (self.directory / "ready-0").exists(), done.output
                return "an error"
            if self.case == "a pipeline's last rank":
                return "no rows"
        state = f'"{runs[-1].state}"' if runs[-1].state in ("running", "finished") else runs[-1].state  # which is wrong
        rows = "all rows" if self.rows() == ROWS * (1 + (self.case == "a requeue")) else "rows missing"
        if self.case == "a requeue":
            return f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {rows}"
        if self.case == "another rank raises" and "failure/rank" in runs[-1].summary:
            state += ", the rank named"
        if self.case in ("an outage at the start", "a pipeline's last rank"):
            return rows
        return f"{state}, {rows}"


def cells() -> dict[tuple[str, str], str]:
    """The README's, by client and case. What stands in brackets is not measured."""
    table = README.partition("\n## Compared\n")[2].partition("|---|")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[1:]:
        case, first, *others = (re.sub(r" \(.*?\)", "", text).strip() for text in line.strip("|").split("|"))
        bare, _, accelerate = first.partition("; Accelerate: ")
        texts = (bare, accelerate or bare, *others)
        found |= {(client, case): text for client, text in zip(CLIENTS, texts, strict=True)}
    return found


def test_the_table_has_each_case_for_each_client():
    assert [*cells()] == [(client, case) for case in CASES for client in CLIENTS]


@pytest.mark.sampled_full(2)
@pytest.mark.full
@pytest.mark.parametrize("client", ["ours", *(pytest.param(name, marks=pytest.mark.wide) for name in OTHERS)])
@pytest.mark.parametrize("case", CASES)
def test_a_cell_is_what_is_measured(client, case, tmp_path):
    if find_spec(CLIENTS[client]) is None:
        pytest.skip(f"{CLIENTS[client]} is not installed")
    with WandbServer() as server:
        assert Measured(client, case, tmp_path, server).run() == cells()[client, case]
