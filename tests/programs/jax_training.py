"""A process of a JAX job, on the CPU. Arguments: the coordinator's port, this process's index, and how it is tracked.

The last is JSON with the arguments of `tracking_init`; "late": JAX is initialised inside of the function; "fails": the
rank whose function raises; "stop": the function runs until `should_stop`, which rank 1 asks for.
What each call saw is written to seen-{call}-{index}.json in TRAIN_DIR.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from flyteplugins_tracking import get_distributed_info, get_run, request_stop, should_stop, tracking_init

PORT, INDEX, HOW = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])


def connect() -> None:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=INDEX)


@tracking_init(**HOW["tracking"])
def train() -> None:
    if HOW.get("late"):
        connect()
    run, info = get_run(), get_distributed_info()
    steps = 0
    while steps < 3 or (HOW.get("stop") and not should_stop()):
        steps += 1
        time.sleep(0.01)  # ranks without a run would be thousands of steps ahead
        if run is not None:
            run.log({"rank": INDEX, "step": steps})
        if HOW.get("stop") and INDEX == 1 and steps == 3:
            request_stop("enough")
    seen: dict[str, Any] = {
        "info": None if info is None else dict(info),
        "truth": [jax.process_index(), jax.process_count()],
        "id": getattr(run, "id", None),
        "group": getattr(run, "group", None),
        "steps": steps,
    }
    directory = Path(os.environ["TRAIN_DIR"])
    call = len([*directory.glob(f"seen-*-{INDEX}.json")])
    (directory / f"seen-{call}-{INDEX}.json").write_text(json.dumps(seen))
    if HOW.get("fails") == INDEX:
        raise ValueError("made to fail")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if not HOW.get("late"):
        connect()
    train()
    if HOW.get("twice"):
        train()
