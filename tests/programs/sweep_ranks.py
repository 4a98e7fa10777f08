"""A sweep under torchrun: each rank tells what it had in each trial."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed

from flyteplugins_tracking import (
    ConfigError,
    get_run,
    get_sweep_id,
    get_sweep_parameters,
    sweep_agent,
    tracking_init,
    tracking_sweep,
)

RANK = int(os.environ["RANK"])
seen: list[object] = []


@tracking_init(run_mode=sys.argv[1])
def objective() -> None:
    run, x = get_run(), get_sweep_parameters()["x"]
    total = torch.tensor(float(x))
    torch.distributed.all_reduce(total)
    seen.append([x, total.item(), run.id if run else None, "wandb" in sys.modules])
    if run is not None:
        run.log({"total": total.item()})
    if (x, RANK) == (2, 1):
        raise ValueError("made to fail")
    if (x, RANK) == (3, 0):
        sys.exit(3)


@tracking_sweep(method="grid", parameters={"x": {"values": [1, 2, 3, 4]}}, project="p", entity="e")
def search() -> None:
    if RANK == 0:
        from wandb.agents.pyagent import Agent

        Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
    try:
        sweep_agent(objective)
    except ConfigError as error:
        seen.append(str(error))
    torch.distributed.init_process_group("gloo")
    sweep_agent(objective, count=4)
    seen.append(get_sweep_id())


search()
seen.append(get_sweep_parameters())
Path(os.environ["TRAIN_DIR"], f"rank-{RANK}.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
