# torchrun --nproc-per-node=4 modes.py auto    # or: shared, new
import sys
import time
from typing import Any

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

MODE: Any = sys.argv[1] if len(sys.argv) > 1 else "auto"
SCOPE: Any = sys.argv[2] if len(sys.argv) > 2 else "global"  # or: worker


@tracking_init(project="examples", run_mode=MODE, rank_scope=SCOPE)
def train(steps: int) -> None:
    run, info = get_run(), get_distributed_info()
    rank = info.rank if info else 0
    for step in range(steps):
        time.sleep(0.02)  # stands for a step of the training
        if run is not None:
            run.log({f"rank_{rank}/loss": (1 + rank) / (step + 1)}, step=step)
    print(f"rank {rank}: {'no run' if run is None else run.id}")


if __name__ == "__main__":
    train(steps=10)
