"""Measure how late rows are that `send --watch` sends, beside `wandb beta sync --live`, and when it tells the state.

A job logs offline at 1, 10 and 100 rows a second. Each of the two sends its own run to a recording server of its own.
Then the job is killed. make bench ROWS=watch, or `python benchmarks/watch.py SECONDS`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.wandb_server import WandbServer

JOB = """
import os, sys, time
from flyteplugins_tracking import get_run, tracking_init
@tracking_init(project="p", id="run")
def train():
    for n in range(10**9):
        get_run().log({"n": n, "at": time.time()})
        open("logged.part", "w").write(str(n))
        os.replace("logged.part", "logged")
        time.sleep(1 / float(sys.argv[1]))
train()
"""
OWN = [sys.executable, "-m", "flyteplugins_tracking", "send", "--watch", "."]
WANDB = [sys.executable, "-m", "wandb", "beta", "sync", "--live"]
# How long the state is looked for after the kill, in seconds.
STATE_S = 150.0
# At which rate, and how long the last rows may take at the others, in seconds.
STATE_RATE, LAST_S = 10, 25.0


def measure(is_own: bool, rate: float, seconds: float) -> str:
    with WandbServer() as server, tempfile.TemporaryDirectory() as folder:
        env, root = {**os.environ, **server.environment}, str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")])
        quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        job = subprocess.Popen([sys.executable, "-c", JOB, str(rate)], env={**env, "WANDB_MODE": "offline"}, **quiet)
        while not (Path(folder) / "logged").exists():
            time.sleep(0.05)
        (directory,) = Path(folder).glob("wandb/offline-run-*")
        sender = subprocess.Popen(OWN if is_own else [*WANDB, str(directory)], env=env, **quiet)
        late: dict[int, float] = {}

        def look() -> None:
            for row in [row for run in server.runs for row in run.rows[len(late) :]]:
                late.setdefault(row["n"], time.time() - row["at"])

        until = time.monotonic() + seconds
        while time.monotonic() < until:
            look()
            time.sleep(0.1)
        job.kill()
        job.wait()
        killed_at, logged = time.monotonic(), int((Path(folder) / "logged").read_text()) + 1
        while time.monotonic() < killed_at + (STATE_S if rate == STATE_RATE else LAST_S) and (
            not server.runs or server.runs[0].state == "running"
        ):
            look()
            time.sleep(0.1)
        took, state = time.monotonic() - killed_at, server.runs[0].state if server.runs else "no run"
        rows = [row["n"] for run in server.runs for row in run.rows]
        sender.kill()
        sender.wait()
        delays = sorted(late.values()) or [float("nan")]
        return (
            f"{'send --watch' if is_own else 'beta sync --live':16} {rate:4g} rows/s: logged {logged}, arrived "
            f"{len(set(rows))}, twice {len(rows) - len(set(rows))}; late: median {statistics.median(delays):.1f} s, "
            f"at most {delays[-1]:.1f} s; {took:.0f} s after the SIGKILL: {state}"
        )


if __name__ == "__main__":
    for is_own in (True, False):
        for rate in (1, 10, 100):
            print(measure(is_own, rate, float(sys.argv[1]) if len(sys.argv) > 1 else 60), flush=True)
