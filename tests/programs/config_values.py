"""One run that has each value of `support/config_values.py` in its config.

Its arguments: a tracker's name, and the project.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.config_values import VALUES

from flyteplugins_tracking import get_run, tracking_init

TRACKER, PROJECT = sys.argv[1:3]
CASES = [case for case in VALUES if case.is_there]


@tracking_init(tracker=TRACKER, project=PROJECT, id="values", config={case.key: case.make() for case in CASES})
def train() -> None:
    get_run().log({"x": 1})


train()
