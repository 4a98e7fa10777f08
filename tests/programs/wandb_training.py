"""One training with the decorator's arguments of the command line, in JSON. It logs a row and prints what its run is.

The variable SECRET_FROM names the one that `secret=` reads the key from, with a newline behind it as a file has.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from flyteplugins_tracking import get_run, tracking_init

ARGUMENTS: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if "SECRET_FROM" in os.environ:
    ARGUMENTS["secret"] = lambda: os.environ[os.environ["SECRET_FROM"]] + "\n"


@tracking_init(**ARGUMENTS)
def train() -> None:
    assert "SECRET_FROM" not in os.environ or "WANDB_API_KEY" not in os.environ
    run = get_run()
    if run is not None:
        run.log({"x": 1})
        print("RUN", json.dumps([run.id, run.group, run.name, run.project, run.disabled]))


train()
