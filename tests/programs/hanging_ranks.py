"""Three ranks that reduce in each step, until rank 1 hangs for a while, as the argument says; rank 0 has the run.

"sleeps": in `next_batch`. "holds the GIL": in C. "is stopped": by SIGSTOP. Before it hangs, all ranks have evaluated
for longer than the timeout, with heartbeats.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from flyteplugins_tracking import get_run, heartbeat, tracking_init

TIMEOUT_S, HANG_S = float(sys.argv[2]), float(sys.argv[3])


def next_batch() -> None:
    time.sleep(HANG_S)


def holds_the_gil() -> None:
    ctypes.PyDLL(None).usleep(int(HANG_S * 1e6))


def is_stopped() -> None:
    if os.fork() == 0:
        time.sleep(HANG_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def evaluate() -> None:
    until = time.monotonic() + 1.5 * TIMEOUT_S
    while time.monotonic() < until:
        time.sleep(TIMEOUT_S / 20)
        heartbeat()


HANGS = {"sleeps": next_batch, "holds the GIL": holds_the_gil, "is stopped": is_stopped}


@tracking_init(project="tests", id="hangs", hang_timeout_s=TIMEOUT_S)
def train() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(4):
        if get_run() is not None:
            get_run().log({"step": step})
        if step == 1:
            evaluate()
        if step == 2 and dist.get_rank() == 1:
            HANGS[sys.argv[1]]()
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    train()
