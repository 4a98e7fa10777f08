"""A training with any tracker that logs rows until it is killed, or until the file `stop` is there.

Arguments: the tracker, the project. A row has one number, which no other row has, and is written down when its `log`
has returned: in `logged-PID`.
"""

import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

TRACKER, PROJECT = sys.argv[1:3]
STEP_S = 0.005


@tracking_init(tracker=TRACKER, project=PROJECT, id="killed")
def train() -> None:
    attempt = len(list(Path().glob("logged-*")))
    with Path(f"logged-{os.getpid()}").open("a", buffering=1) as logged:
        for number in range(attempt * 100_000, (attempt + 1) * 100_000):
            get_run().log({"rank0": number})
            logged.write(f"{number}\n")
            time.sleep(STEP_S)
            if Path("stop").exists() and number % 100_000 > 20:
                return


train()
