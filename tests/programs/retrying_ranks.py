"""Each rank's first training fails, and its caller tries another one. In the second one rank 1 exits."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking import tracking_init

RANK = os.environ["RANK"]


@tracking_init(project="tests", id="first")
def fails() -> None:
    raise KeyError("handled")


@tracking_init(project="tests", id="second")
def exits() -> None:
    Path(os.environ["TRAIN_DIR"], f"second-{RANK}").touch()
    while len(list(Path(os.environ["TRAIN_DIR"]).glob("second-*"))) < 2:
        time.sleep(0.02)
    if RANK == "1":
        sys.exit(9)
    time.sleep(60)


with suppress(KeyError):
    fails()
exits()
