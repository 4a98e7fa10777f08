"""The job of the pictures of a restart: rank 0 is killed, at step KILL_AT or by a command, and goes on."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

CHECKPOINT = Path("checkpoint")


@tracking_init(
    tracker="trackio",
    project="llm",
    name="llm-7b",
    run_file="run.json",  # the next job continues it
)
def train(steps: int) -> None:
    """Train, on two ranks. The curve is that of no model."""
    run, info = get_run(), get_distributed_info()
    assert info is not None
    start = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    for step in range(start, steps):
        noise = random.Random(step).gauss(0, 0.05)  # a step has the same loss in each attempt
        if run is not None:
            run.log({"loss": 2.2 * math.exp(-step / 70) + 0.9 + noise, "attempt": info.restart_count + 1}, step=step)
            if step in (start, steps - 1) or step % 50 == 0:
                print(f"rank 0, process {os.getpid()}: step {step}", flush=True)
                Path("pid").write_text(str(os.getpid()))
            if step % 50 == 0:
                CHECKPOINT.write_text(str(step + 1))
            if str(step) == os.environ.get("KILL_AT"):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    train(steps=240)
