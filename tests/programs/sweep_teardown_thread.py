"""Logs while another thread tears W&B's client down."""

import threading
import time

import wandb

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(id="outer")
def train() -> None:
    run = get_run()
    run.log({"x": 0})
    session = run._wl
    thread = threading.Thread(target=wandb.teardown)
    thread.start()
    while not session._connection._client._writer.is_closing():
        time.sleep(0.001)
    run.log({"x": 1})
    thread.join()


train()
