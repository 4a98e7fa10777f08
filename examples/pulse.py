"""Which rank is slow: all meet in each step, and the last loads slowly.

torchrun --nproc-per-node=4 examples/pulse.py
"""

import sys
import time

import torch
import torch.distributed as dist

from flyteplugins_tracking import get_run, process_group, tracking_init

PULSE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 15


@tracking_init(project="examples", pulse_s=PULSE_S)
def train(steps: int) -> None:
    """Log the loss. `ranks/slowest` and its like come along with it."""
    run = get_run()
    with process_group("gloo"):
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            batch = load_batch()
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            if run is not None:
                run.log({"loss": loss.item()})


def load_batch() -> torch.Tensor:
    """Slow on the last rank."""
    time.sleep(0.2 if dist.get_rank() == dist.get_world_size() - 1 else 0.01)
    return torch.randn(4, 8)


if __name__ == "__main__":
    train(steps=int(8 * PULSE_S / 0.2))
