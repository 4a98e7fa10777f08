import os

import torch
from torch.nn.parallel import DistributedDataParallel

import flyteplugins_tracking as tracking

FILE, STEPS = "checkpoint.pt", 10_000  # a file that all nodes see


@tracking.tracking_init(project="examples", stop_before_s=600)
def train() -> None:
    run, info = tracking.get_run(), tracking.get_distributed_info()
    with tracking.process_group() as device:  # NCCL on GPUs, else gloo
        model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = {"step": 0}
        if os.path.exists(FILE):
            state = torch.load(FILE, weights_only=True, map_location=device)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(state["step"], STEPS):
            loss = model(torch.rand(16, 8, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run is not None:
                run.log({"loss": loss.item(), "train_step": step})
            stop = tracking.should_stop()  # the same on all ranks
            if (info is None or info.rank == 0) and (stop or step % 100 == 99):
                state = {"model": model.state_dict(), "step": step + 1}
                state["optimizer"] = optimizer.state_dict()
                torch.save(state, f"{FILE}.part")
                os.replace(f"{FILE}.part", FILE)  # a kill leaves a whole file
            if stop:
                break


if __name__ == "__main__":
    train()
