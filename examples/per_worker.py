r"""One run for each worker (= node), in one group: for a node's load.

On each of two nodes:
torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \
    --rdzv-endpoint=FIRST_NODE:29500 examples/per_worker.py

Without a W&B account: `export WANDB_MODE=offline` first. The runs are
`{base}-worker-0` and `{base}-worker-1`, and their group is `{base}`.
"""

import os
import socket
import time

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


@tracking_init(project="examples", rank_scope="worker")
def train(steps: int) -> None:
    """Only local rank 0 of each worker has a run."""
    run, info = get_run(), get_distributed_info()
    if run is not None:
        run.config.update(
            {
                "host": socket.gethostname(),
                "worker": info.worker_index if info else 0,
            }
        )
    for _ in range(steps):
        began = time.monotonic()
        time.sleep(0.05)  # stands for a step of the training
        if run is not None:
            step_s = time.monotonic() - began
            run.log({"step_s": step_s, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    train(steps=10)
