"""The job of the picture of a failure: 4 ranks, of which rank 2 gets a bad batch."""

from __future__ import annotations

import time

from flyteplugins_tracking import get_distributed_info, get_run, process_group, tracking_init


@tracking_init(project="llm", id="llm-7b")
def train(steps: int) -> None:
    """Train until rank 2 fails. The other ranks then wait for it in a collective."""
    import torch.distributed as dist

    run, info = get_run(), get_distributed_info()
    assert info is not None
    with process_group("gloo"):
        for step in range(steps):
            batch = load_batch(step, info.rank)
            dist.barrier()
            if run is not None:
                run.log({"loss": 1 / (step + 1), "batch": batch})
            time.sleep(0.01)


def load_batch(step: int, rank: int) -> int:
    """Fail on rank 2 at step 90."""
    if rank == 2 and step == 90:
        raise ValueError("batch 90 has no label")
    return step


if __name__ == "__main__":
    train(steps=200)
