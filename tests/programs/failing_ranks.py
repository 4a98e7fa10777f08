"""A training whose ranks end as the argument, a JSON object, says: the others go on until they are ended, or 60 s.

Keys: `how`: {rank: "raise", "exit 7", "interrupt", "kill", "sys.exit TEXT", "sys.exit 0", "handled" or
"lingering"}; `winner`: a rank that returns when all of them have ended so; `fail_attempts`: `how` holds for the
attempts below it; `collectives`: whether each step has one; `torch`: whether each rank imports it; `while_opening`:
whether a rank ends while rank 0 opens its run; `tracking`: the decorator's arguments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

SETTINGS = json.loads(sys.argv[-1])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
DIRECTORY = Path(os.environ["TRAIN_DIR"])
LONGEST_S = 60


def train() -> None:
    info = get_distributed_info()
    assert info is not None
    how = SETTINGS["how"].get(str(info.rank)) if SETTINGS.get("fail_attempts", 1) > ATTEMPT else None
    if get_run() is not None:
        get_run().log({"attempt": ATTEMPT})
    if not SETTINGS.get("while_opening"):
        wait_for_all(info.rank, info.world_size)
    if how is not None:
        end(how)
    if SETTINGS.get("fail_attempts", 1) <= ATTEMPT:
        return
    if SETTINGS.get("winner") == info.rank:
        wait_for_failures()
        return
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not Path(DIRECTORY, "over").exists():
        step()


def wait_for_all(rank: int, world_size: int) -> None:
    """Nobody fails before all have entered."""
    Path(DIRECTORY, f"entered-{ATTEMPT}-{rank}").touch()
    while len(list(DIRECTORY.glob(f"entered-{ATTEMPT}-*"))) < world_size:
        time.sleep(0.02)
    step()


def wait_for_failures() -> None:
    """Each rank that is to fail has left its function, or its process has ended."""
    for rank in SETTINGS["how"]:
        pid = Path(DIRECTORY, f"failing-{rank}")
        while not pid.exists() or not (Path(DIRECTORY, f"left-{rank}").exists() or has_ended(pid.read_text())):
            time.sleep(0.01)


def has_ended(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def open_slowly() -> None:
    """Have rank 0 open its run for half a second longer, busy with Python, and another rank wait for that.

    At the end of the opening: a signal waits 5 s for an opening, and a busy machine may need them for all of it.
    """
    opening = Path(DIRECTORY, "opening")
    if os.environ["RANK"] != "0":
        while not opening.exists():
            time.sleep(0.02)
        return
    import wandb

    init = wandb.init

    def slow_init(*args: Any, **kwargs: Any) -> Any:
        run = init(*args, **kwargs)
        opening.touch()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # the thread that sees the other's end waits for the interpreter's lock
            pass
        return run

    wandb.init = slow_init


def step() -> None:
    if SETTINGS.get("collectives"):
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
    time.sleep(0.05)


def end(how: str) -> None:
    info = get_distributed_info()
    pid = Path(DIRECTORY, f".failing-{info and info.rank}")
    pid.write_text(str(os.getpid()))
    pid.rename(pid.with_name(pid.name[1:]))
    if how in ("raise", "handled", "lingering"):
        raise ValueError("made to fail")
    if how.startswith("sys.exit "):
        sys.exit({"0": 0, "7": 7}.get(how.removeprefix("sys.exit "), how.removeprefix("sys.exit ")))
    if how == "exit 7":
        os._exit(7)
    if how == "interrupt":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if SETTINGS.get("collectives"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
    if SETTINGS.get("torch"):
        import torch.distributed  # noqa: F401
    if SETTINGS.get("while_opening"):
        open_slowly()
    try:
        tracking_init(**{"project": "tests", **SETTINGS.get("tracking", {})})(train)()
    except ValueError:
        if SETTINGS["how"].get(os.environ.get("RANK")) != "handled":
            raise
    finally:
        if os.environ.get("RANK") in SETTINGS["how"]:
            Path(DIRECTORY, f"left-{os.environ['RANK']}").touch()
        if SETTINGS["how"].get(os.environ.get("RANK", "")) == "lingering":
            time.sleep(3)
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            Path(DIRECTORY, "over").touch()  # mpirun does not reach a rank that a shell has started
