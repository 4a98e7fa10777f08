"""A sweep whose trials are torchrun jobs of two ranks, started by W&B's own agent.

Without arguments it makes the sweep and starts the agent, which starts it again with an argument. Each rank of each
trial writes what it had to `{run id}-{rank}.json`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from flyteplugins_tracking import (
    get_run,
    get_sweep_id,
    get_sweep_parameters,
    tracking_init,
    tracking_sweep,
)

DIRECTORY = Path(os.environ["TRAIN_DIR"])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@tracking_init()
def train() -> None:
    run, x, rank = get_run(), get_sweep_parameters()["x"], os.environ["RANK"]
    seen = [x, run and run.id, get_sweep_id()]
    Path(DIRECTORY, f"{os.environ['WANDB_RUN_ID']}-{rank}.json").write_text(json.dumps(seen))
    if run is not None:
        run.log({"x": x})
    if (x, rank) == (2, "0"):
        raise ValueError("made to fail")


@tracking_sweep(
    method="grid",
    parameters={"x": {"values": [1, 2]}},
    project="p",
    entity="e",
    program=__file__,
    command=[*TORCHRUN, "${program}", "trial"],
)
def search() -> None:
    subprocess.run([sys.executable, "-m", "wandb", "agent", "--count", "2", f"e/p/{get_sweep_id()}"], check=True)


if "trial" in sys.argv:
    train()
else:
    search()
