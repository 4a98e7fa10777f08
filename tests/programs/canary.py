"""A training with an API key, for `test_secrets.py`.

Arguments: where the key is, in a "variable" or a "callable"; and `init_timeout_s`.
It writes the file `ready` when it has logged, goes on when `go` is there, and prints all that could hold the key.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flyteplugins_tracking import TrackerUnavailableError, get_run, tracking_init

logging.basicConfig(level=logging.DEBUG)
SECRET: dict[str, Any] = {"variable": {}, "callable": {"secret": lambda: os.environ["MY_KEY"] + "\n"}}[sys.argv[1]]


@tracking_init(
    project="tests",
    config={"lr": 1},
    if_unavailable="raise",
    init_timeout_s=float(sys.argv[2]),
    kill_after_s=6,
    **SECRET,
)
def train() -> None:
    get_run().log({"x": 1})
    Path("ready").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    print(pickle.dumps(train), repr(get_run()), vars(get_run().settings).keys())


try:
    train()
except TrackerUnavailableError:
    traceback.print_exc()
