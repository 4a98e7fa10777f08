"""One run that has each value of `support/config_values.py` in its config.

Its arguments: "bare", for W&B's client without the library, or a tracker's name; and the project.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.config_values import ENDLESS, REFUSED, VALUES

from flyteplugins_tracking import get_run, tracking_init

TRACKER, PROJECT = sys.argv[1:3]
CASES = [case for case in VALUES if case.is_there and (TRACKER != "bare" or case.bare != ENDLESS)]


def bare() -> None:
    import wandb

    run = wandb.init(project=PROJECT, id="values", config={"first": 1})
    refused = []
    for case in CASES:
        try:
            run.config.update({case.key: case.make()})
        except Exception:
            refused.append(case.key)
            run.config.as_dict()
            run.config._items.pop(case.key, None)
    run.finish()
    Path(os.environ["TRAIN_DIR"], "refused").write_text(json.dumps(dict.fromkeys(refused, REFUSED)))


def tracked() -> None:
    @tracking_init(tracker=TRACKER, project=PROJECT, id="values", config={case.key: case.make() for case in CASES})
    def train() -> None:
        get_run().log({"x": 1})

    train()


bare() if TRACKER == "bare" else tracked()
