"""Ranks of uneven speeds that meet in a collective in each step, and stop at the same one. Rank 0 has the run.

The argument is a JSON object. `step_s`: the seconds of a step of each rank. `asks`: who asks for the stop in attempt 0:
[rank, step, how]; how: "request", or the name of a signal that it sends to itself. `never`: ranks that do not call
`should_stop()`. `ignores`: they call it, and go on. `steps`: how many there are; without, they are endless. `tracking`:
arguments of the decorator.

Each rank writes down its last step, and keeps it as its checkpoint, which the next attempt goes on from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, request_stop, should_stop, tracking_init

SETTINGS = json.loads(sys.argv[1])
RANK, ATTEMPT = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
CHECKPOINT = Path(f"checkpoint-{RANK}")
ENDLESS = 1_000_000


def note(what: str, step: int) -> None:
    path = Path(f"{what}-{RANK}-{ATTEMPT}")
    path.with_suffix(".new").write_text(str(step))
    path.with_suffix(".new").rename(path)


def ask(step: int) -> None:
    for rank, at, how in SETTINGS.get("asks", ()):
        if (rank, at, 0) != (RANK, step, ATTEMPT):
            continue
        if how == "request":
            request_stop("a reason")
        else:
            os.kill(os.getpid(), getattr(signal, how))


@tracking_init(project="tests", id="stops", **SETTINGS.get("tracking", {}))
def train() -> None:
    import torch
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = int(CHECKPOINT.read_text()) + 1 if CHECKPOINT.exists() else 0
    step = first
    try:
        for step in range(first, SETTINGS.get("steps", ENDLESS)):
            time.sleep(SETTINGS["step_s"][RANK])
            if "RANK" in os.environ:
                dist.all_reduce(torch.ones(1))
            if get_run() is not None:
                get_run().log({"step": step})
            if step == 2:
                note("trains", step)
            ask(step)
            if RANK not in SETTINGS.get("never", ()) and should_stop() and not SETTINGS.get("ignores"):
                CHECKPOINT.write_text(str(step))
                note("stopped", step)
                return
        note("finished", step)
    finally:
        note("unwound", step)


if __name__ == "__main__":
    train()
    note("returned", 0)
