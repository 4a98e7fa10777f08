"""A rank with a run: it writes the file `ready` when it has logged a row, and goes on until its input is closed."""

import sys
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="p", id="one")
def train() -> None:
    get_run().log({"x": 1})
    Path("ready").touch()
    sys.stdin.read()


train()
