# torchrun --nproc-per-node=4 slow_rank.py    # the last rank loads slowly
import sys
import time

import torch
import torch.distributed as dist

import flyteplugins_tracking as tracking

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 15


@tracking.tracking_init(
    project="examples",
    pulse_s=SECONDS,  # every 15 s, which rank the others wait for
    hang_timeout_s=300,  # no row for 5 minutes: where each rank is
)
def train(steps: int) -> None:
    run = tracking.get_run()
    with tracking.process_group("gloo"):
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        for step in range(steps):
            time.sleep(0.2 if is_last else 0.01)  # stands for loading data
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            if run is not None:
                run.log({"loss": loss.item(), "train_step": step})
        for _ in range(100):  # an evaluation that logs nothing
            tracking.heartbeat()  # so that it does not count as a hang


if __name__ == "__main__":
    train(steps=int(8 * SECONDS / 0.2))
