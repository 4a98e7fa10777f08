"""A job that `test_conformance.py` runs, and ends in several ways.

Its arguments: a key of `SCENARIOS`, the tracker's name, its package, the project; "degrade", where that can be had.

What is logged is written down: `logs {rank} {value}` before `log` is called with `value` for the key
`rank{rank}`, and the same with `logged` as soon as it has returned.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flyteplugins_tracking import TrackingError, get_distributed_info, get_run, tracking_init

SCENARIO, TRACKER, PACKAGE, PROJECT = sys.argv[1:5]
DIRECTORY = Path(os.environ["TRAIN_DIR"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
NOTES = (DIRECTORY / f"notes-{os.getpid()}").open("a", buffering=1)
TRACKING = {"tracker": TRACKER, "project": PROJECT, "config": {"lr": 0.1}, "name": "n"}
# Ranks that need not agree on an id are spared torch, 2 s of CPU each; test_torchrun.py has those that agree.
SHARED = {**TRACKING, "run_mode": "shared", "id": "given"}
ROWS = {"shared": 500}
# Of a service that is not there: with the import of its client by four ranks at once, on a busy machine.
INIT_TIMEOUT_S = 15
numbers = iter(range(10_000 * ATTEMPT, 10_000 * ATTEMPT + 10_000))


def note(line: str) -> None:
    NOTES.write(f"{line}\n")


def rank() -> int:
    return get_distributed_info()["rank"]


def log(count: int) -> None:
    run = get_run()
    for _ in range(count if run is not None else 0):
        number = next(numbers)
        note(f"logs {rank()} {number}")
        run.log({f"rank{rank()}": number, "loss": 1 / (number + 1)})
        note(f"logged {rank()} {number}")


def loop() -> None:
    note(f"ready {rank()} {ATTEMPT}")
    while True:
        log(1)
        time.sleep(0.02)


def modes() -> None:
    """One after the other; and last one that fails."""
    for mode in ("auto", "new", "shared"):
        for scope in ("global", "worker"):
            in_mode(mode, scope)
    failing()


def in_mode(mode: str, scope: str) -> None:
    @tracking_init(**TRACKING, run_mode=mode, rank_scope=scope, id=f"{mode}-{scope}")
    def train() -> None:
        first = numbers.__reduce__()[-1]
        log(ROWS.get(mode, 5))
        run = get_run()
        loaded = PACKAGE in sys.modules
        note(f"ran {mode} {scope} {rank()} {run is not None} {loaded} {first} {numbers.__reduce__()[-1]}")
        getattr(run, "finish", lambda: None)()  # as a framework would: the run is not its to end

    train()


@tracking_init(**TRACKING, id="pulse", pulse_s=0.2)
def pulse() -> None:
    note(f"ready {rank()} {ATTEMPT}")
    for other in range(get_distributed_info()["world_size"]):
        wait_for(f"ready {other} {ATTEMPT}\n")
    for _ in range(5):
        log(2)
        time.sleep(0.5)


@tracking_init(**SHARED)
def restarted() -> None:
    log(20)
    note(f"resumed {ATTEMPT} {getattr(get_run(), 'resumed', None)}")
    if ATTEMPT == 0:
        if rank() == 1:
            wait_for("ready 0 0")
            raise ValueError("made to fail")
        loop()


@tracking_init(**TRACKING, id="failing")
def failing() -> None:
    log(20)
    if rank() == 0:
        raise ValueError("made to fail")


@tracking_init(**SHARED)
def looping() -> None:
    loop()


def missing() -> None:
    """The service is not there: first an error, then, if the tracker can, a run in local files."""
    started = time.monotonic()
    try:
        tracking_init(**SHARED, init_timeout_s=INIT_TIMEOUT_S, if_unavailable="raise")(log)(5)
    except TrackingError as error:
        note(f"refused {type(error).__name__} {time.monotonic() - started:.1f}")
    if "degrade" in sys.argv:
        tracking_init(**SHARED, init_timeout_s=10, if_unavailable="degrade")(log)(5)


def wait_for(line: str) -> None:
    while not any(line in path.read_text() for path in DIRECTORY.glob("notes-*")):
        time.sleep(0.05)


SCENARIOS: dict[str, Callable[[], None]] = {
    "modes": modes,
    "pulse": pulse,
    "restart": restarted,
    "sigterm": looping,
    "sigkill": looping,
    "missing": missing,
}

if __name__ == "__main__":
    logging.basicConfig()
    SCENARIOS[SCENARIO]()
    note("returned")
