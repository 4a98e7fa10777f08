"""A job of a run with roles: the owner, or one of its roles. Its settings are the JSON in the first argument.

    tracker, id         of the run; no id for that of the environment
    role                the role; None for the owner
    name, key           the name in files, and the key of the rows, if they are others
    roles               of the owner
    arguments           more arguments of `tracking_init`
    rows                how many rows are logged; each has one number, which no other row of the job has
    first               the first number
    step                whether rows are logged with `step=`, the number
    pause_s             after each row
    calls               expressions that are evaluated before the first row
    begins, ends        files that it waits for: before its function is called, and before that returns
    how                 how its function ends: "return", "raise", "exit 3"

`logged-NAME` has the numbers of the rows whose `log` begins, and has returned; `open-NAME`, `ended-NAME` and `pid-NAME`
tell how far it is. NAME is the role, or "owner".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flyteplugins_tracking import get_run, tracking_init

SETTINGS = {"rows": 10, "first": 0, "step": False, "pause_s": 0.0, "how": "return", **json.loads(sys.argv[1])}
ROLE = SETTINGS.get("role")
NAME = SETTINGS.get("name") or ROLE or "owner"


def wait_for(name: str | None) -> None:
    until = time.monotonic() + 600  # longer than the slowest test: the owner must not end before its roles
    while name is not None and not Path(name).exists() and time.monotonic() < until:
        time.sleep(0.02)


def arguments() -> dict[str, Any]:
    given = {name: SETTINGS[name] for name in ("tracker", "id", "role", "roles") if SETTINGS.get(name) is not None}
    return {"project": "rl", **given, **SETTINGS.get("arguments", {})}


def require_equal(*values: Any) -> None:
    if any(value != values[-1] for value in values):
        raise AssertionError(f"{values} are not equal")


@tracking_init(**arguments())
def work() -> None:
    run = get_run()
    if run is None:  # a rank without a run
        wait_for(f"logs-no-more-{NAME}")
        return
    for call in SETTINGS.get("calls", ()):
        eval(call, {"run": run, "os": os, "tracking_init": tracking_init, "requires": require_equal})
    Path(f"open-{NAME}").touch()
    last = SETTINGS["first"] + SETTINGS["rows"]
    with Path(f"logged-{NAME}").open("a", buffering=1) as logged:
        for number in range(SETTINGS["first"], last):
            logged.write(f"begins {number}\n")
            run.log({SETTINGS.get("key", "rank0"): number}, **({"step": number} if SETTINGS["step"] else {}))
            logged.write(f"logged {number}\n")
            time.sleep(SETTINGS["pause_s"])
    Path(f"logs-no-more-{NAME}").touch()
    wait_for(SETTINGS.get("ends"))
    how, _, code = SETTINGS["how"].partition(" ")
    if how == "raise":
        raise RuntimeError(f"{NAME} has failed")
    if how == "exit":
        raise SystemExit(int(code))


Path(f"pid-{NAME}").write_text(str(os.getpid()))
wait_for(SETTINGS.get("begins"))
work()
Path(f"ended-{NAME}").touch()
