"""A training with any tracker that logs rows until it is killed, or until the file `stop` is there.

Arguments: the tracker, the project; and how many rows are logged, at once, if it is to end by itself. A row has one
number, which no other row has, and is written down when its `log` has returned: in `logged-PID`. The files
`opening-PID` and `ending-PID` say that the run is opened and ended from then on. IF_UNAVAILABLE and
INIT_TIMEOUT_S are arguments of the run's.
"""

import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

TRACKER, PROJECT = sys.argv[1:3]
ROWS = int(sys.argv[3]) if len(sys.argv) > 3 else None
STEP_S = 0.005 if ROWS is None else 0.0
FEWEST = 20


@tracking_init(
    tracker=TRACKER,
    project=PROJECT,
    id="killed",
    if_unavailable=os.environ.get("IF_UNAVAILABLE", "raise"),
    init_timeout_s=float(os.environ.get("INIT_TIMEOUT_S", "30")),
)
def train() -> None:
    first = len(list(Path().glob("opening-*"))) * 100_000
    with Path(f"logged-{os.getpid()}").open("a", buffering=1) as logged:
        for count in range(100_000):
            if count == ROWS or (Path("stop").exists() and count > FEWEST):
                break
            get_run().log({"rank0": first + count})
            logged.write(f"{first + count}\n")
            time.sleep(STEP_S)
    Path(f"ending-{os.getpid()}").touch()


Path(f"opening-{os.getpid()}").touch()
train()
