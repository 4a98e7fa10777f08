"""A sweep whose project, entity and search come from its decorator and from two blocks. Writes its id to `seen`."""

import json
from pathlib import Path

from flyteplugins_tracking import get_sweep_id, tracking_config, tracking_sweep, tracking_sweep_config


@tracking_sweep(method="grid", parameters={"x": {"values": [1]}}, description="d", run_cap=2)
def search() -> None:
    Path("seen").write_text(json.dumps(get_sweep_id()))


with tracking_config(project="p", entity="e"), tracking_sweep_config(method="random", project="q", description="x"):
    search()
