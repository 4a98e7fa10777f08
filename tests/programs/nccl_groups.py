"""The results of `process_group` and `gather_metrics` on ranks with a GPU each. Each writes to `{rank}.json`."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from flyteplugins_tracking import gather_metrics, process_group

RANK, LAST = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1

for attempt in range(2):
    with process_group(timeout_s=60) as device:
        seen = {"device": str(device), "backend": dist.get_backend(), "rank": dist.get_rank()}
        torch.cuda.set_device(0)  # as in a new thread
        metrics = {
            "loss": torch.tensor(RANK + 0.5, device=device, dtype=torch.bfloat16),
            "norm": torch.tensor([float(RANK)], device=device, requires_grad=True),
            "host": torch.tensor(RANK),
            "number": attempt,
        }
        seen["gathered"] = gather_metrics(metrics, ("sum",))
        try:
            seen["bad"] = gather_metrics({"loss": torch.zeros(2, device=device) if RANK == LAST else 1.0})
        except Exception as error:
            seen["bad"] = f"{type(error).__name__}: {error}"
        with process_group("nccl") as joined:
            seen["joined"] = str(joined)
    seen["destroyed"] = not dist.is_initialized()

try:
    with process_group(timeout_s=60) as device:
        dist.all_reduce(torch.ones(1, device=device))
        raise KeyError("mine")
except KeyError:
    seen["after an exception"] = not dist.is_initialized()

Path(f"{RANK}.json").write_text(json.dumps(seen))
with process_group(timeout_s=60) as device:
    dist.barrier()
    if RANK == LAST:
        raise ValueError("made to fail")
    dist.barrier()
    torch.cuda.synchronize()
