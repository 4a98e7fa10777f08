"""Ranks that reduce in each step; one of them may be slow, as the argument says. Rank 0 has the run.

"sleeps": rank 2, in its data loading. "shared": rank 1 sleeps, and all ranks log. "until told": none; they do not
meet, and train until there is a file `stop`. Each has written `pid-RANK`, and rank 0 keeps the run's count of silent
ranks in `silent`. "alone": one process, whose steps are heartbeats, and which logs a row when half of them are done.

Arguments: which of these, `pulse_s`, the number of steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, heartbeat, tracking_init

HOW, PULSE_S, STEPS = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
SLOW_S, USUAL_S = 0.15, 0.01
SLOW_RANK = {"sleeps": 2, "shared": 1}.get(HOW)
TRACKING = {"project": "tests", "id": "pulses", "pulse_s": PULSE_S}
SHARED = {"run_mode": "shared", "rank_prefix": True} if HOW == "shared" else {}


def next_batch() -> None:
    time.sleep(SLOW_S if int(os.environ.get("RANK", "0")) == SLOW_RANK else USUAL_S)


@tracking_init(**TRACKING, **SHARED)
def train() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if HOW == "until told":
        Path(f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    for step in range(STEPS):
        next_batch()
        model(torch.ones(2)).sum().backward()
        if HOW != "until told":
            dist.all_reduce(model.weight.grad)
        optimizer.step()
        if get_run() is not None:
            get_run().log({"step": step}, **({"step": step} if SHARED else {}))
        if HOW == "until told" and Path("stop").exists():
            break
        if HOW == "until told" and get_run() is not None and step % 20 == 0:
            Path("silent").write_text(str(get_run().summary.get("ranks/silent")))
    dist.barrier()


@tracking_init(**TRACKING)
def train_alone() -> None:
    for step in range(STEPS):
        time.sleep(USUAL_S)
        heartbeat()
        if step == STEPS // 2:
            get_run().log({"step": step})


if __name__ == "__main__":
    train_alone() if HOW == "alone" else train()
