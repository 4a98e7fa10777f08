"""Opens a run at a service that is away, or refuses: once, or with a watchdog's alarm.

The argument is a JSON object: `tracking`: the decorator's arguments; `watchdog`: the names of exceptions: a function is
called for each when the file `go-NUMBER` is there, and a handler of SIGALRM, which somebody sends, raises it. `fails`:
whether the function raises.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from flyteplugins_tracking import get_run, tracking_init

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])


class OwnError(Exception):
    pass


def train() -> None:
    print("BODY", get_run() is not None, flush=True)
    get_run().log({"x": 1})
    if SETTINGS.get("fails"):
        raise ValueError("made to fail")


def call(number: int) -> BaseException | None:
    tracking = {"project": "tests", "id": f"run{number}x", **SETTINGS["tracking"]}
    try:
        tracking_init(**tracking)(train)()
    except BaseException as error:
        return error
    return None


def call_with_watchdog(number: int, name: str) -> None:
    kinds = {kind.__name__: kind for kind in (TimeoutError, ConnectionResetError, OSError, OwnError, KeyboardInterrupt)}
    raised: list[BaseException] = []

    def bark(*_: object) -> NoReturn:
        raised.append(kinds[name]("the watchdog"))
        raise raised[-1]

    signal.signal(signal.SIGALRM, bark)
    Path("pid").write_text(str(os.getpid()))
    while not Path(f"go-{number}").exists():
        time.sleep(0.02)
    error = call(number)
    Path(f"called-{number}").touch()
    print("WATCHDOG", name, error is not None and error in raised, repr(error), flush=True)


if __name__ == "__main__":
    for number, name in enumerate(SETTINGS.get("watchdog", [])):
        call_with_watchdog(number, name)
    if "watchdog" not in SETTINGS:
        error = call(0)
        print("ENDED", type(error).__name__, flush=True)
        if error is not None:
            raise error
