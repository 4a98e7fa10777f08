"""Trainings with a shared run, for `test_shared.py`. Arguments: a function's name, and the function's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

RANK = int(os.environ.get("RANK", 0))
PATIENCE_S, ENDLESS_S = 120, 600


def wait_for(names: Iterable[str]) -> None:
    """Wait until these files are there."""
    for name in names:
        while not Path(name).exists():
            time.sleep(0.02)


def three_times() -> None:
    """Three trainings in one process, which the ranks leave one after the other."""

    @tracking_init(project="tests", run_mode="shared")
    def train(n: int) -> None:
        get_run().log({"n": n, "rank": RANK})
        time.sleep(RANK / 2)
        get_run().log({"n": n + 0.5, "rank": RANK})

    for n in range(3):
        train(n)


def one_after_the_other() -> None:
    """Each node begins when the function of the one before it has returned."""
    number = int(os.environ["GROUP_RANK"])

    @tracking_init(project="tests", run_mode="shared", id="late", kill_after_s=PATIENCE_S)
    def train() -> None:
        get_run().log({"number": number})
        print("resumed", get_run().resumed)
        Path(f"returns-{number}").touch()

    wait_for(f"returns-{before}" for before in range(number))
    time.sleep(0.5)  # the one before has been told to end its run, and waits
    train()


def primary_last() -> None:
    """Rank 0 opens the run when rank 1 has logged to it."""

    @tracking_init(project="tests", run_mode="shared", id="late", kill_after_s=PATIENCE_S)
    def train() -> None:
        print("resumed", get_run().resumed, flush=True)
        get_run().log({"number": RANK})
        if RANK == 1:
            wait_for(["go"])

    if RANK == 0:
        wait_for(["go"])
    train()


def restarted(primary_rank: str = "0") -> None:
    """Two attempts fail on rank 1 when every rank has logged; the third one returns."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    @tracking_init(project="tests", id="restarted", run_mode="shared", primary_rank=int(primary_rank))
    def train() -> None:
        run = get_run()
        run.log({"rank": RANK, "attempt": attempt}, step=attempt)
        Path(f"seen-{RANK}-{attempt}").write_text(f"{run.id} {run.resumed}")
        if attempt < 2:
            wait_for(f"seen-{rank}-{attempt}" for rank in range(3))
            time.sleep(0.5 if RANK == 1 else ENDLESS_S)
            raise ValueError

    train()


def with_children(who: str = "parent") -> None:
    """Every rank starts this program again while its function runs."""

    @tracking_init(project="tests", id="with-children", run_mode="shared", init_timeout_s=30)
    def train() -> None:
        get_run().log({"who": who})
        if who == "parent":
            subprocess.run([sys.executable, __file__, "with_children", "child"], check=True)
        get_run().log({"who": f"{who}, at last"})

    train()


def uncommitted() -> None:
    """Rows in several calls, some of which hold what W&B refuses."""

    @tracking_init(project="tests", run_mode="shared")
    def train() -> None:
        run = get_run()
        for step in range(3):
            run.log({"loss": step}, step=step, commit=False)
        run.log({"eval": 1}, step=3)
        run.log({"bad": object()}, commit=False)
        try:
            run.log({"good": 1})
        except TypeError:
            run.log({"told": 1})
        run.log({"bad": object()}, commit=False)

    train()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
