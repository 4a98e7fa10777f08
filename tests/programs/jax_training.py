"""A process of a JAX job, on the CPU. Arguments: the coordinator's port, this process's index, and how it is tracked.

The last is JSON with the arguments of `tracking_init`; "late": JAX is initialised inside of the function; "twice": it
is called twice.
What each call saw is written to seen-{call}-{index}.json in TRAIN_DIR.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

PORT, INDEX, HOW = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])


def connect() -> None:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=INDEX)


@tracking_init(**HOW["tracking"])
def train() -> None:
    if HOW.get("late"):
        connect()
    run, info = get_run(), get_distributed_info()
    for step in (1, 2, 3):
        if run is not None:
            run.log({"rank": INDEX, "step": step})
    seen: dict[str, Any] = {
        "info": None if info is None else dict(info),
        "truth": [jax.process_index(), jax.process_count()],
        "id": getattr(run, "id", None),
        "group": getattr(run, "group", None),
    }
    directory = Path(os.environ["TRAIN_DIR"])
    call = len([*directory.glob(f"seen-*-{INDEX}.json")])
    (directory / f"seen-{call}-{INDEX}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if not HOW.get("late"):
        connect()
    train()
    if HOW.get("twice"):
        train()
