"""Four ranks that reduce in each step; one of them is slow, at the place that the argument says. Rank 0 has the run.

"sleeps": rank 2, in its data loading. "computes": rank 3, in Python that holds the GIL. "is stopped": rank 1, by
SIGSTOP, once. "alone": one process, whose steps are heartbeats.

Arguments: where, `pulse_s`, the number of steps, the tracker.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from flyteplugins_tracking import get_run, heartbeat, tracking_init

HOW, PULSE_S, STEPS, TRACKER = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
SLOW_S, USUAL_S = 0.15, 0.01
SLOW_RANK = {"sleeps": 2, "computes": 3, "is stopped": 1}.get(HOW)


def next_batch(step: int) -> None:
    if int(os.environ.get("RANK", "0")) != SLOW_RANK:
        time.sleep(USUAL_S)
    elif HOW == "computes":
        until = time.monotonic() + SLOW_S
        while time.monotonic() < until:
            sum(range(1000))
    elif HOW == "sleeps":
        time.sleep(SLOW_S)
    elif step == STEPS // 2 and os.fork() == 0:
        time.sleep(6 * PULSE_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    elif step == STEPS // 2:
        os.kill(os.getpid(), signal.SIGSTOP)


@tracking_init(project="tests", id="pulses", tracker=TRACKER, pulse_s=PULSE_S)
def train() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        next_batch(step)
        model(torch.ones(2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        if get_run() is not None:
            get_run().log({"step": step})
    dist.barrier()


@tracking_init(project="tests", id="pulses", tracker=TRACKER, pulse_s=PULSE_S)
def train_alone() -> None:
    for step in range(STEPS):
        time.sleep(USUAL_S)
        heartbeat()
        if step == STEPS - 1:
            get_run().log({"step": step})


if __name__ == "__main__":
    train_alone() if HOW == "alone" else train()
