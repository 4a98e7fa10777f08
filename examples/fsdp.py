# torchrun --nproc-per-node=2 fsdp.py    # FSDP2 needs torch 2.6
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flyteplugins_tracking as tracking


def gather(values: dict[str, float]) -> dict[str, float] | None:  # collective
    rows = [values] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object({key: float(values[key]) for key in values}, rows)
    if rows is None:
        return None
    own = {f"rank_{i}/{k}": r[k] for i, r in enumerate(rows) for k in r}
    means = {f"{k}/mean": sum(r[k] for r in rows) / len(rows) for k in values}
    return own | means


@tracking.tracking_init(project="examples", name="fsdp", config={"lr": 1e-2})
def train(steps: int) -> None:
    run = tracking.get_run()  # W&B's run on rank 0, None on the other ranks
    with tracking.process_group() as device:  # NCCL on GPUs, else gloo
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        model = torch.nn.Linear(16, 1).to(device)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            loss = model(torch.randn(32, 16, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            row = gather({"loss": loss, "norm": norm.full_tensor()})
            if run is not None:
                run.log(row)


if __name__ == "__main__":
    train(steps=20)
