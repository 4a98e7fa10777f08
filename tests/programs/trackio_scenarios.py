"""Runs of Trackio that `test_trackio_jobs.py` disturbs from outside. Argument: the name of a function below.

Two of them need more:
    `names_unsent_files`: `default` to have no TRACKIO_DIR, `chosen` to keep it.
    `tries_tokens`: the URL of a server and its write token.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trackio

from flyteplugins_tracking import TrackerUnavailableError, get_run, tracking_init

ARGUMENTS = sys.argv[2:]
TRACKING: dict[str, Any] = {"tracker": "trackio", "project": "p", "id": "i"}


def wait_for(name: str) -> None:
    while not os.path.exists(name):
        time.sleep(0.05)


def log(count: int) -> None:
    for number in range(count):
        get_run().log({"a": number})


def goes_back() -> None:
    """Logs the steps 0 to 9, and in a second attempt 6 to 8."""

    @tracking_init(**TRACKING)
    def train(attempt: int, steps: range) -> None:
        for step in steps:
            get_run().log({"attempt": attempt}, step=step)

    train(0, range(10))
    train(1, range(6, 9))


@tracking_init(**TRACKING, kill_after_s=4)
def fails_while_the_files_are_locked() -> None:
    """Logs one row, then 49 more when the file `locked` is there, and raises."""
    get_run().log({"a": 0})
    Path("opened").touch()
    wait_for("locked")
    for number in range(1, 50):
        get_run().log({"a": number})
    raise ValueError("made to fail")


@tracking_init(**TRACKING, run_mode="shared", init_timeout_s=1)
def joins_a_run() -> None:
    """Fails, since no primary rank opens the run."""


def names_unsent_files() -> None:
    """Prints the files that a run leaves behind, and the command that sends them."""
    os.environ.pop("HF_HOME", None)
    if ARGUMENTS == ["default"]:
        del os.environ["TRACKIO_DIR"]
    handle = tracking_init(**TRACKING)(lambda: get_run().tracking)()
    print("UNSENT", [(each, handle.how_to_send("trackio")) for each in handle.unsent()])


def meets_a_mute_hub() -> None:
    """Has a Hugging Face token, and a hub that accepts connections and never answers."""
    mute = socket.create_server(("127.0.0.1", 0))
    os.environ.update(HF_TOKEN="hf_none", HF_ENDPOINT=f"http://127.0.0.1:{mute.getsockname()[1]}")
    tracking_init(**TRACKING)(lambda: log(1))()


def tries_tokens() -> None:
    """Opens a run with no token, a wrong one and the right one. Half of the rows are logged after the file `gone`."""
    url, right = ARGUMENTS
    for token in ("", "wrong", right):

        @tracking_init(
            **TRACKING,
            server_url=url,
            secret=lambda token=token: token,
            kill_after_s=6,
            init_timeout_s=20,
            if_unavailable="raise",
            config={"lr": 0.1},
        )
        def train() -> None:
            run = get_run()
            print("URL", run.tracking.url)
            trackio.config["late"] = 1
            for number in range(100):
                run.log({"a": number, "nan": float("nan")})
            Path("opened").touch()
            wait_for("gone")
            for number in range(100, 200):
                run.log({"a": number})

        try:
            train()
        except TrackerUnavailableError as error:
            print("REFUSED", error)


SCENARIOS: tuple[Callable[[], None], ...] = (
    goes_back,
    fails_while_the_files_are_locked,
    joins_a_run,
    names_unsent_files,
    meets_a_mute_hub,
    tries_tokens,
)

if __name__ == "__main__":
    logging.basicConfig()
    {scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()
