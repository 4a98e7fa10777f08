"""A training that does what its argument, a JSON object, says, and writes what this process saw to TRAIN_DIR.

Keys: `tracking`: the decorator's arguments. `rows`: how many to log. `first_end`: {rank: how its first attempt ends},
with "raise", or "hang" until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flyteplugins_tracking import DistributedInfo, get_distributed_info, get_run, tracking_init

SETTINGS = json.loads(sys.argv[-1])
ATTEMPT = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
# A requeue may kill it at any time from here on.
LAUNCHER = os.getppid()


@tracking_init(**{"project": "p", **SETTINGS.get("tracking", {})})
def train() -> None:
    run, info = get_run(), get_distributed_info()
    for row in range(SETTINGS.get("rows", 3)):
        if run is not None:
            run.log({"row": row, "attempt": ATTEMPT})
    report(run, info)
    if ATTEMPT == 0:
        end(SETTINGS.get("first_end", {}).get(str(info.rank if info else 0)))


def end(how: str | None) -> None:
    if how == "raise":
        raise ValueError("made to fail")
    if how == "hang":
        deadline = time.monotonic() + 120
        while os.getppid() == LAUNCHER and time.monotonic() < deadline:
            time.sleep(0.1)
        # Without cgroups, as here, Slurm loses the workers of an agent that it has killed.
        os.kill(os.getpid(), signal.SIGKILL)


def report(run: Any, info: DistributedInfo | None) -> None:
    """Written elsewhere and moved, so that who waits for it reads all of it."""
    seen = {
        "info": dict(info) if info else None,
        "job": os.environ["SLURM_JOB_ID"],
        "step": os.environ.get("SLURM_STEP_ID"),
        "attempt": ATTEMPT,
        "run_id": run.id if run is not None else None,
        "wandb_loaded": "wandb" in sys.modules,
        "slurm": {name: value for name, value in os.environ.items() if name.startswith("SLURM_")},
    }
    path = Path(os.environ["TRAIN_DIR"], f"{os.getpid()}.json")
    path.with_suffix(".part").write_text(json.dumps(seen))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    train()
