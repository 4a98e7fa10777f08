# torchrun --nproc-per-node=2 fsdp.py    # FSDP2 needs torch 2.6
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flyteplugins_tracking as tracking


@tracking.tracking_init(project="examples", name="fsdp", config={"lr": 1e-2})
def train(steps: int) -> None:
    run = tracking.get_run()  # W&B's run on rank 0, None on the other ranks
    with tracking.process_group() as device:  # NCCL on GPUs, else gloo
        ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh(device.type, (ranks,))
        first, last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)
        model = torch.nn.Sequential(first, torch.nn.ReLU(), last).to(device)
        for layer in (first, last, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            x = torch.randn(32, 16, device=device)
            target = x.sum(dim=1, keepdim=True)
            loss = torch.nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            values = {"loss": loss, "norm": norm.full_tensor()}
            row = tracking.gather_metrics(values)  # on every rank
            if run is not None:
                run.log(row)


if __name__ == "__main__":
    train(steps=20)
