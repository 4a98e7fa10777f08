"""Opens a run at a service that is away, or refuses.

The argument is a JSON object: `tracking`: the decorator's arguments; `fails`: whether the function raises.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from flyteplugins_tracking import get_run, tracking_init

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])


def train() -> None:
    print("BODY", get_run() is not None, flush=True)
    get_run().log({"x": 1})
    if SETTINGS.get("fails"):
        raise ValueError("made to fail")


if __name__ == "__main__":
    tracking_init(project="tests", id="run0x", **SETTINGS["tracking"])(train)()
