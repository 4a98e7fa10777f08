"""Attempts of a run that log their steps, and end in the way they are told, from the checkpoint of the one before.

The argument is a JSON list: for each attempt its last step, and how it ends then: "return", "raise", or the name of a
signal that rank 0 sends to itself. The checkpoint is of every tenth step. TRACKER is the tracker. ATTEMPT is the number
of the attempt if no launcher counts it. COLUMN is the column in which rows have their step, instead of `step=`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("ATTEMPT", "0")))
LAST, HOW = json.loads(sys.argv[1])[ATTEMPT]
COLUMN = os.environ.get("COLUMN")
CHECKPOINT = Path("checkpoint")


def end() -> None:
    if HOW == "raise":
        raise ValueError("made to fail")
    if HOW != "return":
        os.kill(os.getpid(), getattr(signal, HOW))
        time.sleep(60)


@tracking_init(tracker=os.environ.get("TRACKER", "wandb"), project="tests", id="attempts")
def train() -> None:
    first = int(CHECKPOINT.read_text()) + 1 if CHECKPOINT.exists() else 0
    if COLUMN and get_run() is not None:
        get_run().define_metric("*", step_metric=COLUMN)
    for step in range(first, LAST + 1):
        time.sleep(0.02)
        if get_run() is not None:
            if COLUMN:
                get_run().log({"step_s": 0.02, COLUMN: step})
            else:
                get_run().log({"step_s": 0.02}, step=step)
            if step % 10 == 0:
                CHECKPOINT.write_text(str(step))
    if get_run() is not None:
        end()
    elif HOW != "return":
        time.sleep(60)  # the launcher ends it


train()
