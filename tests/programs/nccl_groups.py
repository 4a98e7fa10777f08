"""The results of `process_group` on ranks with a GPU each. Each writes to `{rank}.json`."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from flyteplugins_tracking import process_group

RANK, LAST = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1

for _ in range(2):
    with process_group(timeout_s=60) as device:
        seen = {"device": str(device), "backend": dist.get_backend(), "rank": dist.get_rank()}
        total = torch.tensor(float(RANK), device=device)
        dist.all_reduce(total)
        seen["sum"] = total.item()
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
